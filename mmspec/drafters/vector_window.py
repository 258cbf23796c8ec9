"""Jacobi windows over continuous places: the target drafts for itself, with the noise of each place kept.

A place whose condition hardly changes draws nearly the same vector again, because its noise is the same
(GS, 2510.24211, for discrete tokens). `SharedNoise` says how near is near enough; at tolerance 0 the vectors
are those of plain decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mmspec.decoding.canvas import Canvas
from mmspec.decoding.distribution import Distribution
from mmspec.decoding.draft import Draft, DraftKind
from mmspec.decoding.indexing import pick
from mmspec.decoding.interfaces import Drafter, DraftSession, PromptOutput, Request, Target, TargetOutput
from mmspec.decoding.random_stream import RandomStream
from mmspec.decoding.verdict import Verdict
from mmspec.errors import InputError
from mmspec.validation import is_integer

__all__ = ["VectorWindowDrafter"]

MAX_WINDOW = 128


class VectorWindowDrafter(Drafter):
    """Drafts a window of vectors: what the target drew for these places in the last round.

    Args:
        window: nodes fed per forward, the root included; 1 is plain decoding.

    Raises:
        InputError: a window outside its range.
    """

    kind = DraftKind.COUPLED
    proposes = "vectors"

    def __init__(self, window: int = 16) -> None:
        if not is_integer(window) or not 1 <= window <= MAX_WINDOW:
            raise InputError("window", window, f"an integer from 1 to {MAX_WINDOW}")
        self.window = self.max_nodes = window

    def check(self, target: Target[Any]) -> None:
        if not target.vector_size or target.any_order:
            raise InputError("accelerator", "shared_noise", "a causal model of continuous tokens")

    def start(
        self, requests: Sequence[Request], prefill: PromptOutput, sampler: Any, random: RandomStream
    ) -> DraftSession:
        return VectorWindowSession(self.window)


class VectorWindowSession(DraftSession):
    """Window of drafts of one batch.

    Attributes:
        values: [B, n, d] what the target drew after each node of the last draft.
        accepted: [B] how many of its tokens were accepted.
    """

    values: Tensor
    accepted: Tensor

    def __init__(self, window: int) -> None:
        self.window, self.begun = window, False

    def propose(self, canvas: Canvas) -> Draft:
        root = canvas.root
        if not self.begun:  # of the places behind the prompt nothing is known: the first vector stands in
            self.values, self.accepted, self.begun = root[:, None], torch.zeros_like(canvas.emitted), True
        scored = self.values.shape[1]
        # the value after node i is the candidate for node i - accepted of the new window; the last stands in
        node = (self.accepted[:, None] + torch.arange(self.window, device=root.device)).clamp_max(scored - 1)
        tokens = pick(self.values, node)
        tokens[:, 0] = root
        place = canvas.emitted[:, None] - 1 + torch.arange(self.window, device=root.device)
        valid = place < canvas.stopping[0].max_new_tokens
        valid[:, 0] = True
        return Draft.chain(tokens, DraftKind.COUPLED, valid=valid)

    def observe(self, draft: Draft, output: TargetOutput, scores: Distribution, verdict: Verdict) -> None:
        self.values, self.accepted = verdict.values, verdict.accepted
