"""Verification of a draft tree from the root down, one decision among siblings a level."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mmspec.decoding.distribution import draw
from mmspec.decoding.draft import Draft
from mmspec.decoding.indexing import take
from mmspec.decoding.random_stream import Purpose, RandomStream
from mmspec.decoding.verdict import Verdict
from mmspec.verification.residuals import last_purpose

__all__ = ["Judge", "walk"]

Judge = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def walk(draft: Draft, p: Tensor, random: RandomStream, emitted: Tensor, judge: Judge) -> Verdict:
    """Verify a draft from the root down, with `judge` choosing among the children of each node on the way.

    Args:
        p: [B, n, V] the target's distribution after each node.
        judge: (p [B, V], children [B, K] or -1, u [B, K]) -> (chosen child [B] or -1, what to draw
            from if none was chosen [B, V]).
    """
    node = torch.zeros_like(emitted)
    final = here = take(p, node)
    moving = torch.ones_like(emitted, dtype=torch.bool)
    steps = torch.arange(draft.max_depth, device=emitted.device)
    u = random.uniform(emitted[:, None] + steps, Purpose.ACCEPT, draft.max_children, p.dtype)  # [B, D, K]
    for depth in range(draft.max_depth):
        chosen, left = judge(here, take(draft.children, node), u[:, depth])
        moved = moving & (chosen >= 0)
        final = torch.where((moving & ~moved)[:, None], left, final)
        node = torch.where(moved, chosen, node)
        here = take(p, node)
        final = torch.where(moved[:, None], here, final)
        moving = moved
    accepted = take(draft.depth, node)
    return Verdict.at(draft, node, draw(final, random, emitted + accepted, last_purpose(draft)))
