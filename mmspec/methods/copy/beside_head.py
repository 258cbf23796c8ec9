"""Copies beside a head's candidates: a tree of the likeliest continuations of a head and of repeated text.

SuffixDecoding (2411.04975) takes either the copies or the model's draft in a round, whichever has the higher
score. Here both share one tree, and agree or compete candidate by candidate.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from mmspec.core.canvas import Canvas
from mmspec.core.chunked_prefill import ChunkedPrefill
from mmspec.core.distributions import Scores
from mmspec.core.draft import Tree
from mmspec.core.interfaces import AnyTarget, Drafter, TargetOutput, TargetState
from mmspec.core.rows import named
from mmspec.core.session import PromptBatch
from mmspec.core.verdict import Path as AcceptedPath
from mmspec.errors import InputError
from mmspec.heads.drafter import HeadDrafter
from mmspec.methods.copy.drafter import CopyDrafter, CopySession, Guesses

__all__ = ["CopyBesideHeadDrafter", "beside"]


class CopyBesideHeadSession(CopySession):
    """A head that drafts for one batch, and the indexes of its texts, one per row."""

    row_fields = named("head")

    def __init__(self, drafter: CopyBesideHeadDrafter, batch: PromptBatch) -> None:
        super().__init__(drafter, batch)
        self.head: Any = drafter.head.start(batch.requests, batch.prefill, batch.sampler, batch.random)

    def propose(self, canvas: Canvas) -> Tree:
        drafted: Tree = self.head.propose(canvas)
        self.passes = self.head.passes
        nodes = drafted.tokens.double(), drafted.parents.double(), self.head.likelihoods.double()
        self.guesses = [guesses_of(*row) for row in torch.stack(nodes, 1).tolist()]
        return replace(super().propose(canvas), faulty=drafted.faulty)

    def deferred_prefill(self) -> ChunkedPrefill[None]:
        yield from self.head.deferred_prefill()

    def attach(self, state: TargetState) -> None:
        self.head.attach(state)

    def tighten(self, emitted: Sequence[int]) -> None:
        self.head.tighten(emitted)

    def resize(self, choice: int) -> None:
        super().resize(choice)
        self.head.resize(choice)

    def limit(self, nodes: int, least: Callable[[int], Sequence[float]]) -> None:
        self.head.limit(nodes, least)

    def observe(self, draft: Tree, output: TargetOutput, scores: Scores, verdict: AcceptedPath) -> None:
        self.head.observe(draft, output, scores, verdict)


def guesses_of(tokens: Sequence[float], parents: Sequence[float], scores: Sequence[float]) -> Guesses:
    """Return the children of each node of a head's tree, from its tokens, parents and log-probabilities."""
    found: dict[int, dict[int, tuple[int, float]]] = {}
    for node in range(1, len(tokens)):
        if scores[node] > -math.inf:
            parent = int(parents[node])
            share = math.exp(scores[node] - scores[parent])
            found.setdefault(parent, {})[int(tokens[node])] = node, share
    return found


class CopyBesideHeadDrafter(CopyDrafter):
    """Drafts the likeliest of a head's candidates and of continuations of repeated suffixes.

    The tree is grown on the host, which waits for the head's tree.

    Args:
        head: drafter whose tree sets the number of candidates.
        corpus: see `CopyDrafter`.

    Raises:
        InputError: the head's candidates are drawn, or come with probes; or see `CopyDrafter`.
    """

    session = CopyBesideHeadSession

    def __init__(self, head: HeadDrafter, corpus: str | Path | None = None) -> None:
        if not head.shares_tree or not head.rates_paths:
            rule = "must be False for this head with these options, whose tree cannot contain copies"
            raise InputError("copy", True, rule)
        super().__init__(head.shape.num_draft_tokens, corpus=corpus)
        self.head, self.kind, self.taps, self.rows_move = head, head.kind, head.taps, head.rows_move

    def to(self, *args: object, **kwargs: object) -> None:
        self.head.to(*args, **kwargs)

    @property
    def modules(self) -> Sequence[nn.Module]:
        return self.head.modules

    def compile(self) -> None:
        self.head.compile()

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.head.sizes

    @property
    def candidates_of_sizes(self) -> tuple[int, ...]:
        return self.head.candidates_of_sizes

    def check(self, target: AnyTarget) -> None:
        super().check(target)
        self.head.check(target)

    def fit(self, target: AnyTarget) -> Self:
        self.check(target)
        return self._of(self.head.fit(target))

    def stopping_below(self, probability: float) -> Self:
        return self._of(self.head.stopping_below(probability))

    def _of(self, head: HeadDrafter) -> Self:
        changed = copy.copy(self)
        changed.head = head
        return changed


def beside(drafter: HeadDrafter, /, copy: bool = False, corpus: str | Path | None = None) -> Drafter:
    """Add copies beside the candidates of a head if an option requires it.

    Args:
        drafter: of the head.
        copy: whether copies of earlier text compete with the head's candidates for the nodes of a tree.
        corpus: file of n-grams, whose continuations compete for the nodes too, and so do copies; no file if
            None.
    """
    return CopyBesideHeadDrafter(drafter, corpus) if copy or corpus is not None else drafter
