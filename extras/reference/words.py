"""Rendered words, and the training of CPPD (2307.12270) on them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, NamedTuple, Unpack

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor, nn

from mmspec.scenes import training_seeds
from mmspec.training.record import write_record
from mmspec.training.run import RunOptions, Stage, Training, flush_subnormals
from mmspec_extras.cppd import CPPD, CPPDConfig
from mmspec_extras.cppd.modeling import pixels_of
from reference.trainer import finish

__all__ = ["OwnLoss", "render_word", "sample_word", "score_words", "train_words"]

PROGRAM = "python -m extras.reference"
STAGE = 22  # of the seeds of the words
LONGEST = 10
OUTER = ("cells", "positions", "letters", "character.", "present.", "count.")
MARGIN = 4


def sample_word(seed: int, alphabet: str, longest: int = LONGEST) -> str:
    """Sample a random word of 1 to `longest` characters."""
    noise = random.Random(seed)
    return "".join(noise.choices(alphabet, k=noise.randint(1, longest)))


def render_word(word: str, seed: int) -> Image.Image:
    """Draw a word in the default font of Pillow, with a random size, place, contrast and noise."""
    noise = np.random.default_rng(seed)
    font = ImageFont.load_default(int(noise.integers(18, 30)))
    left, top, right, bottom = font.getbbox(word)
    x, y = noise.integers(0, 2 * MARGIN, 2)
    size = int(right - left) + 2 * MARGIN, int(bottom - top) + 2 * MARGIN
    line = Image.new("L", size, int(noise.integers(150, 256)))
    ImageDraw.Draw(line).text((x - left, y - top), word, int(noise.integers(0, 90)), font)
    pixels = np.asarray(line) + noise.normal(0, 12, line.size[::-1])
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


class WordBatch(NamedTuple):
    """Images of lines [B, 1, 32, 128], and their texts."""

    pixels: Tensor
    texts: list[str]

    def to(self, device: torch.device) -> WordBatch:
        """Move the images."""
        return WordBatch(self.pixels.to(device), self.texts)


class OwnLoss(nn.Module):
    """The loss that a model computes of the fields of a batch."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: tuple[Any, ...]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss, and no figures."""
        return self.model.loss(*batch), {}


@flush_subnormals()
def train_words(
    out: str | Path,
    *,
    alphabet: str = CPPDConfig.alphabet,
    longest: int = LONGEST,
    hidden_size: int = CPPDConfig.hidden_size,
    **how: Unpack[RunOptions],
) -> Path:
    """Train a recogniser of random words, new ones in each step, and save it as a folder.

    Args:
        out: the folder to write.
        alphabet, hidden_size: of the model.
        longest: number of characters of the longest words.
        how: see `RunOptions`; the default is 20 minutes, with 32 words per step.

    Returns:
        The folder. Its `training.json` records the training.
    """
    out = Path(out)
    training = Training(out, how, minutes=20.0, batch_size=32, check_s=300.0)
    model = CPPD(CPPDConfig(alphabet=alphabet, positions=longest + 1, hidden_size=hidden_size))

    def make(step: int) -> WordBatch:
        seeds = training_seeds(training.seed, STAGE, step, 0, training.batch_size).tolist()
        words = [sample_word(seed, alphabet, longest) for seed in seeds]
        return WordBatch(pixels_of(list(map(render_word, words, seeds))), words)

    def check(_: nn.Module) -> dict[str, float]:
        return {"right": score_words(model, longest)}

    training.train(Stage("words", OwnLoss(model), make, check, outer=OUTER))

    def save(record: dict[str, Any]) -> None:
        model.eval().save_pretrained(out)
        write_record(out, record)

    options = {"alphabet": alphabet, "longest": longest, "hidden-size": hidden_size, **training.length}
    return finish(training, out, save, command="words", options=options, model=model, program=PROGRAM)


def score_words(model: CPPD, longest: int = LONGEST, words: int = 200) -> float:
    """Return the share of held-out words (seeds from 0) that are read right in every character."""
    asked = [sample_word(seed, model.config.alphabet, longest) for seed in range(words)]
    lines = list(map(render_word, asked, range(words)))
    was_training = model.training
    found = model.eval().recognise(lines)
    model.train(was_training)
    return [one == other for one, other in zip(found, asked, strict=True)].count(True) / words
