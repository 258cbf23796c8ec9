"""Low-confidence remasking: the most confident places are decided, all others stay masked."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mmspec.decoding.distribution import Scores
from mmspec.decoding.draft import Block, Draft, DraftKind
from mmspec.decoding.interfaces import AcceptanceRule, TargetOutput
from mmspec.decoding.random_stream import RandomStream
from mmspec.decoding.verdict import Fill, Measured, Verdict
from mmspec.errors import InputError
from mmspec.validation import is_integer, require_number


@dataclass(frozen=True)
class LowConfidence(AcceptanceRule):
    """Choose a token at every open place, and decide the places whose tokens are the most probable.

    Low-confidence remasking (LLaDA, 2502.09992, section 2.4; MaskGIT, 2202.04200). The confidence is the
    probability of the chosen token in the promised distribution, that is after temperature and truncation,
    where the paper's is at temperature 1. Each row ranks its own places; of equals the leftmost is decided.

    One place a step is the plain decoding of a masked model, which "exact" refers to: the model defines no
    order, so there is no other distribution of whole outputs. More are lossy, without a bound: tokens decided
    in one round are chosen independently of each other.

    Args:
        places_per_step: places of each row that a round decides; the paper's length of a block by its steps.
        remask_below: a decided place of the block whose token has come to be less probable than this is
            opened again, the least probable first, at most one fewer than the round decides, so that every
            round comes nearer to the end; tokens of a block are emitted when it is complete. 0 never does.

    Raises:
        InputError: a value outside its range.
    """

    places_per_step: int = 1
    remask_below: float = 0.0

    sound_for = frozenset({DraftKind.POINT})
    judges = "places"
    exactness = "lossy"

    @property
    def promise(self) -> str:
        return "lossy" if self.places_per_step > 1 or self.remask_below else "exact"

    def __post_init__(self) -> None:
        if not is_integer(self.places_per_step) or self.places_per_step < 1:
            raise InputError("places_per_step", self.places_per_step, "a positive integer")
        require_number("remask_below", self.remask_below, 0.0, 1.0, "0 (never) to 1")

    def decide(
        self, draft: Draft, output: TargetOutput, scores: Scores, random: RandomStream, first: Tensor
    ) -> tuple[Verdict, Measured]:
        if not isinstance(draft, Block):
            return super().decide(draft, output, scores, random, first)
        is_open = draft.is_open[:, :, 0]
        token = scores.choose(draft.lanes, random, first).view_as(is_open)
        # of the logits as they are: probabilities of greedy decoding are 1 everywhere
        p = scores.logits.softmax(-1).view(*is_open.shape, -1)
        confidence = p.gather(-1, token[:, :, None])[..., 0]
        chosen = rank(confidence.masked_fill(~is_open, -1.0)) < self.places_per_step
        finite = scores.is_finite().view_as(is_open)
        decided, failed = chosen & is_open & finite, (is_open & ~finite).any(-1)
        fill = Fill.of(draft.starts, token, decided, torch.zeros_like(decided), failed)
        if self.remask_below:
            held, exists = draft.tokens[:, :, 0], draft.valid[:, :, 0]
            kept = p.gather(-1, held.clamp_max(p.shape[-1] - 1)[:, :, None])[..., 0]
            doubted = exists & ~is_open & (kept < self.remask_below)
            fewest = rank(-kept.masked_fill(~doubted, 2.0))
            reopened = doubted & (fewest < decided.sum(-1, keepdim=True) - 1)
            complete = ~(exists & (reopened | (is_open & ~decided))).any(-1)
            settled = draft.starts[:, 0] + exists.sum(-1) * complete
            fill = replace(fill, reopened=reopened, settled=settled)
        return fill, Measured.nothing(is_open)


def rank(values: Tensor) -> Tensor:
    """[B, n] how many values of a row [B, n] are larger; of equals, those further left count as larger."""
    return values.argsort(dim=-1, descending=True, stable=True).argsort(-1)
