"""Attribute accuracy of generated images, scored by a reader that was trained on rendered scenes only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, permutations
from pathlib import Path

import numpy as np
import torch
from einops import rearrange
from PIL import Image
from torch import Tensor

from mmspec.assets import reference_models
from mmspec.errors import InputError
from mmspec.evaluation.quality.feature_network import SCENES, FeatureNetwork, weights_digest
from mmspec.scenes import ImagePrompt, parse_image_prompt
from mmspec.scenes.reader import AttributeReader, ImageReading, load_reader

__all__ = ["AttributeJudge", "facts_present", "scenes_network"]

Images = Tensor | Sequence[Image.Image]
BATCH = 64
BACKGROUND = "background"
READER, HAS_READER = "reader", "scenes-llamagen"


class AttributeJudge:
    """Compares images with their prompts; PIL images or a tensor [n, 3, H, W] in [0, 1], of any size."""

    def __init__(self, reader: AttributeReader) -> None:
        self.reader = reader.eval()
        self.size = int(reader.config.vision["image_size"])

    @classmethod
    def of_model(cls, folder: str | Path) -> AttributeJudge:
        """Load the judge of a model: the reader in its folder, or else that of the reference models.

        Raises:
            CheckpointError: neither exists.
        """
        own, reference = Path(folder) / READER, reference_models().get(HAS_READER)
        return cls(load_reader(own if own.is_dir() or reference is None else reference / READER))

    def read(self, images: Images) -> list[ImageReading]:
        """Read the objects and the background of each image."""
        return [reading for pixels in self._batches(images) for reading in self.reader.read(pixels)]

    def features(self, images: Images) -> Tensor:
        """Feature vectors [n, width] of images, for distances between sets of images."""
        return torch.cat([self.reader.features(pixels) for pixels in self._batches(images)])

    def classify(self, images: Images) -> Tensor:
        """Logits [n, classes] of the first object's colour and shape, for the inception score."""
        return torch.cat([self.reader.classify(pixels) for pixels in self._batches(images)])

    def facts(self, images: Images, captions: Sequence[str]) -> list[list[tuple[str, bool]]]:
        """Facts that each caption states, and whether its image shows them.

        Raises:
            InputError: a caption names no object, or the numbers of captions and images differ.
        """
        if len(images) != len(captions) or not captions:
            raise InputError("captions", len(captions), f"must have one for each of the {len(images)} images")
        prompts = [_parse(text, index) for index, text in enumerate(captions)]
        return list(map(facts_present, prompts, self.read(images)))

    def _batches(self, images: Images) -> Iterator[Tensor]:
        for start in range(0, len(images), BATCH):
            chosen = images[start : start + BATCH]
            yield self._pixels(chosen).to(self.reader.device, self.reader.dtype)

    def _pixels(self, images: Images) -> Tensor:
        """Images [n, 3, size, size] in [-1, 1]."""
        if not isinstance(images, Tensor):
            size = (self.size, self.size)
            shown = [image if image.size == size else image.resize(size) for image in images]
            arrays = [np.asarray(image.convert("RGB")) for image in shown]
            images = rearrange(torch.from_numpy(np.stack(arrays)), "n h w c -> n c h w") / 255
        if images.dim() != 4 or images.shape[1] != 3:
            raise InputError("images", tuple(images.shape), "must have the shape [n, 3, H, W]")
        if images.shape[2:] != (self.size, self.size):
            images = torch.nn.functional.interpolate(
                images, (self.size, self.size), mode="bilinear", antialias=True
            )
        return images * 2 - 1


def facts_present(prompt: ImagePrompt, reading: ImageReading) -> list[tuple[str, bool]]:
    """List the facts that a prompt states, by name, and whether the image shows each.

    The prompt's objects are matched with the image's objects so that most facts are correct: from left to
    right if the prompt states that order, otherwise in any order. An unmatched object counts as missing.
    """
    fewer = min(len(prompt.objects), len(reading.objects))
    arrange = combinations if prompt.ordered else permutations
    best = max(
        (
            [*_object_facts(prompt.objects, dict(zip(some, others, strict=True)))]
            for some in combinations(range(len(prompt.objects)), fewer)
            for others in arrange(reading.objects, fewer)
        ),
        key=lambda facts: sum(seen for _, seen in facts),
    )
    if prompt.background is not None:
        best.append((BACKGROUND, reading.background == prompt.background))
    return best


def _object_facts(
    objects: Sequence[tuple[str | None, ...]], seen: Mapping[int, tuple[str, ...]]
) -> Iterator[tuple[str, bool]]:
    """Facts of the prompt's objects, given the object of the image that each is matched with."""
    names = ("size", "colour", "pattern", "shape")
    for index, wanted in enumerate(objects):
        others = seen.get(index, (None,) * len(names))
        for name, value, other in zip(names, wanted, others, strict=True):
            if value is not None:
                yield name, value == other


def _parse(text: str, index: int) -> ImagePrompt:
    prompt = parse_image_prompt(text)
    if prompt is None:
        raise InputError(f"captions[{index}]", text, "must name an object, such as 'a red ring'")
    return prompt


def scenes_network(judge: AttributeJudge) -> FeatureNetwork:
    """Feature network of a judge: mean state of all patches, and colour and shape of the first object.

    The network was trained on scenes only and has few features. Do not compare its scores with those of
    Inception.
    """
    return FeatureNetwork(
        name=SCENES,
        width=int(judge.reader.config.vision["hidden_size"]),
        identity=weights_digest(judge.reader),
        preprocessing=f"{judge.size} x {judge.size}, bicubic where sizes differ, 2 x - 1",
        features=lambda images: judge.features(images).float().cpu(),
        classify=lambda images: judge.classify(images).float().cpu(),
    )
