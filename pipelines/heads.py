"""Trained heads as drafters: tokenizer and vocabulary are those of their target."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from transformers import PreTrainedConfig, PreTrainedModel

from mmspec.accelerators import ACCELERATORS
from mmspec.errors import CheckpointError, InputError
from mmspec.evaluation.machine import reference_models
from mmspec.models.checkpoint import bytes_of, check_source, check_weights, first_line, load_config
from mmspec.models.drafters_file import OwnDrafters, read_drafters
from mmspec.models.eagle import EagleHead
from mmspec.models.eagle import official as eagle_official
from mmspec.models.eagle3 import Eagle3Head
from mmspec.models.eagle3 import official as eagle3_official
from mmspec.models.flash import FlashHead
from mmspec.models.hydra import HydraHead
from mmspec.models.hydra import official as hydra_official
from mmspec.models.medusa import MedusaHead
from mmspec.models.medusa import official as medusa_official
from mmspec.targets import CausalTarget

logger = logging.getLogger(__name__)

#: What `drafter=` has to be, by the name of the drafter in the registry.
HEADS: dict[str, type[PreTrainedModel]] = {
    "eagle": EagleHead,
    "eagle3": Eagle3Head,
    "flash": FlashHead,
    "medusa": MedusaHead,
    "hydra": HydraHead,
}

#: What reads a folder as the authors of a method publish it, and gives None for any other.
PUBLISHED: dict[str, Callable[[Path, PreTrainedConfig], PreTrainedModel | None]] = {
    "eagle": eagle_official.read_official,
    "eagle3": eagle3_official.read_official,
    "medusa": medusa_official.read_official,
    "hydra": hydra_official.read_official,
}
FILES = ["*.json", "*.safetensors", "*.bin", "*.pt"]
NOTHING: dict[str, list[str]] = {"missing_keys": [], "unexpected_keys": []}


def own_drafters(model: str | Path) -> OwnDrafters:
    """The drafters that a model's folder names; those that are not beside it may be reference models.

    Raises:
        CheckpointError: its `drafters.json` cannot be used.
    """
    accelerators = {name: preset.needs_draft_model for name, preset in ACCELERATORS.items()}
    return read_drafters(model, accelerators, reference_models())


def check_head(name: str, model: PreTrainedModel) -> PreTrainedModel:
    """The loaded model itself.

    Raises:
        InputError: it is no head that the drafter of that name runs.
    """
    if not isinstance(model, HEADS[name]):
        raise InputError("drafter", type(model).__name__, what_writes(name))
    return model


def what_writes(name: str) -> str:
    """What is allowed as a head, in words."""
    return f"a head for {name!r}, as `mmspec train drafter --method {name}` writes it"


def load_head(name: str, drafter: str | Path | PreTrainedModel, target: CausalTarget) -> PreTrainedModel:
    """The head that a drafter runs.

    Args:
        name: of the drafter, a key of `HEADS`.
        drafter: folder or hub id of what `mmspec train drafter` wrote or of what the method's authors
            publish, or a loaded head.
        target: whose hidden states it reads, in their dtype and on their device.

    Raises:
        CheckpointError: it cannot be loaded, or is a model of another kind.
        InputError: a loaded model that is no such head.
    """
    kind: Any = HEADS[name]
    if isinstance(drafter, PreTrainedModel):
        return check_head(name, drafter)
    source = check_source(drafter, "drafter")
    if (published := read_published(name, source, target.config)) is not None:
        check_weights(published, NOTHING, source, "drafter")
        logger.info("drafter: %.1f MB of weights, as published", bytes_of(published) / 1e6)
        torch.nn.Module.to(published, device=target.device, dtype=target.dtype)
        published.eval()
        return published
    config = load_config(source, argument="drafter")
    if not isinstance(config, kind.config_class):
        raise CheckpointError("drafter", f"{source}: {config.model_type}", what_writes(name))
    head: PreTrainedModel
    try:
        head, report = kind.from_pretrained(
            source,
            config=config,
            dtype=target.dtype,
            device_map={"": target.device},
            output_loading_info=True,
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise CheckpointError("drafter", source, first_line(error)) from error
    check_weights(head, report, source, "drafter")
    logger.info("drafter: %.1f MB of weights", bytes_of(head) / 1e6)
    head.eval()
    return head


def read_published(name: str, source: str, target: PreTrainedConfig) -> PreTrainedModel | None:
    """The head in a folder or repository that the method's authors wrote; None if this is none of theirs.

    Raises:
        CheckpointError: it is one of theirs, but not whole.
    """
    folder = Path(source)
    if name not in PUBLISHED:
        return None
    if not folder.is_dir():
        try:
            folder = Path(snapshot_download(source, allow_patterns=FILES))
        except (OSError, ValueError):  # `load_config`, which comes next, says what is wrong
            return None
    return PUBLISHED[name](folder, target)
