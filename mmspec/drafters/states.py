"""States of a masked block: what it will look like after 1, 2, ... more places, all scored in one forward.

FreeDave (2510.00294). A block-causal model decides one place a forward. From its newest scores the next
places and their tokens are guessed; the block with the first guess, with the first two, ... are further lanes
of the next forward. The model's own step from each state is then known, and is followed as long as it leads
to the next state. The output is that of one place a forward: a wrong guess costs time, never words.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmspec.acceptance.places import rank
from mmspec.acceptance.state_walk import StateFill
from mmspec.decoding.canvas import Canvas
from mmspec.decoding.draft import Draft
from mmspec.decoding.interfaces import Target, TargetOutput
from mmspec.drafters.masked_blocks import UnmaskingDrafter, UnmaskingSession
from mmspec.drafters.session import PromptBatch
from mmspec.errors import InputError
from mmspec.models.commit_filter import read_filter
from mmspec.targets.masked import MaskedBlock
from mmspec.validation import is_integer

__all__ = ["StatesBlock", "StatesDrafter"]

MAX_STATES = 64


@dataclass(frozen=True)
class StatesBlock(MaskedBlock):
    """A block in S states, and the block behind it, as S + 1 groups of n lanes.

    The first state is the block as it stands, in its own slots; the others and the block behind stand in
    slots behind the output. Each state sees what is before the block, and itself; the block behind sees the
    state in which nothing is open.

    Attributes:
        states: S.
        known: [B, S] whether each state is drafted: the first always is.
        guessed: [B, S, n] the place that the step from each state to the next is guessed to decide; none from
            the last.
        full: [B] index of the state in which nothing is open; S where there is none among them.
    """

    states: int = 1
    known: Tensor = torch.empty(0)
    guessed: Tensor = torch.empty(0)
    full: Tensor = torch.empty(0)

    @property
    def candidates(self) -> Tensor:
        return self.known.sum(-1) - 1

    @property
    def before(self) -> Tensor:
        before, width = super().before.clone(), self.guessed.shape[-1]
        size = self.valid[:, :width, 0].sum(-1)
        # the block behind begins after the last place of the state in which nothing is open
        before[:, self.states * width] = (self.full * width + size).clamp_max(self.states * width)
        return before


class StatesSession(UnmaskingSession):
    """States of the blocks of a batch.

    Attributes:
        order: [B, n] rank by which the places of a block are guessed to be decided; of those of `begin`.
        tokens: [B, n] the tokens that are guessed there.
        begin: [B] output index of the block that both are of.
    """

    drafter: StatesDrafter

    def __init__(self, drafter: StatesDrafter, batch: PromptBatch) -> None:
        super().__init__(drafter, batch)
        rows, width = len(batch.requests), drafter.block_length or 1
        self.ranked = torch.zeros(rows, width, dtype=torch.long, device=self.device)
        self.guesses = torch.zeros_like(self.ranked)
        self.begin = torch.full((rows,), -1, device=self.device)

    def propose(self, canvas: Canvas) -> Draft:
        block = super().propose(canvas)
        if not isinstance(block, MaskedBlock):
            raise TypeError(type(block).__name__)
        return self.in_states(block, canvas)

    def in_states(self, block: MaskedBlock, canvas: Canvas) -> StatesBlock:
        """The block with the states that are guessed to follow, and the block behind it."""
        rows, narrow, length = len(block.tokens), block.starts.shape[1], block.length
        width, count = max(narrow, self.drafter.block_length or 1), self.drafter.states
        room = width - narrow
        starts = pad(block.starts, (0, room), value=length)
        exists, is_open = (pad(each[:, :, 0], (0, room)) for each in (block.valid, block.is_open))
        now = pad(block.tokens[:, :, 0], (0, room), value=self.drafter.mask)
        left = is_open.sum(-1)
        # a block that begins inside the prompt is read by the end of that, which sees the first state alone
        whole = torch.tensor(
            [(len(each.prompt_tokens) + begin) % width == 0 for each, (begin, _) in self.bounds(block)],
            device=self.device,
        )
        guess = (self.begin == starts[:, 0]) & whole
        step = rank(-self.ranked.masked_fill(~is_open, width).double())  # of the open places, from 0
        state = torch.arange(count, device=self.device)[:, None]
        opened = is_open[:, None] & (step[:, None] >= state)  # [B, S, n]
        tokens = torch.where(is_open[:, None] & ~opened, self.guesses[:, None], now[:, None])
        tokens = tokens.masked_fill(opened, self.drafter.mask)
        known = (state[:, 0] == 0) | (guess[:, None] & (state[:, 0] <= left[:, None]))
        last = left.clamp_max(count)
        full = last.where(known.gather(1, last.clamp_max(count - 1)[:, None])[:, 0] & (last < count), count)
        guessed = is_open[:, None] & (step[:, None] == state) & (state + 1 < count)
        begin = starts[:, :1] + exists.sum(-1, keepdim=True) + torch.arange(width, device=self.device)
        behind = (full < count)[:, None] & (begin < length)  # [B, n] places of the block behind

        lanes = torch.cat([tokens.flatten(1), torch.full_like(begin, self.drafter.mask)], 1)
        places = torch.cat([starts.repeat(1, count), begin], 1)
        there = torch.cat([(known[:, :, None] & exists[:, None]).flatten(1), behind], 1)
        free = torch.cat([(known[:, :, None] & opened).flatten(1), behind], 1)
        extra = length + 1 + torch.arange(count * width, device=self.device).expand(rows, -1)
        slots = torch.cat([starts, extra], 1).where(there, length)
        own = torch.zeros(rows, count + 1, length + 1 + count * width, dtype=torch.bool, device=self.device)
        group = torch.arange(count + 1, device=self.device).repeat_interleave(width).expand(rows, -1)
        own[torch.arange(rows, device=self.device)[:, None], group, slots] = True
        seen_behind = own[torch.arange(rows, device=self.device), full]  # of itself where there is none
        own[:, count] |= seen_behind
        own[:, :, length] = False
        own[:, :, :length] |= block.depths[:, None, :length] < starts[:, :1, None]
        depths = torch.cat([block.depths[:, : length + 1], places[:, width:].clamp_max(length)], 1)
        made = MaskedBlock.single(
            lanes,
            places.clamp_max(length),
            free,
            depths,
            own.repeat_interleave(width, 1),
            completes=2 * width,
            groups=block.groups,
            length=length,
            cache=block.cache,
            ends=block.ends,
        )
        kept = {each.name: getattr(made, each.name) for each in fields(made)}
        kept |= {"slots": slots[:, :, None], "valid": there[:, :, None]}
        return StatesBlock(**kept, states=count, known=known, guessed=guessed, full=full)

    def bounds(self, block: MaskedBlock) -> Any:
        """Requests, and the bounds of their blocks."""
        return zip(self.requests, block.groups, strict=True)

    def observe(self, draft: Draft, output: TargetOutput, scores: Any, verdict: Any) -> None:
        if isinstance(draft, StatesBlock) and isinstance(verdict, StateFill):
            self.begin, self.ranked, self.guesses = verdict.begin, verdict.order, verdict.tokens
            if self.drafter.head is not None:
                self.ranked = rank(self.drafter.head(verdict.confidence))


class StatesDrafter(UnmaskingDrafter):
    """Guesses the next places of a block, and proposes the states that follow (FreeDave, 2510.00294).

    For block-causal models. Where all places see each other, the prompt does too: each state would need a
    prompt of its own.

    Args:
        states: most places that a forward may decide in a block, 2 or more; one more in the block behind it
            where all of those are.
        head: folder of a `CommitFilter` that has learnt which places come next (`mmspec train filter --learn
            order`; after SPOT, 2610.22543), or a loaded one; None guesses by confidence.

    Raises:
        InputError: a number of states out of range.
        CheckpointError: the head cannot be read.
    """

    proposes = "states"
    by_confidence = False
    session = StatesSession

    def __init__(self, states: int = 8, head: Any = None) -> None:
        if not is_integer(states) or not 2 <= states <= MAX_STATES:
            raise InputError("states", states, f"an integer from 2 to {MAX_STATES}")
        super().__init__()
        self.states = states
        self.head = None if head is None else read_filter(head, "head")

    def fit(self, target: Target[Any]) -> StatesDrafter:
        fitted = super().fit(target)
        if not isinstance(fitted, StatesDrafter):
            raise TypeError(type(fitted).__name__)
        if not fitted.is_causal:
            allowed = "a block-causal model, as SDAR is: in others each state needs a prompt of its own"
            raise InputError("accelerator", "freedave", allowed)
        fitted = copy.copy(fitted)
        size = fitted.block_length or 1
        if fitted.head is not None:
            if fitted.head.config.block_length != size:
                raise InputError("head", fitted.head.config.block_length, f"one for blocks of {size}")
            fitted.head = copy.deepcopy(fitted.head).to(target.device)  # type: ignore[arg-type]
        fitted.states = min(self.states, 1 + size)
        fitted.max_nodes = 1 + (fitted.states + 1) * (fitted.block_length or 1)
        return fitted
