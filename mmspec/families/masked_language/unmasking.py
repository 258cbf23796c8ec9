"""Drafter of masked language models: all open places of a block are drafted, and a rule decides some of them.

Plain decoding decides one place of the block per forward pass: the one of which the model is most confident
(LLaDA, 2502.09992, with as many steps as places).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from mmspec.core.canvas import Canvas, Stopping
from mmspec.core.draft import Draft, DraftKind
from mmspec.core.interfaces import DraftSession, Request
from mmspec.core.lockstep import Lockstep
from mmspec.core.promise import Level
from mmspec.core.sampling import Sampler, edges_of, processor_names
from mmspec.core.session import PromptBatch, SessionDrafter
from mmspec.errors import InputError
from mmspec.families.masked_language.target import CACHES, MaskedBlock, MaskedTarget
from mmspec.places.confidence import LowConfidence
from mmspec.places.order import Groups, OrderSession
from mmspec.places.policies import PlaceRule
from mmspec.places.sequential import Sequential
from mmspec.registry import did_you_mean
from mmspec.targets import AnyTarget
from mmspec.validation import is_integer

__all__ = ["ONE_PLACE", "PlacesDrafter", "UnmaskingDrafter", "UnmaskingSession", "plain_unmasking"]

#: Plain decoding in each of the models' own orders, in words.
ONE_PLACE = {
    "confidence": "one place per forward pass, the most confident first",
    "left_to_right": "one place per forward pass, from left to right",
}


class UnmaskingSession(OrderSession):
    """Blocks of a batch, from left to right; the canvas has their open places."""

    def __init__(self, drafter: UnmaskingDrafter, batch: PromptBatch) -> None:
        self.drafter, self.requests, self.device = drafter, batch.requests, batch.prefill.logits.device

    def open(self, canvas: Canvas) -> Draft:
        asked, rows = canvas.stopping[0].max_new_tokens, len(self.requests)
        size = self.drafter.block_length or asked
        # blocks of a block-causal model are counted from the first token of the prompt
        inside = [len(each.prompt_tokens) % size if self.drafter.is_causal else 0 for each in self.requests]
        more = [-(first + asked) % size if self.drafter.whole_blocks else 0 for first in inside]
        self.ends = [
            [*range(size - first, asked, size), asked + rest]
            for first, rest in zip(inside, more, strict=True)
        ]
        self.order = torch.arange(asked + max(more), device=self.device).expand(rows, -1)
        return super().open(canvas)

    def count_decided(self, row: int, canvas: Canvas) -> int:
        return canvas.output_lengths[row]

    def block(self, canvas: Canvas, places: Tensor, exists: Tensor, groups: Groups) -> MaskedBlock:
        rows, length = self.order.shape
        is_open = exists & ~canvas.decided.gather(1, places)
        slot = torch.arange(length + 1, device=self.device)
        ends = torch.tensor([end for _, end in groups], device=self.device)[:, None]
        visible = slot < (ends if self.drafter.is_causal else length)
        block = MaskedBlock.single(
            canvas.tokens.gather(1, places).masked_fill(is_open, self.drafter.mask),
            places,
            is_open,
            slot.expand(rows, -1),
            visible.expand(rows, -1)[:, None],
            completes=places.shape[1],
            groups=groups,
            length=length,
            asked=canvas.stopping[0].max_new_tokens,
            cache=self.drafter.cache,
            ends=canvas.stopping[0].end_token_ids,
            judges_own=self.drafter.judges_own,
            prompts=canvas.prompt_lengths,
        )
        where = exists[:, :, None]
        return replace(block, valid=where, slots=block.slots.where(where, length))


class PlacesDrafter(SessionDrafter):
    """Base of drafters of places that are decided together."""

    kind = DraftKind.POINT
    max_nodes = 0  # besides the places of the output
    decides_places = True

    def admit(self, requests: Sequence[Request], sampler: Sampler, stopping: Stopping) -> None:
        if sampler.processors:
            rule = "must be empty: this model does not decode token by token"
            raise InputError("logits_processor", processor_names(sampler), rule)


class UnmaskingDrafter(PlacesDrafter):
    """Drafts the places of the current block of each row (LLaDA, 2502.09992, section 2.4).

    The output has `max_new_tokens` places from the start. The current block of a row is that of its first
    undecided place. The rule chooses the places that a round decides.

    Args:
        block_length: places per block (semi-autoregressive decoding). Blocks that the model was not trained
            with are lossy; model's own, or the whole output if None.
        cache: keys that stay cached between forward passes: "none"; "prefix", those before the block; or
            "dual", those after it as well. The last two are lossy. Block-causal models ignore it.

    Raises:
        InputError: a block length that is not a positive integer, or no such cache.
    """

    judged_by: ClassVar[type] = PlaceRule
    keeps = ONE_PLACE["confidence"]
    session: Callable[..., DraftSession] = UnmaskingSession
    mask: int  # node id of the mask of the fitted target
    mask_token_id: int  # its id in the target's vocabulary
    order: str  # order of the target's plain decoding
    judges_own: bool  # as of `MaskedBlock`
    whole_blocks: bool  # as of `MaskedTarget`
    by_confidence = True  # whether the rule ranks places by confidence, not by the model's own order
    is_causal: bool  # whether the target is block-causal

    def __init__(self, block_length: int | None = None, cache: str = "none") -> None:
        if block_length is not None and (not is_integer(block_length) or block_length < 1):
            raise InputError("block_length", block_length, "must be a positive integer, or None")
        if cache not in CACHES:
            raise InputError("cache", cache, did_you_mean(cache, CACHES))
        self.block_length, self.cache = block_length, cache

    def admit(self, requests: Sequence[Request], sampler: Sampler, stopping: Stopping) -> None:
        held = (each.processors if isinstance(each, Lockstep) else each for each in sampler.processors)
        unfit = {type(item).__name__ for row in held for item in row if edges_of(item) is None}
        if unfit or any(isinstance(each, Lockstep) for each in sampler.processors):
            rule = (
                "must be those of suppress_tokens, begin_suppress_tokens, min_new_tokens and min_length, or "
                "of bad_words_ids and sequence_bias for single tokens: a masked model does not decode from "
                "left to right, so a processor cannot read the tokens before a place"
            )
            raise InputError("logits_processor", sorted(unfit), rule)
        for index, request in enumerate(requests):
            if self.mask_token_id in request.prompt_tokens:
                place = request.prompt_tokens.index(self.mask_token_id)
                rule = f"must not have the mask token ({self.mask_token_id}): prompts are not decoded"
                raise InputError(f"prompt[{index}]", f"the mask token at place {place}", rule)

    def fit(self, target: AnyTarget) -> Self:
        if not isinstance(target, MaskedTarget):
            rule = "decides masked places, so it needs a masked model such as LLaDA, Dream or SDAR"
            raise InputError("accelerator", type(getattr(target, "model", target)).__name__, rule)
        own = target.block_length
        if own is not None and self.block_length not in (None, own):
            rule = f"must be {own}, the block length that the model was trained with"
            raise InputError("block_length", self.block_length, rule)
        fitted = copy.copy(self)
        fitted.mask, fitted.is_causal, fitted.order = target.vocabulary, own is not None, target.order
        fitted.block_length = own or self.block_length
        fitted.mask_token_id = target.mask_token_id
        fitted.whole_blocks = target.whole_blocks
        fitted.judges_own = target.confidence == "own"
        fitted.keeps = ONE_PLACE[target.order]
        another = own is None and (self.block_length is not None or self.cache != "none")
        if another or (self.by_confidence and target.order != "confidence"):
            fitted.exactness = Level.LOSSY  # the order or the keys differ from those of plain decoding
        return fitted


def plain_unmasking(target: MaskedTarget) -> tuple[UnmaskingDrafter, PlaceRule]:
    """Plain decoding of a masked model: one place per forward pass, in the model's own blocks and order."""
    drafter = UnmaskingDrafter()
    drafter.by_confidence = False
    return drafter.fit(target), LowConfidence() if target.order == "confidence" else Sequential()
