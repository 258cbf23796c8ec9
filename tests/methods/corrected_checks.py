"""Corrector heads of random weights.

Their corrections are large: drafts are far from the target's distribution, and depend on all inputs,
so that only the acceptance rule makes the output correct.
"""

from __future__ import annotations

import torch

from mmspec.methods.cjd.head import CorrectorConfig, CorrectorHead
from mmspec.targets import CausalTarget

SIZES = {"width": 16, "num_heads": 2, "context": 4}


def head_for(target: CausalTarget, seed: int = 0, strength: float = 1.0, **settings: object) -> CorrectorHead:
    """A random head in the target's precision, whose corrections change distributions much."""
    config = CorrectorConfig.for_target(target.config, target.vocabulary, **SIZES)
    for setting, value in settings.items():
        setattr(config, setting, value)
    with torch.random.fork_rng(devices=[]):
        head = CorrectorHead(config).to(target.dtype).eval()
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in head.named_parameters():
            if weight.dim() > 1:
                scale = strength if name.startswith("corrections") else 2.0
                weight.normal_(std=scale * weight.shape[-1] ** -0.5, generator=noise)
    return head
