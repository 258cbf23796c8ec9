"""DFlash and DSpark heads of random weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mmspec.methods.dflash.drafter import DFlashDrafter
from mmspec.methods.dflash.head import DFlashConfig, DFlashHead, DSparkConfig, DSparkHead
from mmspec.targets import CausalTarget
from tests.methods.naive_dflash import naive_block

KINDS: dict[str, dict[str, Any]] = {
    "dflash": {"block": 5},
    "dflash, noise of the target": {"block": 5, "mask_token": 7, "num_layers": 1},
    "dflash, windows": {
        "block": 5,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"],
        "causal": [True, False],
        "sinks": True,
        "rotary": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
        | {"partial_rotary_factor": 0.5},
    },
    "dflash, three axes": {"block": 5, "mrope_section": [1, 1, 2], "sliding_window": 9},
    "dflash, two": {"block": 5, "conv_taps": 2, "conv_group": 8, "selector_rank": 6, "candidates": 7}
    | {"logit_scale": 0.7, "logit_cap": 3.0, "embedding_scale": 1.3},
    "dflash, lilicorr": {"block": 5, "candidates": 7, "lattice_layers": 2, "lattice_width": 24}
    | {"lattice_heads": 4, "lattice_factors": 10, "conv_taps": 3},
    "dspark": {"block": 4},
    "dspark, gated": {"block": 4, "markov": "gated"},
    "dspark, rnn": {"block": 4, "markov": "rnn"},
    "dspark, domino": {"block": 4, "markov": "domino", "memory": 5, "plain_slots": 1, "confidence": False},
}

#: Kinds and families of targets with images.
WITH_IMAGES = [
    *((kind, "qwen2_5_vl" if "axes" in kind else "llava") for kind in KINDS),
    ("dspark", "qwen2_5_vl"),
]


def head_for(target: CausalTarget, kind: str = "dflash", seed: int = 3, **settings: Any) -> DFlashHead:
    """Make a head with random weights, two layers, and one key head per two query heads."""
    made = {"num_layers": 2, "markov_rank": 6, **KINDS[kind], **settings}
    config_class, head_class = (
        (DFlashConfig, DFlashHead) if kind.startswith("dflash") else (DSparkConfig, DSparkHead)
    )
    config = config_class.for_target(target.config, target.vocabulary, **made)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        head = head_class(config).to(target.dtype)
        for parameter in head.parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(noise * parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 1 + 0.1 * noise)
    return head.eval().requires_grad_(False)


def drafter_for(target: CausalTarget, kind: str = "dflash", **shape: Any) -> DFlashDrafter:
    return DFlashDrafter(head_for(target, kind), **shape).fit(target)


def alone(head: DFlashHead, target: Any, prompt: dict[str, Any], tokens: Sequence[int]) -> Tensor:
    """Return the states [n, d] of the block after a sequence [L + 1], from one forward pass."""
    ids = torch.tensor([list(tokens)])
    length = prompt["input_ids"].shape[1]
    more = {"input_ids": ids[:, :-1]}
    if "mm_token_type_ids" in prompt:
        grown = torch.zeros(1, ids.shape[1] - 1, dtype=torch.long)
        grown[:, :length] = prompt["mm_token_type_ids"]
        more["mm_token_type_ids"] = grown
    whole = {**prompt, **more}
    whole.pop("attention_mask", None)
    read = target.read([whole], tuple(head.taps))
    context = head.join([read[tap] for tap in head.taps])
    block = head.slots(ids[:, -1], target.embed)
    places = None
    if head.config.mrope_section is not None:
        known, offset = target.positions(whole)
        ahead = known.shape[-1] + offset + torch.arange(block.shape[1])
        places = torch.cat([known.flatten(0, -2).expand(3, -1), ahead.expand(3, -1)], 1)
    return naive_block(head, context[0], block[0], places)
