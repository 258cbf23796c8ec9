"""Scenes as data for drafters of the reference models, and of any other model."""

from __future__ import annotations

from pathlib import Path

from mmspec.reference.training.scene_conversations import SceneTalk
from mmspec.reference.training.scene_images import SceneImages
from mmspec.targets.llamagen import LlamaGenTarget
from mmspec.training.data.conversations import ConversationReader
from mmspec.training.data.sequences import DrafterData

__all__ = ["scene_data"]


def scene_data(
    target: object, reader: ConversationReader | Path, batch_size: int, seed: int, regenerate: int
) -> DrafterData:
    """Fresh scenes in every step: images for a model that draws, conversations about images for others.

    Arguments are those of `MakeData`; `train_drafter` takes this function as its `data`.
    """
    if isinstance(target, LlamaGenTarget) and isinstance(reader, Path):
        return SceneImages(target, reader, batch_size, seed)
    if isinstance(reader, ConversationReader):
        return SceneTalk(reader, batch_size, seed, regenerate=regenerate)
    raise TypeError(type(reader).__name__)
