"""Heads with random weights that draft some of their target's tokens, with its output matrix."""

from __future__ import annotations

from typing import Any

import torch

from mmspec.heads.model import DraftingHead
from mmspec.targets import CausalTarget
from tests.contracts.test_drafters import HEADS

FEW = 20
SMALL = {"num_draft_tokens": 8, "depth": 3, "top_k": 3}
#: Kind, settings of its head, and the shape of its drafts.
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "eagle": ("eagle", {}, SMALL),
    "mtp": ("mtp", {}, SMALL),
    "flash": ("flash", {}, {"num_draft_tokens": 9, "top_k": 2, "depth": 4, "block": 2}),
    "flash, chain": ("flash", {}, {"top_k": 1, "depth": 5, "block": 2}),
    "dflash": ("dflash", {}, {}),
    "dspark": ("dspark", {}, SMALL),
    "dspark, domino": ("dspark", {"kind": "dspark, domino"}, SMALL),
    "medusa": ("medusa", {}, SMALL),
    "hydra": ("hydra", {}, SMALL),
    "hydra, without prefix attention": ("hydra", {"prefix_attention": False}, SMALL),
}


def few_for(name: str, target: CausalTarget, few: int = FEW) -> DraftingHead:
    """A head that drafts every third token, from the last one down."""
    kind, settings, _ = KINDS[name]
    head: DraftingHead = HEADS[kind][1](target, frequent_tokens=few, **settings)
    head.learn_vocabulary(target.vocabulary - 1 - 3 * torch.arange(few))
    return head


def same_of_all(name: str, target: CausalTarget, head: DraftingHead) -> DraftingHead:
    """A head of the same weights that drafts all tokens; what it adds to the logits of others is 0."""
    kind, settings, _ = KINDS[name]
    whole: DraftingHead = HEADS[kind][1](target, **settings)
    weights, tokens = whole.state_dict(), head.draft_tokens
    assert tokens is not None
    for key, own in head.state_dict().items():
        if key in weights and weights[key].shape != own.shape:
            (axis,) = (axis for axis in range(own.dim()) if own.shape[axis] == len(tokens))
            own = torch.zeros_like(weights[key]).index_copy(axis, tokens, own)
        weights[key] = own
    weights.pop("d2t")
    whole.load_state_dict(weights)
    return whole
