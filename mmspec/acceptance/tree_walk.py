"""Verification of a draft tree from the root down, one decision among siblings a level."""

from __future__ import annotations

import torch
from torch import Tensor

from mmspec.acceptance.residuals import last_purpose
from mmspec.decoding.distribution import draw
from mmspec.decoding.draft import Draft
from mmspec.decoding.indexing import take
from mmspec.decoding.random_stream import Purpose, RandomStream
from mmspec.decoding.verdict import Verdict
from mmspec.kernels.tree_rejection import Judge, descend

__all__ = ["Judge", "end_at", "sibling_uniforms", "walk"]


def walk(draft: Draft, p: Tensor, random: RandomStream, emitted: Tensor, judge: Judge) -> Verdict:
    """Verify a draft from the root down, with `judge` choosing among the children of each node on the way.

    Args:
        p: [B, n, V] the target's distribution after each node.
    """
    u = sibling_uniforms(draft, random, emitted, p.dtype)
    return end_at(draft, *descend(p, draft.children, u, judge), random, emitted)


def sibling_uniforms(draft: Draft, random: RandomStream, emitted: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, D, K] a uniform for each depth and sibling, keyed by output index."""
    steps = torch.arange(draft.max_depth, device=emitted.device)
    return random.uniform(emitted[:, None] + steps, Purpose.ACCEPT, draft.max_children, dtype)


def end_at(draft: Draft, node: Tensor, final: Tensor, random: RandomStream, emitted: Tensor) -> Verdict:
    """Build the verdict whose path ends in `node` [B], with the next token drawn from `final` [B, V]."""
    accepted = take(draft.depth, node)
    return Verdict.at(draft, node, draw(final, random, emitted + accepted, last_purpose(draft)))
