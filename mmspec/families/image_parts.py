"""Loading of image models, whose parts are in subfolders or where the caller specifies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from diffusers.models.autoencoders.vq_model import VQModel
from transformers import PreTrainedConfig

from mmspec.errors import CheckpointError, InputError
from mmspec.models.checkpoint import check_source, load_checked, load_model
from mmspec.open_types import Keywords, Processor
from mmspec.targets.image_tokens import AnyVQ

__all__ = [
    *("RAW_CODEBOOK_FILE", "TEXT_ENCODER", "TOKENIZER", "VQ"),
    *("ModelSource", "check_parts", "load_vq", "load_whole", "part_of"),
]

VQ, TEXT_ENCODER, TOKENIZER = "vq", "text_encoder", "tokenizer"
RAW_CODEBOOK_FILE = "raw_codebook.safetensors"  # key "codebook"; neighbour tables use unnormalised distances


class ModelSource(NamedTuple):
    """Location of a model, and the keywords that it is loaded with.

    Attributes:
        source: folder or hub id.
        config: config of the model.
        parts: folders, files or hub ids of parts, by name.
        where: keywords of transformers that select the files.
        how: keywords of transformers that place the model in memory.
        read: loads the processor.
    """

    source: str
    config: PreTrainedConfig
    parts: Mapping[str, str | Path] = {}
    where: Keywords = {}
    how: Keywords = {}
    read: Callable[[], Processor] = lambda: None


def load_whole(found: ModelSource) -> Keywords:
    """Load a model that contains its image tokenizer, and the processor of its prompts; see `Family`."""
    check_parts(found)
    return {
        "processor": found.read(),
        "model": load_model(found.source, found.config, **found.where, **found.how),
    }


def check_parts(found: ModelSource, *known: str) -> None:
    """Raise InputError if the caller passes a part that such a model does not have."""
    for name, part in found.parts.items():
        if name not in known:
            raise InputError(name, part, f"must be left out: this {found.config.model_type} has no such part")


def load_vq(source: str, vq: str | Path | None = None, kind: type[AnyVQ] = VQModel, **where: object) -> AnyVQ:
    """Load an image tokenizer in single precision.

    Args:
        source: folder or hub id of the model.
        vq: folder or hub id of the tokenizer; None for the model's subfolder `vq`.
        kind: class of the tokenizer.
        where: keywords of transformers.

    Raises:
        CheckpointError: there is none, or weights are missing, unused, have wrong shapes, or are not finite.
    """
    folder, where = part_of(source, VQ, vq, where)
    where.pop("trust_remote_code", None)
    return load_checked(kind, folder, VQ, "image tokenizer", torch_dtype=torch.float32, **where)


def part_of(source: str, name: str, given: str | Path | None, where: Keywords) -> tuple[str, Keywords]:
    """Return the folder or hub id of a part of a checkpoint, and the keywords of transformers."""
    if given is not None:
        return check_source(given, name), where
    if Path(source).is_dir() and not (Path(source) / name).is_dir():
        rule = f"must be a subfolder {name!r} of the checkpoint; or pass {name}=..."
        raise CheckpointError(name, source, rule)
    return source, {**where, "subfolder": name}
