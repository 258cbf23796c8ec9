"""Janus by its own `generate`, which measurements compare with."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from mmspec.core.interfaces import Request
from mmspec.families.janus.target import JanusTarget


def generate_keywords(
    target: JanusTarget, request: Request, scale: float
) -> tuple[nn.Module, int, dict[str, Any]]:
    """Keywords that draw an image, by a model that guides itself; see `Family`."""
    ids = request.inputs["input_ids"].to(target.device) - target.vocabulary  # its tokenizer's
    inputs = {"inputs": ids, "attention_mask": torch.ones_like(ids)}
    model: Any = target.model
    return model.model.language_model, 1, {**inputs, "generation_mode": "image", "guidance_scale": scale}
