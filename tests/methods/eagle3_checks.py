"""EAGLE-3 heads of random weights."""

from __future__ import annotations

from typing import Any

import torch

from mmspec.methods.eagle3.head import Eagle3Config, Eagle3Head
from mmspec.targets.causal import CausalTarget


def head_for(target: CausalTarget, seed: int = 3, **settings: Any) -> Eagle3Head:
    """A head of random weights and of one key head; a reduced vocabulary is every other token."""
    config = Eagle3Config.for_target(
        target.config, target.vocabulary, **{"num_key_value_heads": 1, **settings}
    )
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        head = Eagle3Head(config).to(target.dtype)
        for parameter in head.parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(noise * parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 1 + 0.1 * noise)
    if head.d2t is not None:
        head.learn_vocabulary(target.vocabulary - 1 - 2 * torch.arange(config.draft_vocabulary))
    return head.eval().requires_grad_(False)
