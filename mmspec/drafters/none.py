"""Drafter that proposes nothing: plain decoding through the same loop, and every benchmark's baseline.

A model that predicts the next token gives one a forward. A masked one has no next token: a forward decides
one place of the whole output, that which the model is surest of (LLaDA, 2502.09992, as many steps as places).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from mmspec.acceptance.confidence import LowConfidence
from mmspec.decoding.canvas import Canvas
from mmspec.decoding.draft import Draft, DraftKind
from mmspec.decoding.interfaces import Drafter, DraftSession, PromptOutput, Request, Target
from mmspec.decoding.random_stream import RandomStream
from mmspec.decoding.rows import named
from mmspec.decoding.sampling import Sampler
from mmspec.drafters import DRAFTERS
from mmspec.errors import InputError

ONE_PLACE = "one place a forward, the surest first"


class NoDrafter(Drafter, DraftSession):
    """Drafts the root alone, or all masked places, so that the loop is plain decoding."""

    kind = DraftKind.POINT
    max_nodes = 1
    proposes = "any"
    runs_ahead = True
    rows_move = True
    row_fields = named()

    def check(self, target: Target[Any]) -> None:
        if target.vector_size and target.any_order:
            raise InputError("accelerator", "none", "masked: a MAR decides its cells in an order of its own")

    def fit(self, target: Target[Any]) -> NoDrafter:
        self.check(target)
        fitted = copy.copy(self)
        if target.mask_token_id is not None:
            fitted.runs_ahead, fitted.keeps = False, ONE_PLACE
        return fitted

    def start(
        self, requests: Sequence[Request], prefill: PromptOutput, sampler: Sampler, random: RandomStream
    ) -> DraftSession:
        if prefill.forwards:
            return self
        if sampler.processors:
            allowed = "none: places of a masked model are not decoded in order"
            raise InputError("logits_processor", len(sampler.processors), allowed)
        session = DRAFTERS["unmasking"]().start(requests, prefill, sampler, random)
        session.rule = LowConfidence()
        return session

    def propose(self, canvas: Canvas) -> Draft:
        return Draft.chain(canvas.root[:, None], self.kind)
