"""Trained heads as drafters: tokenizer and vocabulary are those of their target."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from mmspec.errors import CheckpointError, InputError
from mmspec.models.checkpoint import bytes_of, check_source, check_weights, first_line, load_config
from mmspec.models.eagle import EagleHead
from mmspec.models.eagle3 import Eagle3Head
from mmspec.models.flash import FlashHead
from mmspec.models.hydra import HydraHead
from mmspec.models.medusa import MedusaHead

logger = logging.getLogger(__name__)

#: What `drafter=` has to be, by the name of the drafter in the registry.
HEADS: dict[str, type[PreTrainedModel]] = {
    "eagle": EagleHead,
    "eagle3": Eagle3Head,
    "flash": FlashHead,
    "medusa": MedusaHead,
    "hydra": HydraHead,
}


def load_head(
    name: str, drafter: str | Path | PreTrainedModel, dtype: torch.dtype, device: torch.device
) -> PreTrainedModel:
    """The head that a drafter runs.

    Args:
        name: of the drafter, a key of `HEADS`.
        drafter: folder or hub id of what `mmspec train drafter` wrote, or a loaded head.
        dtype, device: of the target, whose hidden states it reads.

    Raises:
        CheckpointError: it cannot be loaded, or is a model of another kind.
        InputError: a loaded model that is no such head.
    """
    kind: Any = HEADS[name]
    allowed = f"a head for {name!r}, as `mmspec train drafter --method {name}` writes it"
    if isinstance(drafter, PreTrainedModel):
        if not isinstance(drafter, kind):
            raise InputError("drafter", type(drafter).__name__, allowed)
        loaded: PreTrainedModel = drafter
        return loaded
    source = check_source(drafter, "drafter")
    config = load_config(source, argument="drafter")
    if not isinstance(config, kind.config_class):
        raise CheckpointError("drafter", f"{source}: {config.model_type}", allowed)
    head: PreTrainedModel
    try:
        head, report = kind.from_pretrained(
            source, config=config, dtype=dtype, device_map={"": device}, output_loading_info=True
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise CheckpointError("drafter", source, first_line(error)) from error
    check_weights(head, report, source, "drafter")
    logger.info("drafter: %.1f MB of weights", bytes_of(head) / 1e6)
    head.eval()
    return head
