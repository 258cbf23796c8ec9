"""Opening models that draw images; parts of theirs lie in subfolders, or where the caller says."""

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
        config: of the model.
        parts: where parts lie that the caller names.
        where, how: transformers' keywords: which files, and how the model is put into memory.
        read: loads the processor.
    """

    source: str
    config: PreTrainedConfig
    parts: Mapping[str, str | Path] = {}
    where: Keywords = {}
    how: Keywords = {}
    read: Callable[[], Processor] = lambda: None


def load_whole(found: ModelSource) -> Keywords:
    """Load a model that holds its image tokenizer, and the processor that reads its prompts; see `Family`."""
    check_parts(found)
    return {
        "processor": found.read(),
        "model": load_model(found.source, found.config, **found.where, **found.how),
    }


def check_parts(found: ModelSource, *known: str) -> None:
    """Raise InputError if the caller says where a part lies that such a model does not have."""
    for name, part in found.parts.items():
        if name not in known:
            raise InputError(name, part, f"nothing: this {found.config.model_type} has no such part")


def load_vq(source: str, vq: str | Path | None = None, kind: type[AnyVQ] = VQModel, **where: object) -> AnyVQ:
    """The image tokenizer, in single precision: of the folder `vq` if there is one, else a subfolder.

    Args:
        source, vq, where: the model's folder or hub id; the tokenizer's; and keywords of transformers.
        kind: class of the tokenizer.

    Raises:
        CheckpointError: there is none, or weights are missing, surplus, of another shape, or not finite.
    """
    folder, where = part_of(source, VQ, vq, where)
    where.pop("trust_remote_code", None)
    return load_checked(kind, folder, VQ, "image tokenizer", torch_dtype=torch.float32, **where)


def part_of(source: str, name: str, given: str | Path | None, where: Keywords) -> tuple[str, Keywords]:
    """Locate a part of a checkpoint: its folder or hub id, and the keywords of transformers."""
    if given is not None:
        return check_source(given, name), where
    if Path(source).is_dir() and not (Path(source) / name).is_dir():
        allowed = f"a checkpoint with the subfolder {name!r}; or say where it lies: {name}=..."
        raise CheckpointError(name, source, allowed)
    return source, {**where, "subfolder": name}
