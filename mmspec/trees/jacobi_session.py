"""Jacobi windows: the target drafts for itself, a window of places at a time.

In every round of SJD (2410.01699) the target scores the window, the rule commits a part of it, and each
remaining place is redrawn from the target's p there. The draw may be coupled with the old token, maximally
(MC-SJD, 2510.24211; SJD-PAC, 2603.18599) or by shared Gumbel noise (GS, 2510.24211). With any coupling, that
p is the q of the new draft. Commits and redraws use separate random numbers. A window may be a tree, as in
SJD-PAC.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import torch
from torch import Tensor

from mmspec.core.canvas import Canvas, Stopping
from mmspec.core.distributions import Categorical, PointMass, Scores
from mmspec.core.draft import DraftKind, Tree
from mmspec.core.image_grid import FREE, Layout, require_grid
from mmspec.core.indexing import pick
from mmspec.core.interfaces import AnyTarget, DraftSession, Request, TargetOutput
from mmspec.core.processors import History
from mmspec.core.random_stream import Purpose
from mmspec.core.rows import Rows, named
from mmspec.core.sampling import Sampler
from mmspec.core.session import PromptBatch, SessionDrafter
from mmspec.core.verdict import Path
from mmspec.errors import InputError
from mmspec.registry import did_you_mean
from mmspec.trees.window import (
    KIND_OF_COUPLING,
    NEIGHBOURS,
    LastDraft,
    WindowTree,
    draw_coupled,
    layout_on,
    ranked_candidates,
    read_front,
)
from mmspec.validation import is_integer

MAX_WINDOW = 128
INITS = ("edge", "uniform", *NEIGHBOURS)


class WindowDrafter(SessionDrafter):
    """Base of drafters that refine a window of places, round by round.

    Args:
        window: places per forward pass, 1 (plain decoding) to 128, the root's included, whatever the number
            of candidates at each.
        coupling: how a place is redrawn from its new distribution. "fresh": independently (SJD). "maximal":
            the old draft is kept with the largest probability for which the new one has the new distribution
            (MC-SJD). "gumbel": with noise that belongs to the place and is the same in every round (GS).
            "exact": with the target's own noise, so that the output is bitwise that of plain decoding with
            the same seed.
        init: initial draft of places that no forward pass has scored. "edge": a draw from the target's
            distribution at the last free place of the window. "uniform": any code, or any token without an
            image. "repeat": the token of the cell before. "above": the token of the cell in the row above.
        front: number of candidates at each of the first places, for every candidate before: "4x2" gives eight
            chains, of at most 64. They are drawn without replacement.
        reach: number of places in which each chain of `front` has its own nodes, including the front. Only
            the first chain continues after them; the whole window if None.

    Raises:
        InputError: a value outside its range.
    """

    runs_ahead = True
    rows_move = True
    reuse: float | None = None

    def __init__(
        self,
        window: int,
        coupling: str,
        init: str,
        front: str | Sequence[int] = (),
        reach: int | None = None,
    ) -> None:
        if not is_integer(window) or not 1 <= window <= MAX_WINDOW:
            raise InputError("window", window, f"must be an integer from 1 to {MAX_WINDOW}")
        if coupling not in KIND_OF_COUPLING:
            raise InputError("coupling", coupling, did_you_mean(coupling, KIND_OF_COUPLING))
        if init not in INITS:
            raise InputError("init", init, did_you_mean(init, INITS))
        self.coupling, self.init = coupling, init
        self.kind = KIND_OF_COUPLING[coupling]
        self.set_window(window, read_front(front), reach)
        self.branches = bool(self.tree.front)
        if self.branches and self.kind is DraftKind.IID:
            self.kind = DraftKind.WITHOUT_REPLACEMENT

    def set_window(self, window: int, front: tuple[int, ...] = (), reach: int | None = None) -> None:
        """Set the window, and the tree of its nodes."""
        self.window, self.tree = window, WindowTree(window, front, reach)
        self.max_nodes = len(self.tree.parents)
        self.max_children = max(front, default=min(1, window - 1))

    def width(self, rows: int) -> int:
        """Nodes of each row in a forward pass over `rows` rows, the unconditional ones included."""
        return self.window

    def check(self, target: AnyTarget) -> None:
        self.require_room(target.grid)
        if self.max_children > target.vocabulary:
            rule = f"must have at most {target.vocabulary} candidates, the size of the vocabulary"
            raise InputError("front", self.tree.front, rule)

    def admit(self, requests: Sequence[Request], sampler: Sampler, stopping: Stopping) -> None:
        for request in requests:
            self.require_room(request.layout)

    def require_room(self, layout: Layout | None) -> None:
        """Raise InputError if the window or its options do not fit the layout of an output."""
        if layout is None and self.init in NEIGHBOURS:
            rule = "must be 'edge' or 'uniform' without an image, because only image cells have neighbours"
            raise InputError("init", self.init, rule)
        if layout is not None and self.init == "above":
            require_grid(layout, "init=above")
        if layout is not None and self.window > layout.length:
            rule = f"must be from 1 to {layout.length}, the number of tokens of the image"
            raise InputError("window", self.window, rule)


@dataclass(frozen=True)
class Observed(Rows):
    """The last draft of a window, with the target's distributions and the accepted tokens."""

    row_fields = named("draft", "p", "finite", "accepted")

    draft: Tree  # a chain
    p: Categorical  # [B, n] the target's after each node
    finite: Tensor  # [B, n] whether p is finite
    accepted: Tensor  # [B] number of accepted tokens

    def joined(self, other: Self, counts: tuple[int, int]) -> Self:
        if self.finite.shape[1] != other.finite.shape[1]:  # padding would have no distribution
            return super(Observed, self.newest()).joined(other.newest(), counts)
        return super().joined(other, counts)

    def overwritten(self, slots: Sequence[int], other: Self, counts: tuple[int, int]) -> Self:
        if self.finite.shape[1] != other.finite.shape[1]:
            return super(Observed, self.newest()).overwritten(slots, other.newest(), counts)
        return super().overwritten(slots, other, counts)

    def newest(self) -> Self:
        """Return the last accepted node as a window of one node, as after a prompt."""
        node, draft = self.accepted[:, None], self.draft
        chain = Tree.chain(draft.tokens.gather(1, node), draft.kind, draft.q.map(lambda q: q[:, :0]))
        p = self.p.map(lambda p: pick(p, node))
        return replace(self, draft=chain, p=p, finite=self.finite.gather(1, node), accepted=0 * self.accepted)


class Candidates(NamedTuple):
    """Nodes of a tree: [B, n] tokens, whether each could be drawn, and [B, n, V] p of each draw."""

    tokens: Tensor
    drawable: Tensor
    p: Tensor

    def of(self, first: int, end: int) -> Candidates:
        """Return the candidates of a range of slots."""
        return Candidates(*(each[:, first:end] for each in self))

    @staticmethod
    def join(parts: Sequence[Candidates]) -> Candidates:
        """Join the candidates of several slots."""
        return Candidates(*(torch.cat(each, 1) for each in zip(*parts, strict=True)))


@dataclass(frozen=True)
class Window:
    """A new window of W slots: slot 0 holds the root, the others drafts."""

    place: Tensor  # [B, W] output index of each slot
    tokens: Tensor  # [B, W]
    p: Tensor  # [B, W, V] distribution that each token was drawn from
    node: Tensor  # [B, W] node of the last draft that gave p
    stood: Tensor  # [B, W] node of the last draft in the slot; 0 if there was none
    known: Tensor  # [B, W] token given by the grammar or a neighbour, or FREE
    noise: Tensor  # [B, W, 3] uniforms or [B, W, V] Gumbel noise of each draw

    @property
    def first(self) -> Candidates:
        """The tokens as the first candidate of each slot."""
        return Candidates(self.tokens, torch.ones_like(self.tokens, dtype=torch.bool), self.p)


class JacobiSession(DraftSession):
    """Session of a `WindowDrafter`: the window of one batch.

    Attributes:
        observed: the last draft, and its verification.
        steps: [W] the slots of the next window.
        round: [B, 1] number of windows so far; it keys the random numbers of redraws together with the place.
    """

    row_fields = named("layouts", "random", "round", "sampler", "observed")

    sampler: Sampler
    steps: Tensor = torch.empty(0, dtype=torch.long, device="cpu")

    def __init__(self, drafter: WindowDrafter, batch: PromptBatch) -> None:
        self.drafter, self.sampler, self.random = drafter, batch.sampler, batch.random
        requests, logits = batch.requests, batch.prefill.logits
        device, self.vocabulary = logits.device, logits.shape[-1]
        self._lay_out([request.layout for request in requests])
        self.round = torch.zeros(len(requests), 1, dtype=torch.long, device=device)
        tree = drafter.tree
        self.parents, self.slots, self.chain, self.nodes = tree.tensors(device)
        # The prompt is a window of one node, whose distribution is the edge of the first real window.
        token = torch.zeros(len(requests), 1, dtype=torch.long, device=device)
        draft = Tree.chain(token, drafter.kind)
        history = History.of_prompts([request.prompt_tokens for request in requests], device)
        scores = batch.sampler(logits, draft, history, torch.zeros_like(token[:, 0]))
        self._keep(replace(draft, q=self._drawn_from(token, scores.p)), scores, token[:, 0])

    def rows_changed(self) -> None:
        self._lay_out(self.layouts)

    def _lay_out(self, layouts: Sequence[Layout | None]) -> None:
        """Set the layouts of the rows, and the width of their windows."""
        device = self.random.keys.device
        self.layouts, self.layout = layouts, layout_on(tuple(layouts), self.vocabulary, device)
        width = self.drafter.width(len(layouts) * (1 + self.sampler.is_guided))
        if len(self.steps) != width:  # graphs of rounds store its address
            self.steps = torch.arange(width, device=device)

    def observe(self, draft: Tree, output: TargetOutput, scores: Scores, verdict: Path) -> None:
        if not self.drafter.branches:
            self._keep(draft, scores, verdict.accepted)
            return
        nodes = self._path(verdict)
        tokens, valid = draft.tokens.gather(1, nodes), draft.valid.gather(1, nodes)
        q = draft.q.map(lambda each: pick(each, nodes[:, 1:] - 1))
        chain = replace(Tree.chain(tokens, draft.kind, q, valid), max_depth=self.drafter.window - 1)
        self._keep(chain, scores.map(lambda each: pick(each, nodes)), verdict.accepted)

    def _path(self, verdict: Path) -> Tensor:
        """[B, W] nodes of the first chain through the last accepted node."""
        return self.nodes[self.chain[verdict.last]]

    def _keep(self, draft: Tree, scores: Categorical, accepted: Tensor) -> None:
        """Store the distributions of the last draft and of the target for the next round."""
        # a uniform draft has mass on all tokens
        most = self.vocabulary if self.drafter.init == "uniform" else self.sampler.support(self.vocabulary)
        q = draft.q.compact(most) if isinstance(draft.q, Categorical) else draft.q
        p = scores.map(self.sampler.within_top_k).compact(most)
        self.observed = Observed(replace(draft, q=q), p, scores.is_finite(), accepted)

    def propose(self, canvas: Canvas) -> Tree:
        drafter, old = self.drafter, self.observed
        seen, accepted = old.draft, old.accepted
        self.round = self.round + 1
        place = canvas.emitted[:, None] - 1 + self.steps  # [B, W] output index of each node of the new window
        # A node gives the p of the next place, and each row has moved by its accepted tokens. Places beyond
        # the last scored node have no p of their own, and use that of the edge.
        scored = min(seen.tokens.shape[1], len(self.steps))
        node = accepted[:, None] + self.steps
        covered, drafted = node < scored, node + 1 < scored
        node = torch.where(covered, node, self._edge(place[:, :1] - accepted[:, None], scored))
        p, sound = old.p.map(lambda each: pick(each, node)).p, old.finite.gather(1, node)
        stood = torch.where(drafted, node + 1, 0)
        p, sound = self._initial(p, sound, place, covered, stood)
        noise = self._redraw_noise(place, p)
        last = LastDraft.of(seen, drafter.coupling)
        drawn = draw_coupled(drafter.coupling, p, last, stood, noise)
        tokens = self._reuse(drawn, p, seen, stood)
        tokens[:, 0] = canvas.root
        known = torch.full_like(tokens, FREE)
        if self.layout.has_syntax or drafter.init in NEIGHBOURS:
            first = place[:, :1] + scored - accepted[:, None]
            known = known.where(covered, self._standing(place, first, tokens, canvas))
            tokens, sound = torch.where(known == FREE, tokens, known), sound | (known != FREE)
            one_hot = torch.zeros_like(p).scatter(-1, tokens[:, :, None], 1.0)
            p = torch.where((known == FREE)[:, :, None], p, one_hot)
        filled = self._fill(Window(place, tokens, p, node, stood, known, noise), last)
        inside, nodes = place < self.layout.length, filled.tokens.shape[1]
        valid = ((inside & sound) | (self.steps == 0))[:, self.slots[:nodes]] & filled.drawable
        faulty = (inside & ~sound)[:, 1:].any(-1)
        q = self._drawn_from(filled.tokens, filled.p)
        parents, depth = self.parents[:nodes].expand_as(valid), len(self.steps) - 1
        children = min(drafter.max_children, nodes - 1)
        return Tree(filled.tokens, valid, drafter.kind, q, faulty, parents, depth, children)

    def _drawn_from(self, tokens: Tensor, p: Tensor) -> Categorical | PointMass:
        """The q of candidates, from the tokens [B, n] and distributions p [B, n, V] of all nodes."""
        return PointMass(tokens[:, 1:]) if self.drafter.kind is DraftKind.COUPLED else Categorical(p[:, 1:])

    def _initial(
        self, p: Tensor, sound: Tensor, place: Tensor, covered: Tensor, stood: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Choose p, and whether it is finite, for places that the target has not scored (not `covered`)."""
        if self.drafter.init != "uniform":
            return p, sound
        return torch.where(covered[:, :, None], p, self.layout.uniform.to(p.dtype)), sound | ~covered

    def _fill(self, window: Window, last: LastDraft) -> Candidates:
        """Build the nodes of the tree from a new window: its tokens, and further candidates."""
        first = window.first
        if not self.drafter.branches:
            return first
        return Candidates.join([first.of(0, 1), *self._behind(first, window.place, 0)])

    def _behind(self, first: Candidates, place: Tensor, slot: int) -> Sequence[Candidates]:
        """Build the nodes of the slots after `slot`, given the first candidate of each slot."""
        end = len(self.steps)
        if not self.drafter.branches:
            return [first.of(slot + 1, end)]
        return [self._candidates(first.of(at, at + 1), place, at) for at in range(slot + 1, end)]

    def _candidates(self, first: Candidates, place: Tensor, slot: int) -> Candidates:
        """Build all candidates of a slot, given the first one; they are the same under every parent."""
        branch, parents = self.drafter.tree.branch(slot), self.drafter.tree.chains(slot)
        tokens, drawable, p = first
        if branch > 1:
            noise = self._noise(place[:, slot : slot + 1], p)
            ranked, could = ranked_candidates(tokens, p, noise, branch)
            tokens, drawable, p = ranked.flatten(1), could.flatten(1), p.expand(-1, branch, -1)
        return Candidates(tokens.repeat(1, parents), drawable.repeat(1, parents), p.repeat(1, parents, 1))

    def _reuse(self, tokens: Tensor, p: Tensor, seen: Tree, old: Tensor) -> Tensor:
        """Restore old drafts that are likely enough; see `JacobiDrafter`."""
        if self.drafter.reuse is None:
            return tokens
        kept = seen.tokens.gather(1, old)
        likely = p.gather(-1, kept[..., None])[..., 0] >= self.drafter.reuse
        return torch.where(likely & (old > 0) & seen.valid.gather(1, old), kept, tokens)

    def _edge(self, place: Tensor, scored: int) -> Tensor:
        """[B, 1] last scored node at a free place; `place` [B, 1] is that of node 0."""
        nodes = torch.arange(scored, device=place.device)
        return nodes.where(self.layout.grammar.at(place + nodes) == FREE, 0).amax(-1, keepdim=True)

    def _standing(self, place: Tensor, first: Tensor, tokens: Tensor, canvas: Canvas) -> Tensor:
        """[B, W] token of the grammar or a neighbour for places from `first` [B, 1] on; FREE for a draw."""
        forced = self.layout.grammar.at(place)
        if self.drafter.init not in NEIGHBOURS:
            return forced
        copied = self.layout.copy(self.drafter.init, place, first, tokens, canvas.before(self.layout.reach))
        return torch.where(forced == FREE, copied, forced)

    def _redraw_noise(self, place: Tensor, p: Tensor) -> Tensor:
        """[B, W, 3] uniforms of places [B, W], new in every round; or [B, W, V] constant Gumbel noise."""
        coupling = self.drafter.coupling
        if coupling in ("gumbel", "exact"):
            purpose = Purpose.TARGET if coupling == "exact" else Purpose.REDRAW
            return self.random.gumbel(place, purpose, p.shape[-1], p.dtype)
        return self.random.at(self.round).uniform(place, Purpose.REDRAW, 3, torch.float64)

    def _noise(self, place: Tensor, p: Tensor) -> Tensor:
        """[B, n, V] Gumbel noise of further candidates: the target's own with coupling="exact"."""
        exact = self.drafter.coupling == "exact"
        random = self.random if exact else self.random.at(self.round)
        return random.gumbel(place, Purpose.TARGET if exact else Purpose.DRAFT, p.shape[-1], p.dtype)
