"""Base of the rules that choose which open places of a masked model's block are decided in a round."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from mmspec.core.distributions import Scores
from mmspec.core.draft import Block
from mmspec.core.interfaces import Rule, TargetOutput
from mmspec.core.once import once
from mmspec.core.promise import Level
from mmspec.core.random_stream import Purpose, RandomStream
from mmspec.core.verdict import Fill, Measured, Verdict
from mmspec.errors import InputError
from mmspec.open_types import Keywords
from mmspec.registry import require_known
from mmspec.validation import is_integer, require_number

__all__ = ["PlaceRule", "Places", "draw_anew", "entropy", "places_of", "rank", "within"]

FALLBACKS = ("surest", "leftmost")
NOWHERE = -1.0  # confidence of places that are not open: below any other


@dataclass(frozen=True)
class Places:
    """The n places of one block of each row, as input of the rules.

    Attributes:
        token: [B, n] the token chosen at each place.
        logits: [B, n, V] after temperature and truncation.
        judged: [B, n, V] logits whose probabilities are the confidences: `logits`, or the model's own.
        is_open: [B, n] whether a token may be decided there.
        exists: [B, n] False for padding of shorter blocks.
        begin: [B] output index of the first place.
        length: maximum length of the whole output.
        ends: tokens that end an output.
    """

    token: Tensor
    logits: Tensor
    judged: Tensor
    is_open: Tensor
    exists: Tensor
    begin: Tensor
    length: int
    ends: frozenset[int] = frozenset()

    @once
    def p(self) -> Tensor:
        """[B, n, V] probabilities; at temperature 0 those of the unscaled logits, because all would be 1."""
        return self.judged.softmax(-1)

    @once
    def confidence(self) -> Tensor:
        """[B, n] probability of the chosen token; below 0 where a place is not open."""
        return self.p.gather(-1, self.token[..., None])[..., 0].masked_fill(~self.is_open, NOWHERE)

    @once
    def order(self) -> Tensor:
        """[B, n] rank of each place by confidence, from 0; of equal ones the leftmost comes first."""
        return rank(self.confidence)

    @once
    def leftmost(self) -> Tensor:
        """[B, n] rank of each open place from the left, from 0; n where it is not open."""
        return (self.is_open.long().cumsum(-1) - 1).where(self.is_open, self.is_open.shape[1])

    @property
    def is_end(self) -> Tensor:
        """[B, n] whether the chosen token ends the output."""
        ends = torch.tensor(sorted(self.ends), dtype=torch.long, device=self.token.device)
        return torch.isin(self.token, ends)

    def cut(self, held: Tensor) -> Places:
        """Close the places after a decided end token; held: [B, n] the current tokens."""
        ends = torch.tensor(sorted(self.ends), dtype=torch.long, device=held.device)
        ended = (torch.isin(held, ends) & self.exists & ~self.is_open).long().cumsum(-1) > 0
        return replace(self, is_open=self.is_open & ~ended)

    def map(self, change: Callable[[Tensor], Tensor]) -> Places:
        """Return the places with `change` applied to each tensor [B, ...]."""
        held = {each.name: getattr(self, each.name) for each in fields(self)}
        changed: Keywords = {name: change(value) for name, value in held.items() if isinstance(value, Tensor)}
        return replace(self, **changed)

    @property
    def decided(self) -> Tensor:
        """[B, 1] number of places of the block that earlier rounds decided."""
        return (self.exists & ~self.is_open).sum(-1, keepdim=True)

    @property
    def progress(self) -> Tensor:
        """[B, 1] decided share of the whole output, after one more place is decided."""
        return ((self.begin[:, None] + self.decided + 1).float() / self.length).clamp_max(1.0)


@dataclass(frozen=True)
class PlaceRule(Rule[Block]):
    """Base of rules that choose a token at every open place of a block, and decide some of these places.

    A round decides the places that `choose` selects, and at least `places_per_step` places. One place per
    round is the plain decoding of a masked model, which "exact" refers to: such a model defines no order, so
    that there is no other distribution of whole outputs. More places per round are lossy, without a bound,
    because tokens decided in one round are chosen independently.

    Args:
        places_per_step: smallest number of places of each row that a round decides, if its block has so many.
        remask_below: a decided place of the block is reopened if the probability of its token has fallen
            below this, 0 (never) to 1. The least probable places come first, and at most one fewer than the
            round decides; tokens of a block are emitted when it is complete.
        end_cut: whether places after a decided end token are skipped (after Learn2PD, 2509.25188).
        fallback: which places are decided in any case: the "surest", as published, or the "leftmost", as
            `selection_policy` of vLLM. For a model that decides from left to right, greedy text then equals
            that of plain decoding as long as the tokens decided ahead are correct.

    Raises:
        InputError: a value outside its range.
    """

    places_per_step: int = 1
    remask_below: float = 0.0
    end_cut: bool = False
    fallback: str = "surest"

    by_token = True  # False if the chosen places do not depend on the tokens drawn in the round
    exactness = Level.LOSSY

    def __post_init__(self) -> None:
        if not is_integer(self.places_per_step) or self.places_per_step < 1:
            raise InputError("places_per_step", self.places_per_step, "must be a positive integer")
        require_number("remask_below", self.remask_below, 0.0, 1.0, "must be from 0 (never) to 1")
        if not isinstance(self.end_cut, bool):
            raise InputError("end_cut", self.end_cut, "must be True or False")
        require_known("fallback", self.fallback, FALLBACKS)

    @abstractmethod
    def choose(self, places: Places) -> Tensor:
        """[B, n] the places to decide; places that are not open are ignored."""

    def order(self, places: Places) -> Tensor:
        """[B, n] rank of each open place by confidence, from 0."""
        return places.order

    def chosen(self, places: Places) -> Tensor:
        """[B, n] the open places that a round decides."""
        first = places.leftmost if self.fallback == "leftmost" else self.order(places)
        return (self.choose(places) | (first < self.places_per_step)) & places.is_open

    def decide(
        self, draft: Block, output: TargetOutput, scores: Scores, random: RandomStream, first: Tensor
    ) -> tuple[Verdict, Measured]:
        anew = self.by_token or self.remask_below > 0
        places = places_of(draft, scores, random, first, anew=anew)
        places = places.cut(draft.tokens[:, :, 0]) if self.end_cut else places
        finite = scores.is_finite().view_as(places.is_open)
        return self.fill(draft, places, finite), Measured.nothing(places.is_open)

    def fill(self, draft: Block, places: Places, finite: Tensor) -> Fill:
        """Decide the chosen places where the target's numbers are finite [B, n]."""
        decided, failed = self.chosen(places) & finite, (places.is_open & ~finite).any(-1)
        fill = Fill.of(draft.starts, places.token, decided, torch.zeros_like(decided), failed)
        return self.doubt(draft, places, fill) if self.remask_below else fill

    def doubt(self, draft: Block, places: Places, fill: Fill) -> Fill:
        """Reopen places whose tokens have become improbable."""
        held = draft.tokens[:, :, 0].clamp_max(places.logits.shape[-1] - 1)
        kept = places.p.gather(-1, held[..., None])[..., 0]
        doubted = places.exists & ~places.is_open & (kept < self.remask_below)
        fewest = rank(-kept.masked_fill(~doubted, 2.0))
        reopened = doubted & (fewest < fill.decided.sum(-1, keepdim=True) - 1)
        complete = ~(places.exists & (reopened | (places.is_open & ~fill.decided))).any(-1)
        settled = places.begin + places.exists.sum(-1) * complete
        return replace(fill, reopened=reopened, settled=settled)


def places_of(
    draft: Block, scores: Scores, random: RandomStream, first: Tensor, *, anew: bool, groups: int = 1
) -> Places:
    """Return the places of a block whose lanes have one node each, with the tokens chosen there.

    Args:
        draft: the block; or G groups of n lanes each, states of blocks.
        scores, random, first: see `AcceptanceRule.decide`.
        anew: whether a place that stays open is drawn with fresh noise next time. This is required if the
            drawn tokens decide which places are kept: the tokens of other places would be drawn again
            otherwise. If False, the noise of a place is the same in all rounds.
        groups: G.
    """
    parts = draft.is_open[:, :, 0], draft.valid[:, :, 0], draft.starts
    is_open, exists, starts = (each.reshape(len(each) * groups, -1) for each in parts)
    begin, length = starts[:, 0], getattr(draft, "asked", is_open.shape[1])
    if anew:
        count = begin + (exists & ~is_open).sum(-1)
        token = draw_anew(scores, random, starts, count[:, None].expand_as(starts))
    else:
        token = scores.choose(draft.lanes, random, first)
    logits = scores.logits.view(*is_open.shape, -1)
    judged = scores.own_logits.view_as(logits) if getattr(draft, "judges_own", False) else logits
    ends: frozenset[int] = getattr(draft, "ends", frozenset())
    return Places(token.view_as(is_open), logits, judged, is_open, exists, begin, length, ends)


def draw_anew(scores: Scores, random: RandomStream, places: Tensor, count: Tensor) -> Tensor:
    """Draw tokens [B, n] with noise keyed by the place and the number of decided places.

    Args:
        scores: of the B n lanes.
        random: of the same lanes.
        places, count: [B, n] output indices, and number of decided places of the row's whole output.
    """
    fresh = random.at(count.reshape(-1, 1))
    return scores.sample(fresh, places.reshape(-1, 1), Purpose.REDRAW).view_as(places)


def rank(values: Tensor) -> Tensor:
    """[B, n] number of larger values in the row [B, n]; of equal ones, those further left count as larger."""
    return values.argsort(dim=-1, descending=True, stable=True).argsort(-1)


def entropy(logits: Tensor) -> Tensor:
    """[B, n] entropy in nats of distributions given by logits [B, n, V], which may be -inf."""
    log_p = logits.log_softmax(-1)
    return -(log_p.exp() * log_p.masked_fill(log_p == float("-inf"), 0.0)).sum(-1)


def within(nats: Tensor, bound: float) -> Tensor:
    """[B, n] places of the lowest entropies [B, n] for which the sum of the lower ones is at most `bound`."""
    ascending, index = nats.sort(dim=-1, stable=True)
    before = ascending.cumsum(-1) - ascending
    return torch.zeros_like(nats, dtype=torch.bool).scatter(-1, index, before <= bound)
