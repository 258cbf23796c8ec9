"""Drafts of a masked block's next states: the block after 1, 2, ... more places, scored in one forward pass.

FreeDave (2510.00294). A block-causal model decides one place per forward pass. The next places and their
tokens are drafted from its newest scores; the block with the first draft token, with the first two, ... are
further lanes of the next forward pass. This gives the model's own step from each state, which is accepted as
long as it leads to the next state. The output is that of one place per forward pass: a wrong draft costs time
alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmspec.core.canvas import Canvas
from mmspec.core.distributions import Scores
from mmspec.core.draft import Draft
from mmspec.core.interfaces import AnyTarget, TargetOutput
from mmspec.core.session import PromptBatch
from mmspec.errors import InputError
from mmspec.families.masked_language.target import MaskedBlock
from mmspec.families.masked_language.unmasking import UnmaskingDrafter, UnmaskingSession
from mmspec.open_types import Keywords
from mmspec.places.policies import NOWHERE, draw_anew, rank
from mmspec.places.state_walk import StateFill, StateWalk
from mmspec.validation import is_integer

__all__ = ["StatesBlock", "StatesDrafter"]

MAX_STATES = 64
NOTHING = torch.empty(0, dtype=torch.float32, device="cpu")


@dataclass(frozen=True)
class StatesBlock(MaskedBlock):
    """A block in S states, and the block after it, as S + 1 groups of n lanes.

    The first state is the current block, in its own slots; the other states and the block after it have slots
    after the output. Each state sees the text before the block, and itself; the block after it sees the state
    without open places.

    Attributes:
        states: S.
        known: [B, S] whether each state is drafted: the first always is.
        guessed: [B, S, n] the place that the step from each state to the next is expected to decide; none for
            the last.
        full: [B] index of the state without open places; S if there is none.
    """

    states: int = 1
    known: Tensor = NOTHING
    guessed: Tensor = NOTHING
    full: Tensor = NOTHING

    @property
    def candidates(self) -> Tensor:
        return self.known.sum(-1) - 1

    @property
    def before(self) -> Tensor:
        before, width = super().before.clone(), self.guessed.shape[-1]
        size = self.valid[:, :width, 0].sum(-1)
        # the block after it begins after the last place of the state without open places
        before[:, self.states * width] = (self.full * width + size).clamp_max(self.states * width)
        return before


class StatesSession(UnmaskingSession):
    """States of the blocks of a batch.

    Attributes:
        ranked: [B, n] expected order in which the places of a block are decided.
        guesses: [B, n] the draft tokens of these places.
        begin: [B] output index of the first place of the block that both refer to; -1 before the first.
    """

    drafter: StatesDrafter

    def __init__(self, drafter: StatesDrafter, batch: PromptBatch) -> None:
        super().__init__(drafter, batch)
        rows, width = len(batch.requests), drafter.block_length or 1
        self.ranked = torch.zeros(rows, width, dtype=torch.long, device=self.device)
        self.guesses = torch.zeros_like(self.ranked)
        self.begin = torch.full((rows,), -1, device=self.device)
        self.random = batch.random

    def propose(self, canvas: Canvas) -> Draft:
        block: Any = super().propose(canvas)
        width, count = self.drafter.block_length or 1, self.drafter.states
        room = width - block.starts.shape[1]
        starts = pad(block.starts, (0, room), value=block.length)
        exists, is_open = (pad(each[:, :, 0], (0, room)) for each in (block.valid, block.is_open))
        now = pad(block.tokens[:, :, 0], (0, room), value=self.drafter.mask)

        guessed = (self.begin == starts[:, 0]) & self._is_whole(block, width)
        step = rank(-self.ranked.masked_fill(~is_open, width).double())[:, None]  # of open places, from 0
        state, left = torch.arange(count, device=self.device)[:, None], is_open.sum(-1)
        opened = is_open[:, None] & (step >= state)  # [B, S, n]
        tokens = torch.where(is_open[:, None] & ~opened, self.guesses[:, None], now[:, None])
        known = (state[:, 0] == 0) | (guessed[:, None] & (state[:, 0] <= left[:, None]))
        is_full = known & (state[:, 0] == left[:, None])  # at most one of a row
        full = torch.where(is_full.any(-1), is_full.long().argmax(-1), count)
        behind = starts[:, :1] + exists.sum(-1, keepdim=True) + torch.arange(width, device=self.device)
        last = torch.tensor([ends[-1] for ends in self.ends], device=self.device)[:, None]
        has_behind = (full < count)[:, None] & (behind < last)

        masks = torch.full_like(behind, self.drafter.mask)
        made = self._laid_out(
            block,
            torch.cat([tokens.masked_fill(opened, self.drafter.mask).flatten(1), masks], 1),
            torch.cat([starts.repeat(1, count), behind], 1),
            torch.cat([(known[:, :, None] & exists[:, None]).flatten(1), has_behind], 1),
            torch.cat([(known[:, :, None] & opened).flatten(1), has_behind], 1),
            full,
        )
        next_place = is_open[:, None] & (step == state) & (state + 1 < count)
        return StatesBlock(**made, states=count, known=known, guessed=next_place, full=full)

    def _is_whole(self, block: MaskedBlock, width: int) -> Tensor:
        """[B] whether a block has all its places after the prompt; others have one state alone."""
        rows = zip(self.requests, block.groups, strict=True)
        whole = [(len(request.prompt_tokens) + begin) % width == 0 for request, (begin, _) in rows]
        return torch.tensor(whole, device=self.device)

    def _laid_out(
        self,
        block: MaskedBlock,
        tokens: Tensor,
        places: Tensor,
        exists: Tensor,
        is_open: Tensor,
        full: Tensor,
    ) -> Keywords:
        """Return the fields of a block of S + 1 groups of lanes [B, (S + 1) n]: slots, depths and visibility.

        Each group sees the text before the block, and itself; the last one also the group `full` [B].
        """
        rows, length, groups = len(tokens), block.length, self.drafter.states + 1
        width = tokens.shape[1] // groups
        row, group = torch.arange(rows, device=self.device), torch.arange(groups, device=self.device)
        behind = length + 1 + torch.arange((groups - 1) * width, device=self.device).expand(rows, -1)
        slots = torch.cat([places[:, :width], behind], 1).where(exists, length)
        sees = torch.zeros(rows, groups, length + 1 + behind.shape[1], dtype=torch.bool, device=self.device)
        sees[row[:, None], group.repeat_interleave(width).expand(rows, -1), slots] = True
        sees[:, -1] |= sees[row, full]  # itself where no state is full
        sees[:, :, length] = False
        sees[:, :, :length] |= block.depths[:, None, :length] < places[:, :1, None]
        depths = torch.cat([block.depths[:, : length + 1], places[:, width:].clamp_max(length)], 1)
        made = MaskedBlock.single(
            tokens,
            places.clamp_max(length),
            is_open,
            depths,
            sees.repeat_interleave(width, 1),
            completes=2 * width,
            groups=block.groups,
            length=length,
            asked=block.asked,
            cache=block.cache,
            ends=block.ends,
            judges_own=block.judges_own,
            prompts=block.prompts,
        )
        held = {each.name: getattr(made, each.name) for each in fields(made)}
        return {**held, "slots": slots[:, :, None], "valid": exists[:, :, None]}

    def observe(self, draft: Draft, output: TargetOutput, scores: Scores, verdict: Any) -> None:
        if isinstance(draft, StatesBlock) and isinstance(verdict, StateFill):
            self.begin = verdict.seen.begin
            self.ranked, self.guesses = self.guess(scores, verdict)

    def guess(self, scores: Scores, verdict: StateFill) -> tuple[Tensor, Tensor]:
        """Return [B, n] the expected order of the open places of a block, and their draft tokens.

        Tokens that are drawn anew in every state are drafted with the noise of the coming states.
        """
        seen, ranked = verdict.seen, verdict.order
        if not self.draws_anew(scores):
            return ranked, seen.token
        draw = self.draws(scores, verdict)
        width = seen.token.shape[1]
        is_open, guesses = verdict.leaves, seen.token
        ranked = torch.full_like(guesses, width)
        for ahead in range(min(self.drafter.states - 1, width)):
            token = draw(ahead)
            sure = seen.p.gather(-1, token[..., None])[..., 0].masked_fill(~is_open, NOWHERE)
            next_place = (rank(sure) == 0) & is_open
            ranked, guesses = ranked.masked_fill(next_place, ahead), token.where(next_place, guesses)
            is_open = is_open & ~next_place
        return ranked, guesses

    def draws_anew(self, scores: Scores) -> bool:
        """Return whether tokens are drawn with other noise in every state."""
        return self.drafter.order == "confidence" and scores.greedy is not True

    def draws(self, scores: Scores, verdict: StateFill) -> Callable[[Tensor | int], Tensor]:
        """Return a function that draws tokens [B, n] for a later state; greedy rows keep theirs."""
        seen = verdict.seen
        lanes = Scores(seen.logits.flatten(0, 1)[:, None], greedy=False)
        places = seen.begin[:, None] + torch.arange(seen.token.shape[1], device=self.device)
        now = seen.begin[:, None] + seen.decided + 1
        noise, greedy = self.random.repeat(places.numel()), scores.greedy

        def draw(ahead: Tensor | int) -> Tensor:
            token = draw_anew(lanes, noise, places, (now + ahead).expand_as(places))
            if not isinstance(greedy, Tensor):
                return token
            return seen.token.where(greedy.view(len(token), -1)[:, :1], token)

        return draw


class StatesDrafter(UnmaskingDrafter):
    """Drafts the next places of a block, and the states that follow (FreeDave, 2510.00294).

    For block-causal models. Where all places see each other, the prompt sees the output too, so that each
    state would need a prompt of its own.

    Args:
        states: most places that a forward pass may decide in a block, 2 to 64; one more place of the block
            after it if all of those are decided.

    Raises:
        InputError: `states` is out of range.
    """

    judged_by = StateWalk
    by_confidence = False
    session: Callable[[Any, PromptBatch], StatesSession] = StatesSession

    def __init__(self, states: int = 8) -> None:
        if not is_integer(states) or not 2 <= states <= MAX_STATES:
            raise InputError("states", states, f"must be an integer from 2 to {MAX_STATES}")
        super().__init__()
        self.states = states

    def fit(self, target: AnyTarget) -> Self:
        fitted = super().fit(target)
        if not fitted.is_causal:
            rule = "needs a block-causal model such as SDAR; others would read the prompt for each state"
            raise InputError("accelerator", "freedave", rule)
        size = fitted.block_length or 1
        fitted.states = min(self.states, 1 + size)
        fitted.max_nodes = 1 + (fitted.states + 1) * size
        return fitted
