"""Image generation of Janus with `generate` of transformers, as a baseline of measurements."""

from __future__ import annotations

import torch
from torch import nn

from mmspec.core.interfaces import Request
from mmspec.families.janus.target import JanusTarget
from mmspec.open_types import Keywords


def generate_keywords(target: JanusTarget, request: Request, scale: float) -> tuple[nn.Module, int, Keywords]:
    """Return the keywords of `generate` for an image; the model applies guidance itself; see `Family`."""
    ids = request.inputs["input_ids"].to(target.device) - target.vocabulary  # ids of its tokenizer
    inputs = {"inputs": ids, "attention_mask": torch.ones_like(ids)}
    return (
        target.model.model.language_model,
        1,
        {**inputs, "generation_mode": "image", "guidance_scale": scale},
    )
