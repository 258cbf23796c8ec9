"""Vertical drafts of image tokens: a head refills a Jacobi window from the row above.

After SSD (2606.20543), whose head predicts the token below a cell from the target's state at the cell. Here
the head drafts the places of a window that the target has not scored yet. Scored places are drawn from the
target's distribution, coupled with their old drafts. The head's q depends only on states of the round before,
and its draw has its own random numbers, so that any sound rule may verify it, whatever the head predicts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mmspec.core.image_grid import Layout, require_grid
from mmspec.core.indexing import pick
from mmspec.core.session import PromptBatch
from mmspec.errors import InputError
from mmspec.heads.window_states import StateWindowDrafter, StateWindowSession
from mmspec.targets.causal import CausalTarget
from mmspec_extras.methods.ssd.head import VerticalHead


def read_below(head: VerticalHead, target: CausalTarget, states: Tensor, is_code: Tensor) -> Tensor:
    """Return guided logits [B, n, V] of the tokens below cells, from the target's states [B, n, s] there.

    Args:
        is_code: [B or 1, 1, V] whether a cell may hold each token; the logits of others are -inf.
    """
    logits = target.head(head(states).to(target.dtype))
    return logits.masked_fill(~is_code, -torch.inf)


class VerticalSession(StateWindowSession):
    """Window of drafts of one batch, and the target's states of the last row of cells."""

    drafter: VerticalDrafter
    head: VerticalHead

    def __init__(self, drafter: VerticalDrafter, batch: PromptBatch) -> None:
        row = max(require_grid(request.layout, drafter.title).stride for request in batch.requests)
        super().__init__(drafter, batch, row)

    def _initial(
        self, p: Tensor, sound: Tensor, place: Tensor, covered: Tensor, stood: Tensor
    ) -> tuple[Tensor, Tensor]:
        self._enter_committed()
        size = self.committed.shape[1]
        # states of the places before the root, then of the slots where the target has read a token
        states = torch.cat([self.committed, pick(self.read.states, stood)], 1)
        is_read = torch.cat([torch.ones_like(place[:, :1]).expand(-1, size) > 0, stood > 0], 1)
        above = place - self.layout.stride
        index = (above - place[:, :1] + size).clamp_min(0)
        is_drafted = ~covered & (above >= 0) & is_read.gather(1, index)
        logits = read_below(self.head, self.target, pick(states, index), self.layout.uniform > 0)
        q = self.sampler.within_top_k(self.sampler.scores(logits).p.to(p.dtype))
        is_drafted &= q.isfinite().all(-1)
        return torch.where(is_drafted[..., None], q, p), sound | is_drafted


class VerticalDrafter(StateWindowDrafter):
    """Drafts a Jacobi window whose newly uncovered places a head predicts from the cells above them.

    In the first row, and where the target has not read the cell above yet, these places are drawn from the
    edge of the window, as in speculative Jacobi decoding.

    Args:
        model: the trained head.
        window: see `WindowDrafter`; None for that of the head's config.
        coupling, front, reach: see `WindowDrafter`.

    Raises:
        InputError: a value is out of range.
    """

    title = "a vertical head"
    session = VerticalSession
    model: VerticalHead

    def __init__(
        self,
        model: VerticalHead,
        window: int | None = None,
        coupling: str = "maximal",
        front: str | Sequence[int] = (),
        reach: int | None = None,
    ) -> None:
        super().__init__(model, window, coupling, "edge", front, reach)

    def require_room(self, layout: Layout | None) -> None:
        if layout is None:
            raise InputError("target", "text", "must draw images: ssd drafts from the row above")
        super().require_room(require_grid(layout, self.title))
