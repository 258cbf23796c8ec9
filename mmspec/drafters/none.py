"""Drafter that proposes nothing: plain decoding through the same loop, and every benchmark's baseline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from mmspec.decoding.canvas import Canvas
from mmspec.decoding.draft import Draft, DraftKind
from mmspec.decoding.interfaces import Drafter, DraftSession, PromptOutput, Request, Target
from mmspec.decoding.random_stream import RandomStream
from mmspec.decoding.sampling import Sampler
from mmspec.errors import InputError


class NoDrafter(Drafter, DraftSession):
    """Drafts the root alone, so that the loop is plain decoding."""

    kind = DraftKind.POINT
    max_nodes = 1
    proposes = "any"
    runs_ahead = True
    rows_move = True

    def check(self, target: Target[Any]) -> None:
        if target.vector_size and target.any_order:
            raise InputError("accelerator", "none", "masked: a MAR decides its cells in an order of its own")

    def start(
        self, requests: Sequence[Request], prefill: PromptOutput, sampler: Sampler, random: RandomStream
    ) -> DraftSession:
        return self

    def part(self, rows: Sequence[int]) -> Self:
        return self

    def joined(self, other: Self) -> Self:
        return self

    def propose(self, canvas: Canvas) -> Draft:
        return Draft.chain(canvas.root[:, None], self.kind)
