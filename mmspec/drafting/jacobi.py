"""Jacobi windows: the target drafts for itself, a window of places at a time.

SJD (2410.01699); its redraw by maximal coupling (MC-SJD, 2510.24211; SJD-PAC, 2603.18599) or with shared
Gumbel noise (GS, 2510.24211); the tree of SJD-PAC.

Every round the target scores the window, the rule commits a part of it, and every place that is left is drawn
anew from the target's p there. That p is the q of the new draft, however it was coupled with the old one.
Commit and redraw are separate decisions with random numbers of their own.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from mmspec.decoding.canvas import Canvas
from mmspec.decoding.distribution import Categorical, Scores
from mmspec.decoding.draft import Draft, DraftKind
from mmspec.decoding.image_grid import FREE, ImageGrid
from mmspec.decoding.indexing import pick
from mmspec.decoding.interfaces import Drafter, DraftSession, PromptOutput, Request, Target, TargetOutput
from mmspec.decoding.random_stream import Purpose, RandomStream
from mmspec.decoding.rows import join_rows, part_of_list, part_of_rows
from mmspec.decoding.sampling import Sampler
from mmspec.decoding.sparse_distribution import SparseDistribution, join_packed, part_of_packed, unpack
from mmspec.decoding.verdict import Verdict
from mmspec.drafting.window import NEIGHBOURS, WindowLayout
from mmspec.errors import InputError
from mmspec.kernels import redraw
from mmspec.kernels.redraw import invert
from mmspec.registry import did_you_mean
from mmspec.validation import is_integer
from mmspec.verification.residuals import sampled_distribution

MAX_WINDOW = 128
MAX_TAIL_CHILDREN = 16
KIND_OF_COUPLING = {
    "fresh": DraftKind.IID,
    "maximal": DraftKind.IID,
    "gumbel": DraftKind.IID,
    "exact": DraftKind.COUPLED,
}
INITS = ("edge", "uniform", *NEIGHBOURS)


class WindowDrafter(Drafter):
    """Base of drafters that fill a window of places, round after round.

    Args:
        window: nodes fed per forward, the root included and those of a tree not; 1 is plain decoding.
        coupling: how a place is drawn anew from its new distribution. "fresh": independently (SJD).
            "maximal": the old draft is kept with the largest probability that leaves the new one distributed
            as the new distribution (MC-SJD). "gumbel": with noise that belongs to the place and is the same
            in every round (GS). "exact": with the noise of the target itself, so that the output is bitwise
            that of plain decoding with the same seed.
        init: what newly uncovered places hold. "edge": a draw from the target's distribution at the last free
            place of the window. "uniform": any code, or any token where there is no grid. "repeat": the cell
            before, "above": the one in the row above, as published. Where the grammar forces a token, that
            token.
        tail_depth: for how many places from the front of the window there are further candidates.
        tail_children: candidates at each of these places, the window's own included.

    Raises:
        InputError: a value outside its range, or a tail of depth without children or the reverse.
    """

    runs_ahead = True
    rows_move = True

    def __init__(
        self,
        window: int,
        coupling: str,
        init: str,
        tail_depth: int = 0,
        tail_children: int = 0,
    ) -> None:
        if not is_integer(window) or not 1 <= window <= MAX_WINDOW:
            raise InputError("window", window, f"an integer from 1 to {MAX_WINDOW}")
        if coupling not in KIND_OF_COUPLING:
            raise InputError("coupling", coupling, did_you_mean(coupling, KIND_OF_COUPLING))
        if init not in INITS:
            raise InputError("init", init, did_you_mean(init, INITS))
        self.branches = tail_depth != 0 or tail_children != 0
        if self.branches and (not is_integer(tail_depth) or not 1 <= tail_depth < window):
            raise InputError("tail_depth", tail_depth, f"1 to {window - 1}, below the window; or no tail")
        if self.branches and (not is_integer(tail_children) or not 2 <= tail_children <= MAX_TAIL_CHILDREN):
            raise InputError("tail_children", tail_children, f"2 to {MAX_TAIL_CHILDREN}; or no tail")
        self.window, self.coupling, self.init = window, coupling, init
        self.tail_depth, self.tail_children = tail_depth, tail_children
        self.kind = KIND_OF_COUPLING[coupling]
        if self.branches and self.kind is DraftKind.IID:
            self.kind = DraftKind.WITHOUT_REPLACEMENT
        chain = range(-1, window - 1)  # the parent of each node of the window
        siblings = [depth for depth in range(tail_depth) for _ in range(tail_children - 1)]
        self.parents = [max(parent, 0) for parent in (*chain, *siblings)]
        self.max_nodes = len(self.parents)

    def check(self, target: Target[Any]) -> None:
        self.require_room(target.grid, target.vocabulary)

    def require_room(self, grid: ImageGrid | None, vocabulary: int) -> None:
        """Raise InputError unless the window fits into an image, and its options go with one."""
        if grid is None and self.init in NEIGHBOURS:
            raise InputError("init", self.init, "edge or uniform; only cells of images have neighbours")
        if grid is not None and self.window > grid.length:
            raise InputError("window", self.window, f"1 to {grid.length}, the tokens of the image")
        if self.tail_children > vocabulary:
            raise InputError("tail_children", self.tail_children, f"at most {vocabulary}, the vocabulary")


@dataclass(frozen=True)
class Observed:
    """The last draft of a window, and what became of it.

    Attributes:
        draft: without its q.
        q: [B, n, V] what its tokens were drawn from, or packed; None for coupled ones.
        p: the target's distribution after each node, likewise.
        finite: [B, n] whether p is.
        accepted: [B] number of accepted tokens.
    """

    draft: Draft
    q: Tensor | SparseDistribution | None
    p: Tensor | SparseDistribution
    finite: Tensor
    accepted: Tensor

    def part(self, rows: Sequence[int]) -> Observed:
        """Return what became of some rows; see `Rows`."""
        q = None if self.q is None else part_of_packed(self.q, rows)
        finite, accepted = (part_of_rows(each, rows) for each in (self.finite, self.accepted))
        return Observed(self.draft.part(rows), q, part_of_packed(self.p, rows), finite, accepted)

    def joined(self, other: Observed) -> Observed:
        """Return what became of these rows, followed by others; see `Rows`."""
        q = None if self.q is None or other.q is None else join_packed(self.q, other.q)
        finite, accepted = join_rows(self.finite, other.finite), join_rows(self.accepted, other.accepted)
        return Observed(self.draft.joined(other.draft), q, join_packed(self.p, other.p), finite, accepted)


@dataclass(frozen=True)
class Window:
    """A new window: slot 0 holds the root, the others drafts.

    Attributes:
        place: [B, W] output index of each slot.
        tokens: [B, W].
        p: [B, W, V] what each was drawn from.
        node: [B, W] the node of the last draft that gave p.
        stood: [B, W] the node of the last draft that stood in the slot; 0 where none did.
        known: [B, W] the token that grammar or a neighbour put there, or FREE.
    """

    place: Tensor
    tokens: Tensor
    p: Tensor
    node: Tensor
    stood: Tensor
    known: Tensor


class JacobiSession(DraftSession):
    """Window of drafts of one batch.

    Attributes:
        support: k where distributions are kept as k pairs a place between rounds, None where they are kept
            whole.
        observed: the last draft, and what became of it.
        round: [B, 1] how often the window was drawn; it keys the random numbers of places drawn again and
            again.
    """

    def __init__(
        self,
        drafter: WindowDrafter,
        requests: Sequence[Request],
        prefill: PromptOutput,
        sampler: Sampler,
        random: RandomStream,
    ) -> None:
        self.drafter, self.random = drafter, random
        device, vocabulary = prefill.logits.device, prefill.logits.shape[-1]
        self.vocabulary = vocabulary
        self._lay_out([request.grid for request in requests])
        self.round = torch.zeros(len(requests), 1, dtype=torch.long, device=device)
        self.steps = torch.arange(drafter.window, device=device)
        self.parents = torch.tensor(drafter.parents, device=device)
        # The prompt is a window of one node, whose distribution is the edge of the first real window.
        token = torch.zeros(len(requests), 1, dtype=torch.long, device=device)
        draft = Draft.chain(token, drafter.kind)
        scores = sampler(prefill.logits, draft, [request.prompt_tokens for request in requests])
        support = sampler.support(vocabulary)
        # an initial draft that is uniform has mass everywhere
        pays = drafter.init != "uniform" and SparseDistribution.pays(
            support, vocabulary, scores.dtype.itemsize
        )
        self.support = support if pays else None
        self._keep(replace(draft, q=Categorical(scores.p)), scores, token[:, 0])

    def part(self, rows: Sequence[int]) -> Self:
        chosen = copy.copy(self)
        chosen._lay_out(part_of_list(self.grids, rows))
        chosen.random, chosen.round = self.random.part(rows), part_of_rows(self.round, rows)
        chosen.observed = self.observed.part(rows)
        return chosen

    def joined(self, other: Self) -> Self:
        both = copy.copy(self)
        both._lay_out([*self.grids, *other.grids])
        both.random, both.round = self.random.joined(other.random), join_rows(self.round, other.round)
        both.support = max(self.support, other.support) if self.support and other.support else None
        both.observed = self.observed.joined(other.observed)
        return both

    def _lay_out(self, grids: Sequence[ImageGrid | None]) -> None:
        """Set the grids of the rows."""
        self.grids, self.layout = grids, WindowLayout(grids, self.vocabulary, self.random.keys.device)

    def observe(self, draft: Draft, output: TargetOutput, scores: Scores, verdict: Verdict) -> None:
        self._keep(draft, scores, verdict.accepted)

    def _keep(self, draft: Draft, scores: Categorical, accepted: Tensor) -> None:
        """Keep what the next round needs, distributions as pairs where that takes less memory."""
        q, p = None if draft.q is None else self._pack(draft.q.p), self._pack(scores.p)
        self.observed = Observed(replace(draft, q=None), q, p, scores.is_finite(), accepted)

    def _pack(self, distribution: Tensor) -> Tensor | SparseDistribution:
        return distribution if self.support is None else SparseDistribution.of(distribution, self.support)

    def propose(self, canvas: Canvas) -> Draft:
        drafter, old = self.drafter, self.observed
        seen, accepted = (
            replace(old.draft, q=None if old.q is None else Categorical(unpack(old.q))),
            old.accepted,
        )
        self.round = self.round + 1
        place = canvas.emitted[:, None] - 1 + self.steps  # [B, W] output index of each node of the new window
        # A node gives the p of the place after its own. Each row has moved on by what it accepted; beyond the
        # last scored node no p is known, and that of the edge stands in.
        scored = min(seen.tokens.shape[1], drafter.window)
        node = accepted[:, None] + self.steps
        covered, drafted = node < scored, node + 1 < scored
        node = torch.where(covered, node, self._edge(place[:, :1] - accepted[:, None], scored))
        p, sound = pick(unpack(old.p), node), old.finite.gather(1, node)
        if drafter.init == "uniform":
            p = torch.where(covered[:, :, None], p, self.layout.uniform.to(p.dtype))
            sound = sound | ~covered
        stood = torch.where(drafted, node + 1, 0)
        tokens = self._redraw(p, place, seen, stood)
        tokens[:, 0] = canvas.root
        known = torch.full_like(tokens, FREE)
        if self.layout.has_syntax or drafter.init in NEIGHBOURS:
            first = place[:, :1] + scored - accepted[:, None]
            known = known.where(covered, self._standing(place, first, tokens, canvas))
            tokens, sound = torch.where(known == FREE, tokens, known), sound | (known != FREE)
            one_hot = torch.zeros_like(p).scatter(-1, tokens[:, :, None], 1.0)
            p = torch.where((known == FREE)[:, :, None], p, one_hot)
        tokens, p = self._revise(Window(place, tokens, p, node, stood, known), seen)
        inside = place < self.layout.length
        valid = (inside & sound) | (self.steps == 0)
        faulty = (inside & ~sound)[:, 1:].any(-1)
        if drafter.branches:
            tokens, valid, p = self._branch(place, tokens, valid, p)
        q = None if drafter.kind is DraftKind.COUPLED else Categorical(p)
        depth, children = drafter.window - 1, max(drafter.tail_children, min(1, drafter.window - 1))
        parents = self.parents.expand_as(tokens)
        return Draft(tokens, parents, valid, drafter.kind, q, depth, children, faulty)

    def _revise(self, window: Window, seen: Draft) -> tuple[Tensor, Tensor]:
        """Change tokens and distributions [B, W, V] of a new window, before they are proposed."""
        return window.tokens, window.p

    def _edge(self, place: Tensor, scored: int) -> Tensor:
        """[B, 1] last scored node that gave the p of a free place; that of a forced one is one-hot.

        Args:
            place: [B, 1] the place that node 0 gave the p of.
            scored: number of scored nodes.
        """
        nodes = torch.arange(scored, device=place.device)
        return nodes.where(self.layout.forced(place + nodes) == FREE, 0).amax(-1, keepdim=True)

    def _standing(self, place: Tensor, first: Tensor, tokens: Tensor, canvas: Canvas) -> Tensor:
        """[B, W] token that grammar or neighbour puts in places from `first` [B, 1] on; FREE for a draw."""
        forced = self.layout.forced(place)
        if self.drafter.init not in NEIGHBOURS:
            return forced
        copied = self.layout.copy(self.drafter.init, place, first, tokens, canvas.before(self.layout.reach))
        return torch.where(forced == FREE, copied, forced)

    def _uniforms(self, place: Tensor) -> Tensor:
        """[B, W, 3] uniforms for places [B, W], new in every round."""
        return self.random.at(self.round).uniform(place, Purpose.REDRAW, 3, torch.float64)

    def _redraw(self, p: Tensor, place: Tensor, seen: Draft, old: Tensor, u: Tensor | None = None) -> Tensor:
        """[B, W] a token from each p [B, W, V], coupled with the old tokens.

        Args:
            place: [B, W] output indices.
            seen: the draft that holds the old tokens.
            old: [B, W] the node that held the place's old token; 0 where it had none.
            u: [B, W, 3] of `_uniforms`, where they are at hand.
        """
        coupling, vocabulary = self.drafter.coupling, p.shape[-1]
        if coupling in ("gumbel", "exact"):
            purpose = Purpose.TARGET if coupling == "exact" else Purpose.REDRAW
            return (p.log() + self.random.gumbel(place, purpose, vocabulary, p.dtype)).argmax(-1)
        u = self._uniforms(place) if u is None else u
        if coupling == "fresh":
            return invert(p, u[..., 1:])
        return redraw(p, sampled_distribution(seen).p, seen.tokens, seen.valid, old, u)

    def _branch(
        self, place: Tensor, tokens: Tensor, valid: Tensor, p: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Append the further candidates of the first places to tokens, valid and p.

        Without replacement by the Gumbel top-k trick (Kool et al., 1903.06059), the window's own token taken
        out first. The target's own noise finds the candidates that it is likeliest to choose.
        """
        head = slice(1, self.drafter.tail_depth + 1)
        p_head, extra = p[:, head], self.drafter.tail_children - 1
        left = p_head.scatter(-1, tokens[:, head, None], 0.0)
        siblings = (left.log() + self._noise(place[:, head], p)).topk(extra, dim=-1).indices
        drawable = (left.gather(-1, siblings) > 0) & valid[:, head, None]
        return (
            torch.cat([tokens, siblings.flatten(1)], 1),
            torch.cat([valid, drawable.flatten(1)], 1),
            torch.cat([p, p_head.repeat_interleave(extra, 1)], 1),
        )

    def _noise(self, place: Tensor, p: Tensor) -> Tensor:
        """[B, n, V] Gumbel noise of further candidates at places [B, n], in the precision of p [B, ..., V].

        That of the target finds those which it is likeliest to choose.
        """
        exact = self.drafter.coupling == "exact"
        random = self.random if exact else self.random.at(self.round)
        return random.gumbel(place, Purpose.TARGET if exact else Purpose.DRAFT, p.shape[-1], p.dtype)
