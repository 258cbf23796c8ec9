"""Corrected Jacobi decoding: a Jacobi window whose first places a small head corrects.

A method of this project, between speculative Jacobi decoding (2410.01699, with the maximal coupling of
2510.24211) and a drafting head (EAGLE, 2401.15077). When an early token of a window changes, the target's
predictions of all later places are stale. The head reads the new tokens and the stale states.

The corrected q of a place depends on tokens and states before it, never on the place's own old draft, with
which the new token is coupled. Speculative sampling by q is therefore exact for any output of the head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mmspec.core.image_grid import FREE
from mmspec.core.indexing import pick
from mmspec.core.sampling import Sampler
from mmspec.core.session import PromptBatch
from mmspec.errors import InputError
from mmspec.heads.window_states import StateWindowDrafter, StateWindowSession
from mmspec.methods.cjd.head import EXCLUDED, CorrectorHead, Memory, Tables
from mmspec.targets.steps import CompiledForward
from mmspec.trees.jacobi_session import MAX_WINDOW, Candidates, Window
from mmspec.trees.window import LastDraft, draw_coupled, ranked_candidates
from mmspec.validation import is_integer

__all__ = ["CorrectedDrafter", "CorrectedSession", "StaleWindow"]

INITS = ("edge", "uniform")
NOTHING = FREE - 1


@dataclass(frozen=True)
class StaleWindow:
    """Tokens and states before a correction: of C committed tokens, then of n slots, the root's first.

    Attributes:
        states: [B, C + n, w] the head's part of the target's, where the target has read a token.
        old: [B, C + n] the tokens of these states; FREE for the end of a prompt, NOTHING where none was read.
        is_known: [B, C + n] whether there are such states.
        logits: [B, n, V] guided logits of the place after each slot, perhaps from states of another place;
            EXCLUDED instead of -inf.
        context: C.
    """

    states: Tensor
    old: Tensor
    is_known: Tensor
    logits: Tensor
    context: int

    def mask(self) -> Tensor:
        """[B, 1, C + n, C + n] additive mask: 0 for existing committed tokens and for earlier slots."""
        rows, device = self.is_known.shape[1], self.is_known.device
        absent = ~self.is_known[:, None, None]
        absent[..., self.context :] = False
        closed = absent | torch.ones(rows, rows, dtype=torch.bool, device=device).triu(1)
        closed.diagonal(dim1=-2, dim2=-1).fill_(False)  # softmax needs one visible row
        return torch.zeros(closed.shape, dtype=self.states.dtype, device=device).masked_fill_(
            closed, -torch.inf
        )


class CorrectedSession(StateWindowSession):
    """Window of drafts of one batch, and the target's scores of it.

    Attributes:
        stale: the head's input for the newest window.
        places: of each corrected node of the tree, its place among those of all chains.
        choices: [C, f] the candidate of each chain at each place of the front.
    """

    scratch = StateWindowSession.scratch | {"stale"}

    drafter: CorrectedDrafter
    head: CorrectorHead
    stale: StaleWindow

    def __init__(self, drafter: CorrectedDrafter, batch: PromptBatch) -> None:
        super().__init__(drafter, batch, drafter.model.config.context)
        target, device = self.target, batch.prefill.logits.device
        self.tables = self.head.tables(target.embed, target.head, target.dtype)
        tree, corrected = drafter.tree, drafter.corrected
        nodes = [node for node, slot in enumerate(tree.slots) if 0 < slot <= corrected]
        places = [tree.chain[node] * corrected + tree.slots[node] - 1 for node in nodes]
        self.places = torch.tensor(places, dtype=torch.long, device=device)
        self.choices = torch.tensor(tree.choices, dtype=torch.long, device=device)

    def _kept(self, states: Tensor) -> Tensor:
        """Return the head's part of the states [B, n, w], so that each is multiplied once."""
        part: Tensor = self.head.of_states(states.to(self.head.dtype))
        return part

    def _fill(self, window: Window, last: LastDraft) -> Candidates:
        self._enter_committed()
        count = self.drafter.corrected
        if not count:
            return super()._fill(window, last)
        self.stale = self._stale(window)
        corrected = self._correct(window, last)
        if self.drafter.branches:
            corrected = Candidates(*(each[:, self.places] for each in corrected))
        first = window.first
        return Candidates.join([first.of(0, 1), corrected, *self._behind(first, window.place, count)])

    def _correct(self, window: Window, last: LastDraft) -> Candidates:
        """Draw the corrected places of all chains: [B, C * m] candidates."""
        drafter, chains, slots = self.drafter, len(self.nodes), slice(1, self.drafter.corrected + 1)
        named = (window.stood, window.tokens, window.p, window.noise, window.known)
        stood, tokens, p, noise, known = (of_chains(each[:, slots], chains) for each in named)
        front = drafter.tree.front[: drafter.corrected]
        levels = enumerate(front, 1)
        apart = [self._noise(window.place[:, at : at + 1], window.p) for at, branch in levels if branch > 1]
        syntax = known if self.layout.has_syntax else None
        self.passes += drafter.passes
        draw: Callable[..., Candidates] = drafter.compiled or draw_corrected
        return draw(
            self.head,
            self.tables,
            self.sampler,
            self.stale,
            window.tokens[:, 0],
            Places(stood, tokens, p, noise, syntax, front, apart, self.choices),
            last,
            drafter.coupling,
            drafter.passes,
        )

    def _stale(self, window: Window) -> StaleWindow:
        """Collect the last draft's states and tokens for the first slots of a new window."""
        count = self.drafter.corrected
        stood, size, read = window.stood[:, :count], self.committed.shape[1], self.read
        there = torch.arange(size, device=stood.device) >= size - self.count[:, None]
        return StaleWindow(
            torch.cat([self.committed, pick(read.states, stood)], 1),
            torch.cat([self.words, pick(read.tokens, stood).where(stood > 0, NOTHING)], 1),
            torch.cat([there, stood > 0], 1),
            pick(read.logits, window.node[:, 1 : count + 1]).clamp_min(EXCLUDED),
            size,
        )


class Places(NamedTuple):
    """m places of C chains, one chain after another: fields of `Window`, [B, C * m, ...]; and their front."""

    stood: Tensor
    tokens: Tensor
    p: Tensor
    noise: Tensor
    known: Tensor | None  # tokens that a grammar forces
    branches: tuple[int, ...]  # candidates at each place of the front; none for a single chain
    apart: list[Tensor]  # [B, 1, V] Gumbel noise at each with more than one
    choices: Tensor  # [C, f] the candidate of each chain at each place of the front


def draw_corrected(
    head: CorrectorHead,
    tables: Tables,
    sampler: Sampler,
    stale: StaleWindow,
    root: Tensor,
    places: Places,
    last: LastDraft,
    coupling: str,
    passes: int,
) -> Candidates:
    """Draw m corrected places of C chains, pass after pass of the head: [B, C * m] candidates.

    In each pass the head reads the tokens of the pass before, and all places are drawn anew with the same
    random numbers. After m passes each has been drawn given those before it; a few passes come close, as most
    tokens stay the same. In every pass, q of a place depends on random numbers and old drafts of the places
    before it alone.

    A function of tensors alone, with all passes in one, so that it can be compiled whole.

    Args:
        stale: the state of the window; the first of its n = m slots is that of the root [B].
        places: the places to correct, with their uncorrected content.
        last: the draft that holds the old tokens.
    """
    chains, context = len(places.choices), stale.context
    same, other = head.rows(stale.states, stale.old, stale.is_known, tables)
    words, old = stale.old[:, :context], stale.old[:, None, context:]
    past = (same[:, :context] + tables.of_new(words)).repeat_interleave(chains, 0)
    same, other = same[:, None, context:], other[:, None, context:]
    mask = stale.mask().repeat_interleave(chains, 0)
    logits_before = of_chains(stale.logits, chains)
    tokens = places.tokens.unflatten(1, (chains, -1))
    root = root[:, None, None].expand(-1, chains, -1)
    memory: Memory | None = None
    for _ in range(passes):
        drawn = torch.cat([root, tokens[:, :, :-1]], -1)
        read = (same.where((drawn == old)[..., None], other) + tables.of_new(drawn)).flatten(0, 1)
        if memory is None:  # committed tokens are read with the first pass
            logits, known_by = head.revise(torch.cat([past, read], 1), mask, None, logits_before, tables)
            memory = [(keys[:, :, :context], values[:, :, :context]) for keys, values in known_by]
            mask = mask[:, :, context:]
        else:
            logits, _ = head.revise(read, mask, memory, logits_before, tables)
        q = sampler.within_top_k(sampler.scores(logits).p)
        first = draw_coupled(coupling, q, last, places.stood, places.noise)
        if places.known is not None:
            is_free = places.known == FREE
            q, first = q.where(is_free[..., None], places.p), first.where(is_free, places.tokens)
        tokens, drawable = choose(first.unflatten(1, (chains, -1)), q, places)
    return Candidates(tokens.flatten(1), drawable.flatten(1), q)


def choose(first: Tensor, q: Tensor, front: Places) -> tuple[Tensor, Tensor]:
    """Return the candidate of each chain at each place, first [B, C, m], and whether it could be drawn."""
    drawable = torch.ones_like(first, dtype=torch.bool)
    if not front.branches:
        return first, drawable
    tokens, could = list(first.unbind(-1)), list(drawable.unbind(-1))
    q, noise = q.view(*first.shape, -1), iter(front.apart)
    for at, branch in enumerate(front.branches):
        if branch > 1:
            ranked = ranked_candidates(tokens[at], q[:, :, at], next(noise), branch)
            choice = front.choices[:, at, None].expand(len(first), -1, -1)
            tokens[at], could[at] = (each.gather(-1, choice)[..., 0] for each in ranked)
    return torch.stack(tokens, -1), torch.stack(could, -1)


def of_chains(places: Tensor, chains: int) -> Tensor:
    """Repeat values of m places, [B, m, ...] -> [B, C * m, ...], one chain after another."""
    return places if chains == 1 else places.repeat(1, chains, *[1] * (places.dim() - 2))


class CorrectedDrafter(StateWindowDrafter):
    """Drafts a Jacobi window, whose first places a head corrects.

    Args:
        model: the trained head.
        window: see `WindowDrafter`; head's config if None.
        corrected: number of places that the head corrects, 0 (speculative Jacobi decoding) to window - 1. The
            others are drawn from outdated logits; head's config if None.
        passes: passes of the head over the corrected places, 1 to 128. As many passes as places correct the
            places one after another; head's config if None.
        coupling, reach: see `WindowDrafter`.
        init: initial draft of places that no forward pass has scored: "edge" or "uniform", as in
            speculative Jacobi decoding. Drafts from neighbours have no distribution to correct.
        front: see `WindowDrafter`. Each chain is corrected separately.

    Raises:
        InputError: a value is out of range.
    """

    session = CorrectedSession
    model: CorrectorHead

    def __init__(
        self,
        model: CorrectorHead,
        window: int | None = None,
        corrected: int | None = None,
        coupling: str = "maximal",
        init: str = "edge",
        passes: int | None = None,
        front: str | Sequence[int] = (),
        reach: int | None = None,
    ) -> None:
        if init not in INITS:
            raise InputError("init", init, f"must be {' or '.join(INITS)}")
        super().__init__(model, window, coupling, init, front, reach)
        most = self.tree.reach if self.branches else self.window - 1
        if corrected is None:
            corrected = min(model.config.corrected, most)
        if not is_integer(corrected) or not 0 <= corrected <= most:
            rule = f"must be an integer from 0 to {most}, below the window and within the reach"
            raise InputError("corrected", corrected, rule)
        if corrected >= model.config.longest:
            rule = f"must be at most {model.config.longest - 1}, which the head was trained for"
            raise InputError("corrected", corrected, rule)
        passes = model.config.passes if passes is None else passes
        if not is_integer(passes) or not 1 <= passes <= MAX_WINDOW:
            raise InputError("passes", passes, f"must be an integer from 1 to {MAX_WINDOW}")
        self.corrected, self.passes = corrected, min(passes, max(1, corrected))

    def compile(self) -> None:
        if self.compiled is None:
            self.compiled = CompiledForward(type(self.model).__name__, draw_corrected, is_dynamic=False)
