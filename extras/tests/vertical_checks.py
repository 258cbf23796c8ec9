"""Vertical heads with random weights, whose predictions are far from the target's distribution."""

from __future__ import annotations

from typing import Any

import torch

from mmspec.targets import CausalTarget
from mmspec_extras.methods.ssd.head import VerticalConfig, VerticalHead


def head_for(target: CausalTarget, seed: int = 0, strength: float = 3.0, **settings: Any) -> VerticalHead:
    """Return a random head in the target's precision."""
    config = VerticalConfig.for_target(target.config, target.vocabulary, width=16)
    for setting, value in settings.items():
        setattr(config, setting, value)
    with torch.random.fork_rng(devices=[]):
        head = VerticalHead(config).to(target.dtype).eval()
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in (head.of_states.weight, head.to_states.weight):
            weight.normal_(std=strength * weight.shape[-1] ** -0.5, generator=noise)
    return head
