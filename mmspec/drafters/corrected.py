"""Corrected Jacobi decoding: a Jacobi window whose first places a small head corrects.

A method of this project, between speculative Jacobi decoding (2410.01699, with the maximal coupling of
2510.24211) and a head that drafts (EAGLE, 2401.15077). As soon as an early token of a window changes, what
the target has said of all later places is stale. The head knows both the new tokens and the stale states, and
corrects the distributions one after another; each token is coupled with the old draft of its place, so that
what was right stays.

The corrected q of a place depends on tokens and states before it, never on the old draft of the place itself.
That is therefore still a draw from its own q when it is coupled, and the new one a draw from the corrected:
judging it by speculative sampling is exact, whatever the head computes.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.nn.functional import embedding

from mmspec.decoding.distribution import Categorical, Scores
from mmspec.decoding.draft import Draft, DraftKind
from mmspec.decoding.image_grid import FREE
from mmspec.decoding.indexing import pick
from mmspec.decoding.interfaces import DraftSession, PromptOutput, Request, Target, TargetOutput
from mmspec.decoding.random_stream import RandomStream
from mmspec.decoding.rows import join_rows, part_of_rows
from mmspec.decoding.sampling import Sampler
from mmspec.decoding.verdict import Verdict
from mmspec.drafting.heads import check_trained_for
from mmspec.drafting.jacobi import JacobiSession, Window, WindowDrafter
from mmspec.errors import InputError
from mmspec.models.cjd import CorrectorHead
from mmspec.models.cjd.modeling import join_states
from mmspec.models.feature_head import HIDDEN
from mmspec.targets.causal import CausalTarget
from mmspec.validation import is_integer

__all__ = ["CorrectedDrafter", "CorrectedSession", "StaleWindow"]

INITS = ("edge", "uniform")
NOTHING = FREE - 1
MAX_CHAINS = 64


@dataclass(frozen=True)
class StaleWindow:
    """What is known of a window before it is corrected: C committed tokens, then n slots, the root's first.

    Attributes:
        states: [B, C + n, 2d] the target's, where it has read a token there.
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
        states: [B, n, 2d].
        logits: [R, n, V] as it gave them; R is B, or 2B under guidance.
    """

    tokens: Tensor
    states: Tensor
    logits: Tensor


class CorrectedSession(JacobiSession):
    """Window of drafts of one batch, and what the target made of it.

    Attributes:
        read: the last draft.
        committed: [B, C, 2d] the target's states of the newest C committed tokens.
        words: [B, C] those tokens; FREE for the end of the prompt.
        count: [B] how many of the C there are.
        stale: what the head knew of the window that was drawn last.
        tables: of the target.
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
        last = torch.cat([states[:, -1:] for states in prefill.taps[HIDDEN]])
        tokens = torch.full((rows, 1), FREE, device=device)
        self.read = Read(tokens, join_states(last, rows), prefill.logits)
        self.committed = self.read.states.new_zeros(rows, size, self.read.states.shape[-1])
        self.words = tokens.expand(-1, size)
        if drafter.front:
            self.slots, self.chain_of, self.nodes_of = (
                torch.tensor(each, device=device)
                for each in (drafter.slots, drafter.chain_of, drafter.nodes_of)
            )
        self.count = torch.zeros(rows, dtype=torch.long, device=device)

    def observe(self, draft: Draft, output: TargetOutput, scores: Scores, verdict: Verdict) -> None:
        states = join_states(output.taps[HIDDEN], len(draft.tokens))
        if not self.drafter.front:
            super().observe(draft, output, scores, verdict)
            self.read = Read(draft.tokens, states, output.logits)
            return
        # of all chains, the one that was accepted, or the first behind what was accepted
        nodes = self.nodes_of[self.chain_of[verdict.last]]
        tokens, valid = draft.tokens.gather(1, nodes), draft.valid.gather(1, nodes)
        q = None if draft.q is None else Categorical(pick(draft.q.p, nodes))
        depth = self.drafter.window - 1
        kept = replace(Draft.chain(tokens, draft.kind, q, valid), max_depth=depth)
        self._keep(kept, Categorical(pick(scores.p, nodes)), verdict.accepted)
        logits = pick(output.logits, nodes.repeat(len(output.logits) // len(nodes), 1))
        self.read = Read(tokens, pick(states, nodes), logits)

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

    def _revise(self, window: Window, seen: Draft) -> tuple[Tensor, Tensor]:
        self._enter_committed()
        front, count = self.drafter.front, self.drafter.corrected
        if not count:
            return window.tokens, window.p
        self.stale = stale = self._stale(window, count)
        head, rows = self.head, len(window.tokens)
        same, other = head.rows(stale.states, stale.old, stale.is_known, self.tables)
        corrections, mask, first = head.stale(stale.logits), stale.mask(), stale.context
        u, is_free = self._uniforms(window.place), window.known == FREE
        # of each slot: the candidates of all chains, whether each could be drawn, and what from
        levels = [(window.tokens[:, :1], torch.ones_like(is_free[:, :1]), window.p[:, :1])]
        words = torch.cat([self.words, window.tokens[:, :1]], 1)
        done, chains, memory = slice(0, first + 1), 1, None
        for slot in range(1, window.tokens.shape[1]):
            here = slice(slot, slot + 1)
            if slot > count:
                forced = torch.ones_like(is_free[:, here]).expand(-1, chains)
                tokens, p = (each[:, here] for each in (window.tokens, window.p))
                levels.append((tokens.expand(-1, chains), forced, p.expand(-1, chains, -1)))
                continue
            drawn = levels[-1][0] if slot > 1 else words
            is_same = (drawn == stale.old[:, done])[..., None]
            known = same[:, done].where(is_same, other[:, done])
            known = known + embedding(drawn % len(self.tables.new), self.tables.new)
            if slot > 1:
                known = known.flatten(0, 1)[:, None]
            seen_by = mask[:, :, done, : done.stop].repeat_interleave(chains, 0)
            state, memory = head(known, seen_by, memory)
            state = state[:, -1].unflatten(0, (rows, chains))
            logits = head.correct(state, corrections.at(slot - 1, chains), self.tables)
            free = is_free[:, here]
            q = self.sampler.scores(logits).p.where(free[..., None], window.p[:, here])
            where = (
                each[:, here].expand(-1, chains, *each.shape[2:]) for each in (window.place, window.stood, u)
            )
            place, stood, uniforms = where
            tokens = self._redraw(q, place, seen, stood, uniforms).where(free, window.tokens[:, here])
            branch = front[slot - 1] if slot <= len(front) else 1
            levels.append(self._siblings(tokens, q, window.place[:, here], branch))
            if branch > 1:
                memory = [
                    (keys.repeat_interleave(branch, 0), values.repeat_interleave(branch, 0))
                    for keys, values in memory
                ]
            chains, done = chains * branch, slice(done.stop, done.stop + 1)
        self.passes += count
        tokens, self._drawable, p = (torch.cat(parts, 1) for parts in zip(*levels, strict=True))
        return tokens, p

    def _siblings(
        self, tokens: Tensor, q: Tensor, place: Tensor, branch: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Draw further candidates without replacement, of which there are as many as q has tokens left.

        Args:
            tokens: [B, c] the first candidate behind each of c chains.
            q: [B, c, V] what it was drawn from.
            place: [B, 1] output index.
            branch: candidates behind each chain.

        Returns:
            [B, c * branch] candidates, whether each could be drawn, and their q [B, c * branch, V].
        """
        if branch == 1:
            return tokens, torch.ones_like(tokens, dtype=torch.bool), q
        left = q.scatter(-1, tokens[..., None], 0.0)
        siblings = (left.log() + self._noise(place, q)).topk(branch - 1, dim=-1).indices
        drawable = torch.cat([torch.ones_like(tokens)[..., None] > 0, left.gather(-1, siblings) > 0], -1)
        candidates = torch.cat([tokens[..., None], siblings], -1)
        return candidates.flatten(1), drawable.flatten(1), q.repeat_interleave(branch, 1)

    def _branch(
        self, place: Tensor, tokens: Tensor, valid: Tensor, p: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        return tokens, valid[:, self.slots] & self._drawable, p

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
        corrected: places that the head corrects, one after another, from 0 (speculative Jacobi decoding) to
            window - 1; what the head's config says if None. The others are drawn from what is stale.
        coupling, init: as of `WindowDrafter`; drafts of neighbours have no distribution to correct.
        front: candidates at each of the first places, behind each candidate before: (4, 2), or "4x2", gives
            eight chains, each corrected for itself to the end of the window. They are drawn without
            replacement.

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
        front: str | Sequence[int] = (),
    ) -> None:
        if init not in INITS:
            raise InputError("init", init, " or ".join(INITS))
        super().__init__(model.config.window if window is None else window, coupling, init)
        if corrected is None:
            corrected = min(model.config.corrected, self.window - 1)
        if not is_integer(corrected) or not 0 <= corrected < self.window:
            raise InputError("corrected", corrected, f"0 to {self.window - 1}, below the window")
        if corrected >= model.config.longest:
            allowed = f"at most {model.config.longest - 1}: the head was made for windows of that many places"
            raise InputError("corrected", corrected, allowed)
        self.front = self._read_front(front, corrected)
        if self.front:
            self._grow()
        self.model, self.corrected = model, corrected
        self.taps = model.taps
        self.target: CausalTarget | None = None

    def _read_front(self, front: str | Sequence[int], corrected: int) -> tuple[int, ...]:
        try:
            sizes = tuple(map(int, front.split("x") if isinstance(front, str) and front else front))
        except (TypeError, ValueError):
            sizes = (0,)
        if any(size < 1 for size in sizes) or len(sizes) > corrected or prod(sizes) > MAX_CHAINS:
            allowed = f"as 4x2, for {corrected} places (those corrected) and {MAX_CHAINS} chains at most"
            raise InputError("front", front, allowed)
        return sizes if prod(sizes) > 1 else ()

    def _grow(self) -> None:
        """Lay out the tree: nodes of a slot stand side by side, those of one parent together.

        Sets for each node its parent, its slot and the first chain through it; and the nodes of each chain.
        """
        chains, levels = prod(self.front), [[0]]
        self.parents, self.slots, self.chain_of = [0], [0], [0]
        for slot in range(1, self.window):
            branch = self.front[slot - 1] if slot <= len(self.front) else 1
            start, before = len(self.parents), levels[-1]
            self.parents += [parent for parent in before for _ in range(branch)]
            count = len(before) * branch
            self.slots += [slot] * count
            self.chain_of += [chains // count * node for node in range(count)]
            levels.append(list(range(start, start + count)))
        self.nodes_of = [[level[chain * len(level) // chains] for level in levels] for chain in range(chains)]
        self.max_nodes, self.tail_children, self.branches = len(self.parents), max(self.front), True
        if self.kind is DraftKind.IID:
            self.kind = DraftKind.WITHOUT_REPLACEMENT

    def check(self, target: Target[Any]) -> None:
        super().check(target)
        check_trained_for(self.model.config, target, "a corrector")

    def to(self, *args: Any, **kwargs: Any) -> None:
        self.model.to(*args, **kwargs)

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
        return self.session(self, self.target, requests, prefill, sampler, random)
