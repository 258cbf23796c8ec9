"""What must hold of Medusa and Hydra, as functions: tests run them on the code, planted bugs on mutants."""

from __future__ import annotations

from typing import Any

import torch

from mmspec.decoding.sampling import Sampler
from mmspec.drafters.heads import HeadDrafter
from mmspec.drafters.level_heads import HydraDrafter, MedusaDrafter
from mmspec.models.feature_head import DraftingHead
from mmspec.models.hydra import HydraConfig, HydraHead
from mmspec.models.medusa import MedusaConfig, MedusaHead
from mmspec.targets.causal import CausalTarget
from tests.contracts.running import decode, random_prompts
from tests.drafters.eagle_checks import WORDS, Examined, Gullible, few_words
from tests.drafters.flash_checks import answer, inputs_of, target_of
from tests.drafters.naive_heads import NaiveHydra, NaiveMedusa

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


def drafts_are_those_of_the_slow_way(
    kind: str = "hydra", family: str = "llava", tree: str = "dynamic"
) -> None:
    """Ragged prompts with images and accepted paths, in float64: states, rows and paths are right."""
    target = target_of(family, torch.float64)
    sizes = {"num_draft_tokens": 9, "depth": 3, "top_k": 3} if tree == "dynamic" else {"tree": tree}
    drafter = drafter_for(kind, target, **sizes)
    slow_way = NaiveMedusa if kind.startswith("medusa") else NaiveHydra
    examined = Examined(drafter, 10, slow_way, tree)
    inputs = inputs_of(family, torch.float64)
    cases = [inputs[case] for case in ("two images", "no image", "several turns")]
    canvas = answer(target, examined, cases, Sampler(0.9), 10, Gullible())
    assert examined.drafts >= 6, "some drafts were compared"
    assert max(canvas.stats.accepted_histogram) >= 2, "a path of several candidates was accepted"


def guided_drafts_are_those_of_the_slow_way(kind: str) -> None:
    """Prompts and negative prompts of different lengths."""
    target = few_words()
    drafter = drafter_for(kind, target, num_draft_tokens=8, depth=3, top_k=3)
    examined = Examined(drafter, 10, NaiveMedusa if kind.startswith("medusa") else NaiveHydra)
    decode(
        target,
        random_prompts(2, WORDS, longest=6, seed=4),
        examined,
        Gullible(),
        Sampler(1.0, guidance_scale=3.0),
        max_new_tokens=10,
        negatives=random_prompts(2, WORDS, longest=6, seed=9),
    )
    assert examined.drafts >= 4
