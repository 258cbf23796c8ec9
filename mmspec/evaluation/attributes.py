"""How much of what a prompt asks for is in the picture, read by a network that has seen real scenes only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, permutations
from pathlib import Path

import torch
from torch import Tensor

from mmspec.errors import CheckpointError, InputError
from mmspec.models.attribute_reader import AttributeReader, PictureReading
from mmspec.scenes import HELD_OUT_SEEDS, IMAGE_TOKENS, ImagePrompt, caption, parse_image_prompt, sample_scene

__all__ = ["READER", "SceneReader", "held_out_captions", "present"]

READER = "reader"  # folder beside the image model
FIRST_SEED = 500_000  # held out, and apart from the scenes that other evaluations draw
AT_ONCE = 64


def held_out_captions(count: int, seed: int = 0) -> list[str]:
    """Captions of scenes that training never drew; equal arguments give equal captions.

    Raises:
        InputError: more than there are.
    """
    largest = (HELD_OUT_SEEDS.stop - FIRST_SEED) // 2
    if not 1 <= count <= largest or not 0 <= seed <= largest:
        raise InputError("samples", (count, seed), f"1 to {largest} samples, and a seed from 0 to {largest}")
    start = FIRST_SEED + seed
    return [caption(sample_scene(start + index, profile=IMAGE_TOKENS)) for index in range(count)]


def present(prompt: ImagePrompt, reading: PictureReading) -> int:
    """How many of the facts that a prompt asks for are in the picture.

    The objects asked for are laid on those that were read in the way that makes most of them right: from
    left to right where the prompt says who is left, else in any order.
    """
    fewer = min(len(prompt.objects), len(reading.objects))
    arrange = combinations if prompt.ordered else permutations
    found = max(
        sum(
            value is not None and value == seen
            for asked, read in zip(some, others, strict=True)
            for value, seen in zip(asked, read, strict=True)
        )
        for some in combinations(prompt.objects, fewer)
        for others in arrange(reading.objects, fewer)
    )
    return found + (prompt.background is not None and prompt.background == reading.background)


class SceneReader:
    """Reads pictures of scenes.

    Args:
        network: trained on real scenes only.
    """

    def __init__(self, network: AttributeReader) -> None:
        self.network = network.eval().float()

    @classmethod
    def from_pretrained(cls, model: str | Path) -> SceneReader:
        """The reader beside an image model.

        Raises:
            CheckpointError: there is none.
        """
        folder = Path(model) / READER
        if not folder.is_dir():
            raise CheckpointError(
                "model", str(model), f"a folder with the network {READER}/ beside the model"
            )
        return cls(AttributeReader.from_pretrained(folder))

    def attribute_accuracy(self, images: Tensor, captions: Sequence[str]) -> float:
        """Share of the facts asked for that are in the pictures.

        Args:
            images: [n, 3, H, W] in [0, 1].
            captions: n prompts about scenes.

        Raises:
            InputError: a prompt that asks for nothing that can be read.
        """
        asked = right = 0
        for text, reading in zip(captions, self.read(images), strict=True):
            prompt = parse_image_prompt(text)
            if prompt is None:
                raise InputError("captions", text, "a prompt that names an object of the scenes")
            asked += prompt.asked
            right += present(prompt, reading)
        return right / asked

    def read(self, images: Tensor) -> list[PictureReading]:
        """What pictures [n, 3, H, W] in [0, 1] show."""
        return [reading for part in self._parts(images) for reading in self.network.read(part)]

    def features(self, images: Tensor) -> Tensor:
        """[n, width] of pictures [n, 3, H, W] in [0, 1]."""
        return torch.cat([self.network.features(part) for part in self._parts(images)])

    def _parts(self, images: Tensor) -> Iterator[Tensor]:
        yield from (images.to(self.network.device).float() * 2 - 1).split(AT_ONCE)
