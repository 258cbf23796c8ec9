"""Rendered words, and the training of CPPD (2307.12270) on them."""

from __future__ import annotations

import random
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from mmspec.training.record import write_record
from mmspec_extras.cppd import CPPD, CPPDConfig
from mmspec_extras.cppd.modeling import pixels_of

__all__ = ["render_word", "sample_word", "score_words", "train_words"]

LONGEST = 10
TRAINING_SEEDS = 1_000_000  # seeds below are held out
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


def train_words(
    out: str | Path,
    *,
    minutes: float = 10.0,
    alphabet: str = CPPDConfig.alphabet,
    longest: int = LONGEST,
    hidden_size: int = 128,
    batch_size: int = 32,
    rate: float = 1e-3,
) -> Path:
    """Train a recogniser of random words, and save it as a folder.

    Args:
        out: the folder to write.
        minutes: duration.
        alphabet, hidden_size: of the model.
        longest: number of characters of the longest words.
        batch_size: words per step, new ones in each.
        rate: largest learning rate; it falls to zero.
    """
    torch.manual_seed(0)
    model = CPPD(CPPDConfig(alphabet=alphabet, hidden_size=hidden_size))
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    began, step, done = time.monotonic(), 0, 0.0
    while done < 1.0:
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / 100) * (1 - done)
        seeds = range(TRAINING_SEEDS + step * batch_size, TRAINING_SEEDS + (step + 1) * batch_size)
        words = [sample_word(seed, alphabet, longest) for seed in seeds]
        lines = [render_word(word, seed) for word, seed in zip(words, seeds, strict=True)]
        optimizer.zero_grad()
        model.loss(pixels_of(lines), words).backward()
        optimizer.step()
        step, done = step + 1, (time.monotonic() - began) / 60 / minutes
    model.eval().save_pretrained(out)
    write_record(
        Path(out),
        {"steps": step, "batch_size": batch_size, "minutes": minutes, "right": score_words(model, longest)},
    )
    return Path(out)


def score_words(model: CPPD, longest: int = LONGEST, words: int = 200) -> float:
    """Return the share of held-out words that are read right in every character."""
    asked = [sample_word(seed, model.config.alphabet, longest) for seed in range(words)]
    lines = [render_word(word, seed) for seed, word in enumerate(asked)]
    found = model.recognise(lines)
    return sum(one == other for one, other in zip(found, asked, strict=True)) / words
