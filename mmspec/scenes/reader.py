"""Attribute reader: a small vision transformer that classifies patches, then objects.

The names of the attributes are in its config; it works on images from any source.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import CLIPVisionConfig, CLIPVisionModel, PreTrainedConfig, PreTrainedModel

from mmspec.errors import CheckpointError
from mmspec.open_types import Keywords

__all__ = ["AttributeReader", "AttributeReaderConfig", "ImageReading", "label_heads", "load_reader"]

PRESENT = 0.5  # an object is present if the probability of its rank on its best patch exceeds this


@dataclass(frozen=True, slots=True)
class ImageReading:
    """Contents of an image: the attributes of each object, in reading order, and the background."""

    objects: tuple[tuple[str, ...], ...]
    background: str


@strict
class AttributeReaderConfig(PreTrainedConfig):
    """Config of the attribute reader: its vision tower, and the names of the attribute values.

    Attributes:
        attribute_names: names of an object's attributes, in the order of captions.
        attribute_values: the values of each attribute.
        backgrounds: names of the backgrounds.
        max_objects: number of ranks in reading order.
        vision: settings of `CLIPVisionConfig`.
    """

    model_type = "attribute_reader"

    attribute_names: tuple[str, ...] | list[str] = ()
    attribute_values: tuple[tuple[str, ...], ...] | list[list[str]] = ()
    backgrounds: tuple[str, ...] | list[str] = ()
    max_objects: int = 2
    vision: Keywords = field(default_factory=dict)

    @property
    def classes(self) -> dict[str, int]:
        """Number of classes of each patch label; class 0 means "no object", except for the background."""
        counts = [1 + len(values) for values in self.attribute_values]
        return {
            **dict(zip(self.attribute_names, counts, strict=True)),
            "rank": 1 + self.max_objects,
            "background": len(self.backgrounds),
        }


class AttributeReader(PreTrainedModel):
    """Reads the attributes of objects in images [B, 3, H, W] in [-1, 1].

    Example:
        >>> reader = AttributeReader.from_pretrained("assets/scenes-llamagen/reader")
        >>> reader.read(pixels)[0].objects  # from left to right
        (('small', 'red', 'plain', 'ring'), ('large', 'blue', 'dotted', 'square'))
    """

    config: AttributeReaderConfig
    config_class = AttributeReaderConfig
    main_input_name = "pixels"

    def __init__(self, config: AttributeReaderConfig) -> None:
        super().__init__(config)
        vision = CLIPVisionConfig(**config.vision)
        self.tower = CLIPVisionModel(vision)
        self.heads = label_heads(vision.hidden_size, config.classes)
        self.post_init()

    def forward(self, pixels: Tensor) -> dict[str, Tensor]:
        """Logits [B, patches, classes] of every label."""
        states = self.tower(pixels).last_hidden_state[:, 1:]
        return {name: head(states) for name, head in self.heads.items()}

    @torch.inference_mode()
    def features(self, pixels: Tensor) -> Tensor:
        """Feature vector [B, width] of each image: the mean over its patches, for distances between sets."""
        features: Tensor = self.tower(pixels).last_hidden_state[:, 1:].mean(dim=1)
        return features

    @torch.inference_mode()
    def classify(self, pixels: Tensor) -> Tensor:
        """Logits [B, classes] of the first object in reading order, by colour and shape for example.

        Classes are the combinations of the two attributes with the most values, averaged over the object's
        patches.
        """
        logits = self(pixels)
        weights = logits["rank"].softmax(-1)[..., 1]
        weights = weights / weights.sum(1, keepdim=True)
        names = self.config.attribute_names
        counts = dict(zip(names, map(len, self.config.attribute_values), strict=True))
        most = sorted(names, key=counts.__getitem__)[-2:]
        one, other = [
            torch.einsum("bp,bpc->bc", weights, logits[name][..., 1:].log_softmax(-1))
            for name in names
            if name in most
        ]
        return (one[:, :, None] + other[:, None]).flatten(1)

    @torch.inference_mode()
    def read(self, pixels: Tensor) -> list[ImageReading]:
        """Read the objects of each image. Each patch votes for the object that most probably covers it."""
        logits = self(pixels)
        ranks = logits["rank"].softmax(-1)[..., 1:]  # [B, patches, objects]
        present = (ranks.amax(1) > PRESENT).tolist()
        votes = torch.stack(
            [
                torch.einsum("bpo,bpc->boc", ranks, logits[name].log_softmax(-1)[..., 1:]).argmax(-1)
                for name in self.config.attribute_names
            ],
            dim=-1,
        ).tolist()  # [B, objects, attributes]
        backgrounds = logits["background"].log_softmax(-1).sum(1).argmax(-1).tolist()
        return [
            ImageReading(
                tuple(self._words(vote) for vote, there in zip(voted, seen, strict=True) if there),
                self.config.backgrounds[background],
            )
            for voted, seen, background in zip(votes, present, backgrounds, strict=True)
        ]

    def _words(self, vote: list[int]) -> tuple[str, ...]:
        return tuple(values[index] for values, index in zip(self.config.attribute_values, vote, strict=True))


def label_heads(width: int, classes: Mapping[str, int]) -> nn.ModuleDict:
    """Build a linear layer for each label, from states [..., width] to its number of classes."""
    return nn.ModuleDict({name: nn.Linear(width, count) for name, count in classes.items()})


def load_reader(folder: str | Path) -> AttributeReader:
    """Load a trained reader in single precision.

    Raises:
        CheckpointError: the folder has no trained reader.
    """
    try:
        reader: AttributeReader = AttributeReader.from_pretrained(folder, dtype=torch.float32)
    except (OSError, ValueError) as error:
        raise CheckpointError("reader", str(folder), "must be a folder with a trained reader") from error
    reader.eval()
    return reader
