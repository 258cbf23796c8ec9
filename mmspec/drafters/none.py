"""Plain decoding through the same loop, every benchmark's baseline; and masked models, places at a time.

A model that predicts the next token gives one a forward. A masked one has no next token: a forward decides
one place of the whole output, that which the model is surest of (LLaDA, 2502.09992, as many steps as places).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from mmspec.acceptance.confidence import LowConfidence
from mmspec.decoding.canvas import MAX_NEW_TOKENS, Canvas, Stopping
from mmspec.decoding.draft import Draft, DraftKind, Tree
from mmspec.decoding.interfaces import Drafter, DraftSession, PromptOutput, Request, Target
from mmspec.decoding.random_stream import RandomStream
from mmspec.decoding.rows import named
from mmspec.decoding.sampling import Sampler
from mmspec.errors import InputError
from mmspec.registry import did_you_mean
from mmspec.targets.masked import CACHES, MaskedBlock, MaskedTarget
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

    def fit(self, target: Target[Any]) -> Drafter:
        self.check(target)
        return PlainUnmasking().fit(target) if isinstance(target, MaskedTarget) else self

    def start(
        self, requests: Sequence[Request], prefill: PromptOutput, sampler: Sampler, random: RandomStream
    ) -> DraftSession:
        return self

    def propose(self, canvas: Canvas) -> Draft:
        return Tree.chain(canvas.root[:, None], self.kind)


class UnmaskingDrafter(Drafter):
    """Proposes the places of the current block of each row (LLaDA, 2502.09992, section 2.4).

    The output has `max_new_tokens` places from the start. A row is in the block of its first place that is
    not decided. Which of its places a round decides is up to the rule.

    "exact" of a drafter: nodes see all that the model was trained to see, every decided place and every mask.
    What is lost, is lost by the rule: see `LowConfidence`.

    Args:
        block_length: places of a block (semi-autoregressive decoding); None is the model's own, or one block
            for all where it has none.
        cache: what is kept from one forward to the next, as of `MaskedBlock`; lossy unless "none", for
            models that are not block-causal.

    Raises:
        InputError: a block that is not a positive integer, or no such cache.
    """

    kind = DraftKind.POINT
    proposes = "places"
    max_nodes = 0  # beside the places of the output
    mask: int  # of the target that it is fitted to
    is_causal: bool  # from block to block

    def __init__(self, block_length: int | None = None, cache: str = "none") -> None:
        if block_length is not None and (not is_integer(block_length) or block_length < 1):
            raise InputError("block_length", block_length, "a positive integer, or None")
        if cache not in CACHES:
            raise InputError("cache", cache, did_you_mean(cache, CACHES))
        self.block_length, self.cache = block_length, cache

    def fit(self, target: Target[Any]) -> UnmaskingDrafter:
        if not isinstance(target, MaskedTarget):
            allowed = "a masked model: others predict the next token alone"
            raise InputError("accelerator", "unmasking", allowed)
        own = target.block_length
        if own is not None and self.block_length not in (None, own):
            raise InputError("block_length", self.block_length, f"{own}, the block that the model has learnt")
        fitted = copy.copy(self)
        fitted.mask, fitted.is_causal = target.vocabulary, own is not None
        fitted.block_length = own or self.block_length
        if self.cache != "none" and not fitted.is_causal:
            fitted.exactness = "lossy"
        return fitted

    def admit(self, requests: Sequence[Request], sampler: Sampler, stopping: Stopping) -> None:
        if sampler.processors:
            allowed = "none: places of a masked model are not decoded in order"
            raise InputError("logits_processor", len(sampler.processors), allowed)

    def start(
        self, requests: Sequence[Request], prefill: PromptOutput, sampler: Sampler, random: RandomStream
    ) -> DraftSession:
        size = self.block_length or MAX_NEW_TOKENS
        # blocks of a block-causal model are counted from the first token of the prompt
        inside = [len(request.prompt_tokens) % size if self.is_causal else 0 for request in requests]
        return UnmaskingSession(self, size, inside)


class PlainUnmasking(UnmaskingDrafter):
    """Plain decoding of a masked model: one place a forward, whatever the rule, in the model's own blocks."""

    proposes = "any"
    keeps = ONE_PLACE

    def start(
        self, requests: Sequence[Request], prefill: PromptOutput, sampler: Sampler, random: RandomStream
    ) -> DraftSession:
        session = super().start(requests, prefill, sampler, random)
        session.rule = LowConfidence()
        return session


class UnmaskingSession(DraftSession):
    """Blocks of a batch. The canvas knows which of their places are open.

    Args:
        drafter: fitted to the target.
        size: places of a block.
        inside: of each row, places of its first block that belong to the prompt.
    """

    def __init__(self, drafter: UnmaskingDrafter, size: int, inside: Sequence[int]) -> None:
        self.drafter, self.size, self.inside = drafter, size, inside

    def open(self, canvas: Canvas) -> Draft:
        """Make room for the output; return a draft of no place, for a masked model reads no prompt alone."""
        length = canvas.stopping[0].max_new_tokens
        canvas.reserve(length + min(self.size, length))
        return self._block(canvas, 0)

    def propose(self, canvas: Canvas) -> Draft:
        return self._block(canvas, min(self.size, canvas.stopping[0].max_new_tokens))

    def _block(self, canvas: Canvas, lanes: int) -> MaskedBlock:
        """The first places of the block that each row is in, of which all before it is emitted."""
        length = canvas.stopping[0].max_new_tokens
        begins, ends = list[int](), list[int]()
        for inside, emitted in zip(self.inside, canvas.output_lengths, strict=True):
            end = (min(emitted, length - 1) + inside) // self.size * self.size - inside + self.size
            begins.append(max(end - self.size, 0))
            ends.append(min(end, length))
        bounds = torch.tensor([begins, ends], device=canvas.device)[:, :, None]
        places = bounds[0] + torch.arange(lanes, device=canvas.device)
        exists = places < bounds[1]
        is_open = exists & ~canvas.decided.gather(1, places)
        slot = torch.arange(length + 1, device=canvas.device)
        visible = slot < (bounds[1] if self.drafter.is_causal else length)
        block = MaskedBlock.single(
            canvas.tokens.gather(1, places).masked_fill(is_open, self.drafter.mask),
            places,
            is_open,
            slot.expand(len(begins), -1),
            visible.expand(len(begins), -1)[:, None],
            completes=lanes,
            begins=begins,
            ends=ends,
            length=length,
            cache=self.drafter.cache,
        )
        where = exists[:, :, None]
        return replace(block, valid=where, slots=block.slots.where(where, length))
