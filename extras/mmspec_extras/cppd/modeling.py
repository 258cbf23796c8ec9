"""CPPD (2307.12270): a recogniser of text lines that reads all characters in one forward pass.

Each of P position queries reads one character, or the end. Two further losses teach the visual features what
the line contains: how often each character occurs, and which positions there are.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from huggingface_hub.dataclasses import strict
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from transformers import PreTrainedConfig, PreTrainedModel

from mmspec.errors import InputError
from mmspec.open_types import Keywords

__all__ = ["CPPD", "CPPDConfig", "Reading"]

LINE = (128, 32)  # width and height of an image in pixels
STRIDE = 8


@strict
class CPPDConfig(PreTrainedConfig):
    """Config of a recogniser.

    Attributes:
        alphabet: the characters that it reads.
        positions: number P of position queries; lines have fewer characters.
        most: largest count of a character; larger counts are taken for it.
        hidden_size, layers, heads: of the encoder, and of each branch of the decoder.
    """

    model_type = "cppd"

    alphabet: str = string.ascii_lowercase + string.digits
    positions: int = 26
    most: int = 4
    hidden_size: int = 128
    layers: int = 2
    heads: int = 4


class Reading(NamedTuple):
    """What a forward pass predicts of B lines.

    Attributes:
        characters: [B, P, A + 1] logits of the character at each position; the last is the end.
        present: [B, P] logits that there is a character.
        counts: [B, A, most + 1] logits of the count of each character.
    """

    characters: Tensor
    present: Tensor
    counts: Tensor


class CPPD(PreTrainedModel):
    """The recogniser: a convolutional stem, an encoder of its cells, and queries of positions and characters.

    Example:
        >>> model = CPPD(CPPDConfig(hidden_size=32)).eval()
        >>> len(model.recognise([Image.new("L", (200, 40))]))
        1
    """

    config: CPPDConfig
    config_class = CPPDConfig
    base_model_prefix = "cppd"
    main_input_name = "pixels"

    def __init__(self, config: CPPDConfig) -> None:
        super().__init__(config)
        size, letters = config.hidden_size, len(config.alphabet)
        widths = 1, size // 4, size // 2, size  # a stride of 8 in all
        stages = [  # without the norms, places would hide the image: its vectors would be 30 times smaller
            (nn.Conv2d(before, after, 3, 2, 1), nn.BatchNorm2d(after), nn.GELU())
            for before, after in zip(widths, widths[1:], strict=False)
        ]
        self.stem = nn.Sequential(*(part for stage in stages for part in stage))
        cells = (LINE[0] // STRIDE) * (LINE[1] // STRIDE)
        how: Keywords = {"dim_feedforward": 2 * size, "dropout": 0.0, "batch_first": True, "norm_first": True}
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(size, config.heads, **how), config.layers, nn.LayerNorm(size), False
        )
        self.counter, self.pointer, self.reader = (
            nn.TransformerDecoder(
                nn.TransformerDecoderLayer(size, config.heads, **how), layers, nn.LayerNorm(size)
            )
            for layers in (config.layers, config.layers, 1)
        )
        self.cells, self.positions, self.letters = (
            nn.Parameter(torch.randn(count, size)) for count in (cells, config.positions, letters)
        )
        self.character, self.present = nn.Linear(size, letters + 1), nn.Linear(size, 1)
        self.count = nn.Linear(size, config.most + 1)
        self.post_init()

    def forward(self, pixels: Tensor) -> Tensor:
        """Read lines [B, 1, 32, 128] in [-1, 1]; logits [B, P, A + 1] of their characters."""
        return self.read(pixels, counts=False).characters

    def read(self, pixels: Tensor, counts: bool = True) -> Reading:
        """Predict all of `Reading`; the counts, on which the characters do not depend, only if asked."""
        cells = self.encoder(self.stem(pixels).flatten(2).mT + self.cells)
        many = len(pixels), -1, -1
        found = self.pointer(self.positions.expand(many), cells)
        letters = self.letters.expand(many)
        counted = self.count(self.counter(letters, cells)) if counts else pixels.new_empty(0)
        return Reading(self.character(self.reader(found, cells)), self.present(found)[..., 0], counted)

    def loss(self, pixels: Tensor, texts: Sequence[str]) -> Tensor:
        """Return the sum of the three cross-entropies for lines and their texts."""
        alphabet, ends = self.config.alphabet, torch.full((self.config.positions,), len(self.config.alphabet))
        if any(len(text) >= len(ends) or set(text) - set(alphabet) for text in texts):
            rule = f"must have at most {len(ends) - 1} characters of {alphabet!r}"
            raise InputError("texts", list(texts), rule)
        goal = ends.repeat(len(texts), 1)
        for row, text in zip(goal, texts, strict=True):
            row[: len(text)] = torch.tensor([alphabet.index(each) for each in text], dtype=torch.long)
        goal = goal.to(pixels.device)
        there = goal < len(alphabet)
        letters = torch.arange(len(alphabet), device=pixels.device)
        count = (goal[:, None] == letters[:, None]).sum(-1).clamp_max(self.config.most)
        said = self.read(pixels)
        first_end = (~there).cumsum(1) <= 1  # nothing is read after the end
        return (
            cross_entropy(said.characters[first_end], goal[first_end], label_smoothing=0.1)
            + binary_cross_entropy_with_logits(said.present, there.to(said.present.dtype))
            + cross_entropy(said.counts.flatten(0, 1), count.flatten())
        )

    @torch.no_grad()
    def recognise(self, lines: Sequence[Image.Image]) -> list[str]:
        """Return the texts of images of a line each, in one forward pass."""
        likeliest = self(pixels_of(lines).to(self.device, self.dtype)).argmax(-1).tolist()
        letters = [*self.config.alphabet, "\n"]
        return ["".join(letters[each] for each in row).split("\n")[0] for row in likeliest]


def pixels_of(lines: Sequence[Image.Image]) -> Tensor:
    """Return images of lines as [B, 1, 32, 128] in [-1, 1], on the left; too long ones are narrowed."""
    width, height = LINE
    grey = []
    for line in lines:
        size = min(width, max(1, round(line.width * height / line.height))), height
        pixels = np.asarray(line.convert("L").resize(size), dtype=np.float32)
        grey.append(np.pad(pixels, ((0, 0), (0, width - size[0])), mode="edge"))
    return torch.from_numpy(np.stack(grey))[:, None] / 127.5 - 1
