"""Plain decoding through the same loop, every benchmark's baseline; and masked models, places at a time.

A model that predicts the next token gives one a forward. A masked one has no next token: a forward decides
one place of the whole output, that which the model is surest of (LLaDA, 2502.09992, as many steps as places).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mmspec.acceptance.confidence import LowConfidence
from mmspec.decoding.canvas import MAX_NEW_TOKENS, Canvas, Stopping
from mmspec.decoding.draft import Block, Draft, DraftKind, Tree
from mmspec.decoding.image_grid import FREE
from mmspec.decoding.interfaces import Drafter, DraftSession, PromptOutput, Request, Target
from mmspec.decoding.random_stream import RandomStream
from mmspec.decoding.rows import named
from mmspec.decoding.sampling import Sampler
from mmspec.errors import InputError
from mmspec.validation import is_integer

__all__ = ["NoDrafter", "UnmaskingDrafter"]

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
        session = UnmaskingDrafter().start(requests, prefill, sampler, random)
        session.rule = LowConfidence()
        return session

    def propose(self, canvas: Canvas) -> Draft:
        return Tree.chain(canvas.root[:, None], self.kind)


class UnmaskingDrafter(Drafter):
    """Proposes every masked place of the current block of each row (LLaDA, 2502.09992, section 2.4).

    The output has `max_new_tokens` places from the start, and the target sees all of them. A row is in the
    block of its first place that is not decided. Which of its places a round decides is up to the rule.

    "exact" of a drafter: nodes see all that the model was trained to see, every decided place and every mask.
    What is lost, is lost by the rule: see `LowConfidence`.

    Args:
        block: places of a block (semi-autoregressive decoding); None is one block, any order.

    Raises:
        InputError: a block that is not a positive integer.
    """

    kind = DraftKind.POINT
    proposes = "places"
    max_nodes = 0  # beside the places of the output
    mask_token_id: int = FREE  # the target's own, which it takes FREE for as well

    def __init__(self, block: int | None = None) -> None:
        if block is not None and (not is_integer(block) or block < 1):
            raise InputError("block", block, "a positive integer, or None for a single block")
        self.block = block

    def fit(self, target: Target[Any]) -> UnmaskingDrafter:
        if target.mask_token_id is None:
            raise InputError(
                "accelerator", "unmasking", "a masked model: others predict the next token alone"
            )
        fitted = copy.copy(self)
        fitted.mask_token_id = target.mask_token_id
        return fitted

    def admit(self, requests: Sequence[Request], sampler: Sampler, stopping: Stopping) -> None:
        if sampler.processors:
            allowed = "none: places are not decoded in order"
            raise InputError("logits_processor", len(sampler.processors), allowed)

    def start(
        self, requests: Sequence[Request], prefill: PromptOutput, sampler: Sampler, random: RandomStream
    ) -> DraftSession:
        return UnmaskingSession(self.block or MAX_NEW_TOKENS, self.mask_token_id)


class UnmaskingSession(DraftSession):
    """Blocks of a batch. The canvas knows which of their places are open."""

    def __init__(self, block: int, mask_token_id: int) -> None:
        self.block, self.mask_token_id = block, mask_token_id

    def open(self, canvas: Canvas) -> Draft:
        """Make room for the output; return a draft of no place, for a masked model reads no prompt alone."""
        length = canvas.stopping[0].max_new_tokens
        canvas.reserve(length + min(self.block, length))
        return self._places(canvas.tokens[:, :0], canvas.decided[:, :0])

    def propose(self, canvas: Canvas) -> Draft:
        length = canvas.stopping[0].max_new_tokens
        is_open = ~canvas.decided[:, :length]
        tokens = canvas.tokens[:, :length].masked_fill(is_open, self.mask_token_id)
        # all before the first open place is emitted
        end = (canvas.emitted // self.block + 1) * self.block
        place = torch.arange(length, device=canvas.device)
        return self._places(tokens, is_open & (place < end[:, None]))

    def _places(self, tokens: Tensor, is_open: Tensor) -> Block:
        """Each place alone in a lane that predicts it: tokens and whether it may be decided, both [B, L]."""
        place = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        visible = torch.ones_like(is_open)[:, None].expand(-1, tokens.shape[1], -1)
        completes = min(self.block, tokens.shape[1])
        return Block.single(tokens, place, is_open, place, visible, completes=completes)
