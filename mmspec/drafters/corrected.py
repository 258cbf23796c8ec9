"""Corrected Jacobi decoding: a Jacobi window whose first places a small head corrects.

A method of this project, between speculative Jacobi decoding (2410.01699, with the maximal coupling of
2510.24211) and a head that drafts (EAGLE, 2401.15077). As soon as an early token of a window changes, what
the target has said of all later places is stale. The head knows both the new tokens and the stale states, and
corrects the distributions; each token is coupled with the old draft of its place, so that
what was right stays.

The corrected q of a place depends on tokens and states before it, never on the old draft of the place itself.
That is therefore still a draw from its own q when it is coupled, and the new one a draw from the corrected:
judging it by speculative sampling is exact, whatever the head computes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.nn.functional import embedding

from mmspec.decoding.distribution import Scores
from mmspec.decoding.draft import Draft
from mmspec.decoding.image_grid import FREE, ImageGrid
from mmspec.decoding.indexing import pick
from mmspec.decoding.interfaces import DraftSession, PromptOutput, Request, Target, TargetOutput
from mmspec.decoding.random_stream import RandomStream
from mmspec.decoding.rows import join_rows, part_of_rows
from mmspec.decoding.sampling import Sampler
from mmspec.decoding.verdict import Verdict
from mmspec.drafting.heads import check_trained_for
from mmspec.drafting.jacobi import MAX_WINDOW, Candidates, JacobiSession, Window, WindowDrafter
from mmspec.errors import InputError
from mmspec.models.cjd import CorrectorHead
from mmspec.models.cjd.modeling import Memory
from mmspec.targets.causal import CausalTarget
from mmspec.targets.steps import CompiledForward
from mmspec.validation import is_integer

__all__ = ["CorrectedDrafter", "CorrectedSession", "StaleWindow", "codebook_sample"]

INITS = ("edge", "uniform")
NOTHING = FREE - 1
SAMPLED = 16  # numbers of a codebook


@dataclass(frozen=True)
class StaleWindow:
    """What is known of a window before it is corrected: C committed tokens, then n slots, the root's first.

    Attributes:
        states: [B, C + n, s] the target's, where it has read a token there.
        old: [B, C + n] the tokens that it read; FREE for the end of a prompt, NOTHING where it read none.
        is_known: [B, C + n] whether there are such states.
        logits: [B, n, V] guided logits of the place after each slot, which may be of another place's states.
        context: C.
    """

    states: Tensor
    old: Tensor
    is_known: Tensor
    logits: Tensor
    context: int

    def mask(self) -> Tensor:
        """[B, 1, C + n, C + n] what each row attends to: committed tokens that there are, slots before."""
        rows = self.is_known.shape[1]
        there = self.is_known[:, None, None].clone()
        there[..., self.context :] = True
        causal = torch.ones(rows, rows, dtype=torch.bool, device=there.device).tril()
        return (there & causal) | torch.eye(rows, dtype=torch.bool, device=there.device)


@dataclass(frozen=True)
class Read:
    """What the target made of a draft.

    Attributes:
        tokens: [B, n] of its nodes; FREE for the end of a prompt.
        states: [B, n, s] of `CorrectorHead.join`.
        logits: [R, n, V] as it gave them; R is B, or 2B under guidance.
    """

    tokens: Tensor
    states: Tensor
    logits: Tensor


class CorrectedSession(JacobiSession):
    """Window of drafts of one batch, and what the target made of it.

    Attributes:
        read: the last draft.
        committed: [B, C, s] the target's states of the newest C committed tokens.
        words: [B, C] those tokens; FREE for the end of the prompt.
        count: [B] how many of the C there are.
        stale: what the head knew of the window that was drawn last.
        tables: of the target.
        places: of each corrected node of the tree, its place among those of all chains.
        choices: [C, f] which of the candidates at each place of the front each chain goes through.
    """

    drafter: CorrectedDrafter
    stale: StaleWindow

    def __init__(
        self,
        drafter: CorrectedDrafter,
        target: CausalTarget,
        requests: Sequence[Request],
        prefill: PromptOutput,
        sampler: Sampler,
        random: RandomStream,
    ) -> None:
        super().__init__(drafter, requests, prefill, sampler, random)
        self.head, self.target, self.sampler = drafter.model, target, sampler
        self.tables = self.head.tables(target.embed, target.head, target.dtype)
        rows, size, device = len(requests), self.head.config.context, prefill.logits.device
        last = {tap: torch.cat([each[:, -1:] for each in states]) for tap, states in prefill.taps.items()}
        tokens = torch.full((rows, 1), FREE, device=device)
        self.read = Read(tokens, self.head.join(last, rows), prefill.logits)
        self.committed = self.read.states.new_zeros(rows, size, self.read.states.shape[-1])
        self.words = tokens.expand(-1, size)
        self.count = torch.zeros(rows, dtype=torch.long, device=device)
        tree, corrected = drafter.tree, drafter.corrected
        nodes = [node for node, slot in enumerate(tree.slots) if 0 < slot <= corrected]
        places = [tree.chain[node] * corrected + tree.slots[node] - 1 for node in nodes]
        self.places = torch.tensor(places, dtype=torch.long, device=device)
        self.choices = torch.tensor(tree.choices, dtype=torch.long, device=device)

    def observe(self, draft: Draft, output: TargetOutput, scores: Scores, verdict: Verdict) -> None:
        super().observe(draft, output, scores, verdict)
        states, logits = self.head.join(output.taps, len(draft.tokens)), output.logits
        if self.drafter.branches:
            nodes = self._path(verdict)
            states, logits = pick(states, nodes), pick(logits, nodes.repeat(len(logits) // len(nodes), 1))
        self.read = Read(self.observed.draft.tokens, states, logits)

    def part(self, rows: Sequence[int]) -> Self:
        chosen = super().part(rows)
        read, copies = self.read, len(self.read.logits) // len(self.read.tokens)
        tokens, states = part_of_rows(read.tokens, rows), part_of_rows(read.states, rows)
        chosen.read = Read(tokens, states, part_of_rows(read.logits, rows, copies))
        chosen.committed, chosen.words, chosen.count = (
            part_of_rows(each, rows) for each in (self.committed, self.words, self.count)
        )
        chosen.sampler = self.sampler.part(rows)
        return chosen

    def joined(self, other: Self) -> Self:
        both = super().joined(other)
        one, two = self.read, other.read
        copies = len(one.logits) // len(one.tokens)
        tokens, states = join_rows(one.tokens, two.tokens), join_rows(one.states, two.states)
        both.read = Read(tokens, states, join_rows(one.logits, two.logits, copies))
        both.committed = join_rows(self.committed, other.committed)
        both.words, both.count = join_rows(self.words, other.words), join_rows(self.count, other.count)
        both.sampler = self.sampler.joined(other.sampler, len(self.count), len(other.count))
        return both

    def _fill(self, window: Window, seen: Draft) -> Candidates:
        self._enter_committed()
        count = self.drafter.corrected
        if not count:
            return super()._fill(window, seen)
        self.stale = self._stale(window, count)
        whole = Candidates(window.tokens, torch.ones_like(window.tokens, dtype=torch.bool), window.p)
        corrected = Candidates(*(each[:, self.places] for each in self._correct(window, seen)))
        if not self.drafter.branches:
            return Candidates.join([whole.at(0), corrected, whole.behind(count)])
        behind = range(count + 1, self.drafter.window)
        levels = (self._candidates(whole.at(slot), window.place, slot) for slot in behind)
        return Candidates.join([whole.at(0), corrected, *levels])

    def _correct(self, window: Window, seen: Draft) -> Candidates:
        """Draw m corrected places of all C chains, pass after pass: [B, C * m] candidates.

        In a pass the head reads what the pass before has drawn, and all places are drawn anew with the same
        random numbers. After m passes each has been drawn given those before it; few come close, because
        most tokens stay. Whatever their number, q of a place depends on random numbers and old drafts of the
        places before it alone, so that its token is a draw from it.
        """
        head, stale = self.head, self.stale
        chains, count, context = len(self.nodes), self.drafter.corrected, stale.context
        same, other = head.rows(stale.states, stale.old, stale.is_known, self.tables)
        mask = stale.mask().repeat_interleave(chains, 0)
        past = (same[:, :context] + self._new(self.words)).repeat_interleave(chains, 0)
        memory: Memory | None = None
        same, other, old = (each[:, None, context:] for each in (same, other, stale.old))
        corrections = head.stale(stale.logits).repeat(chains)
        named = (window.stood, window.tokens, window.p, window.noise, window.known)
        stood, guess, p, noise, known = (
            each[:, 1 : count + 1].repeat(1, chains, *[1] * (each.dim() - 2)) for each in named
        )
        tokens = guess.unflatten(1, (chains, count))
        root = window.tokens[:, None, :1].expand(-1, chains, -1)
        for _ in range(self.drafter.passes):
            drawn = torch.cat([root, tokens[:, :, :-1]], -1)
            read = (same.where((drawn == old)[..., None], other) + self._new(drawn)).flatten(0, 1)
            if memory is None:  # committed tokens are read with the first pass
                read = torch.cat([past, read], 1)
                logits, known_by = self.drafter.revise(read, mask, None, corrections, self.tables)
                memory = [(keys[:, :, :context], values[:, :, :context]) for keys, values in known_by]
                mask = mask[:, :, context:]
            else:
                logits, _ = self.drafter.revise(read, mask, memory, corrections, self.tables)
            q = self.sampler.scores(logits).p.where((known == FREE)[..., None], p)
            first = self._redraw(q, seen, stood, noise).where(known == FREE, guess)
            tokens, drawable = self._choose(first.unflatten(1, (chains, count)), q, window.place)
            self.passes += 1
        return Candidates(tokens.flatten(1), drawable.flatten(1), q)

    def _new(self, tokens: Tensor) -> Tensor:
        """What the head makes of new tokens; nothing of no token."""
        return embedding(tokens % len(self.tables.new), self.tables.new)

    def _choose(self, first: Tensor, q: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
        """The candidate of each chain at each place, and whether it could be drawn.

        Args:
            first: [B, C, m] drawn from q [B, C * m, V].
            place: [B, W] output index of each slot.
        """
        drawable = torch.ones_like(first, dtype=torch.bool)
        front = self.drafter.tree.front[: first.shape[-1]]
        if not front:
            return first, drawable
        tokens, could = list(first.unbind(-1)), list(drawable.unbind(-1))
        q = q.view(*first.shape, -1)
        for at, branch in enumerate(front):
            ranked = self._ranked(tokens[at], q[:, :, at], place[:, at + 1 : at + 2], branch)
            choice = self.choices[:, at, None].expand(len(first), -1, -1)
            tokens[at], could[at] = (each.gather(-1, choice)[..., 0] for each in ranked)
        return torch.stack(tokens, -1), torch.stack(could, -1)

    def _enter_committed(self) -> None:
        """Let the nodes that were accepted last, and the root before them, be the newest committed ones."""
        accepted, size = self.observed.accepted, self.committed.shape[1]
        newest = accepted[:, None] + 1 + torch.arange(size, device=accepted.device)
        self.committed = pick(torch.cat([self.committed, self.read.states], 1), newest)
        self.words = pick(torch.cat([self.words, self.read.tokens], 1), newest)
        self.count = (self.count + accepted + 1).clamp_max(size)

    def _stale(self, window: Window, count: int) -> StaleWindow:
        """What is known of the first slots of a new window, by the last draft."""
        stood, size, read = window.stood[:, :count], self.committed.shape[1], self.read
        there = torch.arange(size, device=stood.device) >= size - self.count[:, None]
        node = window.node[:, 1 : count + 1]
        after = pick(read.logits, node.repeat(len(read.logits) // len(node), 1))
        return StaleWindow(
            torch.cat([self.committed, pick(read.states, stood)], 1),
            torch.cat([self.words, pick(read.tokens, stood).where(stood > 0, NOTHING)], 1),
            torch.cat([there, stood > 0], 1),
            self.sampler.guided(after),
            size,
        )


class CorrectedDrafter(WindowDrafter):
    """Drafts a Jacobi window, whose first places a head corrects.

    Args:
        model: the trained head.
        window: as of `WindowDrafter`; what the head's config says if None.
        corrected: places that the head corrects, from 0 (speculative Jacobi decoding) to window - 1; what the
            head's config says if None. The others are drawn from what is stale.
        passes: of the head over these places; what its config says if None. As many as places correct one
            after another.
        coupling, init, front, reach: as of `WindowDrafter`; drafts of neighbours have no distribution to
            correct. Each chain is corrected for itself.

    Raises:
        InputError: a value outside its range.
    """

    session: ClassVar[type[CorrectedSession]] = CorrectedSession

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
            raise InputError("init", init, " or ".join(INITS))
        super().__init__(model.config.window if window is None else window, coupling, init, front, reach)
        most = self.tree.reach if self.branches else self.window - 1
        if corrected is None:
            corrected = min(model.config.corrected, most)
        if not is_integer(corrected) or not 0 <= corrected <= most:
            raise InputError("corrected", corrected, f"0 to {most}, below the window and within the reach")
        if corrected >= model.config.longest:
            allowed = f"at most {model.config.longest - 1}: the head was made for windows of that many places"
            raise InputError("corrected", corrected, allowed)
        passes = model.config.passes if passes is None else passes
        if not is_integer(passes) or not 1 <= passes <= MAX_WINDOW:
            raise InputError("passes", passes, f"an integer from 1 to {MAX_WINDOW}")
        self.model, self.corrected, self.passes = model, corrected, min(passes, max(1, corrected))
        self.taps = model.taps
        self.target: CausalTarget | None = None
        self.revise: Callable[..., tuple[Tensor, Memory]] = model.revise

    def check(self, target: Target[Any]) -> None:
        super().check(target)
        check_trained_for(self.model.config, target, "a corrector")
        learnt = self.model.config.codebook
        if learnt and not torch.allclose(codebook_sample(target), torch.tensor(learnt), 0.02, 1e-3):
            given = "a head for images of another codebook"
            raise InputError("drafter", given, "a head that was trained for this target's image tokenizer")

    def to(self, *args: Any, **kwargs: Any) -> None:
        self.model.to(*args, **kwargs)
        self.revise = self.model.revise

    def compile(self) -> None:
        if not isinstance(self.revise, CompiledForward):
            self.revise = CompiledForward(type(self.model).__name__, self.model.revise)

    def fit(self, target: Target[Any]) -> Self:
        """This drafter with the target's embedding."""
        self.check(target)
        fitted = copy.copy(self)
        fitted.target = target  # type: ignore[assignment]  # checked
        return fitted

    def start(
        self, requests: Sequence[Request], prefill: PromptOutput, sampler: Sampler, random: RandomStream
    ) -> DraftSession:
        if self.target is None:
            raise InputError("drafter", type(self).__name__, "one that was fitted: `drafter.fit(target)`")
        if sampler.is_guided and not self.model.config.guided:
            allowed = "1, or a head that was trained under guidance: this one knows conditional states alone"
            raise InputError("guidance_scale", sampler.guidance_scale, allowed)
        for request in requests:
            self.require_room(request.grid, prefill.logits.shape[-1])
            self._check_grid(request.grid)
        return self.session(self, self.target, requests, prefill, sampler, random)

    def _check_grid(self, grid: ImageGrid | None) -> None:
        """Raise InputError unless the rows of an image are as long as the head knows them."""
        columns = self.model.config.columns
        if grid is not None and columns and grid.columns != columns:
            given = f"{grid.rows} rows of {grid.columns} tokens"
            allowed = (
                f"rows of {columns} tokens, which this head has learnt; `mmspec train drafter` takes --width"
            )
            raise InputError("image size", given, allowed)


def codebook_sample(target: Target[Any]) -> Tensor:
    """The first numbers of a target's codebook, in float32 on the CPU; zeros without one."""
    if target.codebook is None:
        return torch.zeros(SAMPLED)
    return target.codebook.detach().flatten()[:SAMPLED].float().cpu()
