"""Noise by row, place and step, as in mmspec, for other implementations that draw canvases with torch."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from mmspec.core.random_stream import Purpose, RandomStream
from mmspec.families.diffusion_gemma.renoise import uniform_tokens


@dataclass
class Noise:
    """Noise of one row.

    Attributes:
        seed: of the row.
        length, steps, vocabulary: of its canvases.
    """

    seed: int
    length: int
    steps: int
    vocabulary: int
    begin: int = field(init=False)
    step: int = field(init=False, default=1)

    def __post_init__(self) -> None:
        self.stream = RandomStream.from_seed([self.seed], 1)
        self.begin = -self.length

    def at(self, step: int) -> tuple[RandomStream, Tensor]:
        places = self.begin + torch.arange(self.length)
        return self.stream.repeat(self.length).at(torch.full((self.length, 1), step)), places

    def begins(self) -> Tensor:
        self.begin, self.step = self.begin + self.length, 0
        return uniform_tokens(*self.at(0), self.vocabulary)[None]

    def draws(self, probabilities: Tensor) -> Tensor:
        self.step = self.steps if self.step == 0 else self.step - 1
        stream, places = self.at(self.step)
        gumbel = stream.gumbel(places[:, None], Purpose.REDRAW, self.vocabulary, torch.float32)[:, 0]
        return (probabilities.log() + gumbel).argmax(-1, keepdim=True)

    def fills(self) -> Tensor:
        return uniform_tokens(*self.at(self.step), self.vocabulary)[None]
