"""Medusa and Hydra heads of random weights."""

from __future__ import annotations

from typing import Any

import torch

from mmspec.heads.drafter import HeadDrafter
from mmspec.heads.model import DraftingHead
from mmspec.methods.hydra.drafter import HydraDrafter
from mmspec.methods.hydra.head import HydraConfig, HydraHead
from mmspec.methods.medusa.drafter import MedusaDrafter
from mmspec.methods.medusa.head import MedusaConfig, MedusaHead
from mmspec.targets.causal import CausalTarget

KINDS: dict[str, dict[str, Any]] = {
    "medusa": {},
    "medusa, own outputs": {"own_lm_heads": True, "num_layers": 2},
    "hydra": {"num_layers": 2},
    "hydra, own outputs": {"own_lm_heads": True, "num_layers": 1, "seed": 5},
    "hydra, without prefix attention": {"prefix_attention": False, "num_layers": 3},
}


def randomise(head: DraftingHead, target: CausalTarget, seed: int) -> None:
    """Give a head random weights in the target's dtype, of about the size of its inputs."""
    head.to(target.dtype).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in head.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        scale = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.1
        parameter.copy_(noise * scale + ("norm" in name))


def medusa_for(target: CausalTarget, seed: int = 3, **settings: Any) -> MedusaHead:
    """Heads of random weights."""
    with torch.random.fork_rng():
        head = MedusaHead(MedusaConfig.for_target(target.config, target.vocabulary, **settings))
    randomise(head, target, seed)
    return head


def hydra_for(target: CausalTarget, seed: int = 3, **settings: Any) -> HydraHead:
    """Heads of random weights."""
    with torch.random.fork_rng():
        head = HydraHead(HydraConfig.for_target(target.config, target.vocabulary, **settings))
    randomise(head, target, seed)
    return head


def drafter_for(kind: str, target: CausalTarget, **shape: Any) -> HeadDrafter:
    """A drafter of that kind for a target, with random weights."""
    if kind.startswith("medusa"):
        return MedusaDrafter(medusa_for(target, **KINDS[kind]), **shape).fit(target)
    return HydraDrafter(hydra_for(target, **KINDS[kind]), **shape).fit(target)
