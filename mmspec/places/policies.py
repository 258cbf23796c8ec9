"""Base of the rules that choose which open places of a masked model's block a round decides."""

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
from mmspec.registry import did_you_mean
from mmspec.validation import is_integer, require_number

__all__ = ["PlaceRule", "Places", "draw_anew", "entropy", "places_of", "rank", "within"]

FALLBACKS = ("surest", "leftmost")
NOWHERE = -1.0  # confidence of a place that is not open: below any other


@dataclass(frozen=True)
class Places:
    """Places of one block of each row, n of them in their order, as rules choose among them.

    Attributes:
        token: [B, n] the token chosen at each place.
        logits: [B, n, V] as they are promised: after temperature and truncation.
        judged: [B, n, V] logits whose probabilities are the confidences: those promised, or the model's own.
        is_open: [B, n] whether a token may be decided there.
        exists: [B, n] False for padding of shorter blocks.
        begin: [B] output index of the first place.
        length: tokens that the whole output may have.
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
        """[B, n, V] probabilities; at temperature 0 of the logits as they are, else all would be 1."""
        return self.judged.softmax(-1)

    @once
    def confidence(self) -> Tensor:
        """[B, n] probability of the chosen token; below 0 where a place is not open."""
        return self.p.gather(-1, self.token[..., None])[..., 0].masked_fill(~self.is_open, NOWHERE)

    @once
    def order(self) -> Tensor:
        """[B, n] rank of each place by its confidence, from 0; of equals the leftmost comes first."""
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
        """These places, of which none behind a decided end token is open; held: [B, n] what stands there."""
        ends = torch.tensor(sorted(self.ends), dtype=torch.long, device=held.device)
        ended = (torch.isin(held, ends) & self.exists & ~self.is_open).long().cumsum(-1) > 0
        return replace(self, is_open=self.is_open & ~ended)

    def map(self, change: Callable[[Tensor], Tensor]) -> Places:
        """These places with each tensor [B, ...] changed."""
        held = {each.name: getattr(self, each.name) for each in fields(self)}
        changed: Keywords = {name: change(value) for name, value in held.items() if isinstance(value, Tensor)}
        return replace(self, **changed)

    @property
    def decided(self) -> Tensor:
        """[B, 1] places of the block that earlier rounds decided."""
        return (self.exists & ~self.is_open).sum(-1, keepdim=True)

    @property
    def progress(self) -> Tensor:
        """[B, 1] share of the whole output that is decided once this round has decided one place."""
        return ((self.begin[:, None] + self.decided + 1).float() / self.length).clamp_max(1.0)


@dataclass(frozen=True)
class PlaceRule(Rule[Block]):
    """Base of rules that choose a token at every open place of a block, and decide some of them.

    Decides what `choose` chooses, and `places_per_step` places in any case. One place a round is
    the plain decoding of a masked model, which "exact" refers to: such a model defines no order, so there is
    no other distribution of whole outputs. More are lossy, without a bound: tokens decided in one round are
    chosen independently of each other.

    Args:
        places_per_step: fewest places of each row that a round decides, as far as its block has them.
        remask_below: a decided place of the block whose token has come to be less probable than this is
            opened again, the least probable first, at most one fewer than the round decides, so that every
            round comes nearer to the end; tokens of a block are emitted when it is complete. 0 never does.
        end_cut: whether places behind a decided token that ends the output are left alone (after Learn2PD's
            end-of-text prediction, 2509.25188, which cuts behind predicted ones as well).
        fallback: which places are decided in any case: the "surest", as published, or the "leftmost", as
            `selection_policy` of vLLM has it. For a model that decides from left to right greedy text is then
            that of plain decoding as long as what is decided ahead is right.

    Raises:
        InputError: a value outside its range.
    """

    places_per_step: int = 1
    remask_below: float = 0.0
    end_cut: bool = False
    fallback: str = "surest"

    by_token = True  # False where the tokens drawn in a round say nothing about which places it decides
    exactness = Level.LOSSY

    def __post_init__(self) -> None:
        if not is_integer(self.places_per_step) or self.places_per_step < 1:
            raise InputError("places_per_step", self.places_per_step, "a positive integer")
        require_number("remask_below", self.remask_below, 0.0, 1.0, "0 (never) to 1")
        if not isinstance(self.end_cut, bool):
            raise InputError("end_cut", self.end_cut, "True or False")
        if self.fallback not in FALLBACKS:
            raise InputError("fallback", self.fallback, did_you_mean(self.fallback, FALLBACKS))

    @abstractmethod
    def choose(self, places: Places) -> Tensor:
        """[B, n] the places that are decided, those that are not open among them or not."""

    def order(self, places: Places) -> Tensor:
        """[B, n] rank of each open place by how sure it is, from 0."""
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
        """Decide what is chosen, where numbers are finite [B, n]."""
        decided, failed = self.chosen(places) & finite, (places.is_open & ~finite).any(-1)
        fill = Fill.of(draft.starts, places.token, decided, torch.zeros_like(decided), failed)
        return self.doubt(draft, places, fill) if self.remask_below else fill

    def doubt(self, draft: Block, places: Places, fill: Fill) -> Fill:
        """Open places again whose tokens have come to be improbable."""
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
    """The places of a block whose lanes are of one node each, with the tokens that are chosen there.

    Args:
        draft: the block; or G groups of n lanes each, states of blocks.
        scores, random, first: as of `AcceptanceRule.decide`.
        anew: whether a place that stays open is drawn with other noise next time. If the drawn tokens decide
            which places are kept, it has to be: those that were not kept would come back. Else the noise of
            a place is its own in all rounds.
        groups: G.

    Returns:
        Places [B G, n].
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
    """Draw tokens [B, n] with the noise that places have while so many of the output are decided.

    Args:
        scores: of the B n lanes.
        random: of as many.
        places, count: [B, n] output indices, and decided places of the whole output of the row.
    """
    fresh = random.at(count.reshape(-1, 1))
    return scores.sample(fresh, places.reshape(-1, 1), Purpose.REDRAW).view_as(places)


def rank(values: Tensor) -> Tensor:
    """[B, n] how many values of a row [B, n] are larger; of equals, those further left count as larger."""
    return values.argsort(dim=-1, descending=True, stable=True).argsort(-1)


def entropy(logits: Tensor) -> Tensor:
    """[B, n] nats of distributions given by logits [B, n, V], which may be -inf."""
    log_p = logits.log_softmax(-1)
    return -(log_p.exp() * log_p.masked_fill(log_p == float("-inf"), 0.0)).sum(-1)


def within(nats: Tensor, bound: float) -> Tensor:
    """[B, n] places of the lowest entropies [B, n], as long as those before each sum to at most `bound`."""
    ascending, index = nats.sort(dim=-1, stable=True)
    before = ascending.cumsum(-1) - ascending
    return torch.zeros_like(nats, dtype=torch.bool).scatter(-1, index, before <= bound)
