"""Walk through drafted states of a masked block or an image while the target's own steps match them."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mmspec.core.distributions import Scores
from mmspec.core.indexing import take
from mmspec.core.interfaces import AnyRule, AnyTarget, TargetOutput
from mmspec.core.random_stream import RandomStream
from mmspec.core.verdict import Fill, Measured, Verdict
from mmspec.places.policies import Places, places_of

__all__ = ["CellWalk", "StateFill", "StateWalk"]


@dataclass(frozen=True)
class StateFill(Fill):
    """Places that a walk decided, and the scores of its final state, before the last step.

    Attributes:
        seen: places [B, n] of that state.
        order: [B, n] rank of each place by these scores.
        leaves: [B, n] places that are open after the step.
    """

    seen: Places
    order: Tensor
    leaves: Tensor


@dataclass(frozen=True)
class StateWalk(AnyRule):
    """Follow the target's own steps from state to state while each leads to the next (FreeDave, 2510.00294).

    A step decides one place, in the target's own order. One more place is decided from the final state. Every
    step is a step of plain decoding, with the noise of its places in that state, so that the output is that
    of one place per forward pass.
    """

    order: str = field(default="confidence", init=False)

    def fit(self, target: AnyTarget) -> StateWalk:
        fitted = copy.copy(self)
        object.__setattr__(fitted, "order", getattr(target, "order", self.order))
        return fitted

    def decide(
        self, draft: Any, output: TargetOutput, scores: Scores, random: RandomStream, first: Tensor
    ) -> tuple[Verdict, Measured]:
        block = draft
        rows, count = len(block.tokens), block.states
        shape = rows, count + 1, -1  # the states, then the block after them

        def by_state(each: Tensor) -> Tensor:
            return each.reshape(*shape, *each.shape[2:]) if each.dim() > 2 else each.reshape(shape)

        is_open, places = by_state(block.is_open[:, :, 0]), by_state(block.starts)
        guesses = by_state(block.tokens[:, :, 0])
        by_token = self.order == "confidence"
        seen = places_of(block, scores, random, first, anew=by_token, groups=count + 1)
        chosen = seen.token.view(shape)
        sound = (scores.is_finite().view(shape) | ~is_open).all(-1)
        order = (seen.order if by_token else seen.leftmost).view(shape)
        picked = is_open & (order == 0) & sound[:, :, None]

        leads = (picked[:, :-2] & block.guessed[:, :-1]).any(-1) & block.known[:, 1:]
        leads &= ((chosen[:, :-2] == guesses[:, 1:-1]) | ~block.guessed[:, :-1]).all(-1)
        reached = leads.long().cumprod(-1).sum(-1)
        ends_behind = (reached == block.full) & is_open[:, -1].any(-1)
        final = torch.where(ends_behind, count, reached)

        walked = is_open[:, 0] & ~take(is_open, reached)
        last = take(picked, final)
        here = last & ~ends_behind[:, None]
        values = take(guesses, reached).where(walked, take(chosen, reached))
        behind = last & ends_behind[:, None]
        zeros = torch.zeros_like(behind)
        fill = StateFill(
            places=torch.cat([places[:, 0], places[:, -1]], 1),
            values=torch.cat([values, chosen[:, -1]], 1),
            decided=torch.cat([walked | here, behind], 1),
            is_draft=torch.cat([walked, zeros], 1),
            failed=~take(sound, final),
            reopened=torch.cat([zeros, zeros], 1),
            settled=torch.full((rows,), torch.iinfo(torch.long).max, device=last.device),
            seen=seen.map(lambda each: take(each.view(rows, count + 1, *each.shape[1:]), final)),
            order=take(order, final),
            leaves=take(is_open, final) & ~last,
        )
        return fill, Measured.nothing(last)


class CellWalk(AnyRule):
    """Follow the target's own draws from group to group of an image's cells while they match the draft.

    For groups in a known order (LPD). Each cell is drawn with its own noise in the state that the drafted
    cells before its group make. The first group with a draw that differs is the last decided one, so that
    every cell is drawn as when one group is decided per forward pass.
    """

    def decide(
        self, draft: Any, output: TargetOutput, scores: Scores, random: RandomStream, first: Tensor
    ) -> tuple[Verdict, Measured]:
        cells = draft
        shape, exists = cells.starts.shape, cells.valid[:, :, 0]
        chosen = scores.choose(cells.lanes, random, first).view(shape)
        sound = scores.is_finite().view(shape)
        leads = (chosen == cells.tokens[:, :, 0]) & cells.is_guessed & sound
        last = cells.turns.masked_fill(leads, cells.states).amin(-1, keepdim=True)
        asked = exists & (cells.turns <= last)
        failed = (asked & ~sound).any(-1)
        fill = Fill.of(cells.starts, chosen, asked & sound, asked & (cells.turns < last), failed)
        return fill, Measured.nothing(failed)
