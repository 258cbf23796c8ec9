"""Blocks of a masked model whose lengths a rule chooses during decoding (AdaBlock-dLLM, 2509.26432)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from mmspec.accelerator import Accelerator
from mmspec.core.canvas import Canvas
from mmspec.core.draft import Draft
from mmspec.core.interfaces import Target, TargetOutput
from mmspec.core.promise import Level
from mmspec.core.session import PromptBatch
from mmspec.errors import InputError
from mmspec.families.masked_language.unmasking import UnmaskingDrafter, UnmaskingSession
from mmspec_extras.methods.adablock.policy import AdaBlock, BlockFill


class AdaptiveSession(UnmaskingSession):
    """Blocks of a batch.

    In the first round of a block the host reads the device twice, the second time for the block's length.

    Attributes:
        cut: for each row, the end of its block, or the beginning before the length is chosen.
    """

    drafter: AdaptiveBlocksDrafter
    ends: list[list[int]]

    def __init__(self, drafter: AdaptiveBlocksDrafter, batch: PromptBatch) -> None:
        super().__init__(drafter, batch)
        self.cut = [0] * len(batch.requests)

    def propose(self, canvas: Canvas) -> Draft:
        length = self.order.shape[1]
        self.begun = [canvas.output_lengths[row] >= end for row, end in enumerate(self.cut)]
        for row, begins in enumerate(self.begun):
            if begins:
                self.cut[row] = begin = canvas.output_lengths[row]
                self.ends[row] = [begin, begin + self.drafter.rule.lanes(length, length - begin)]
        return super().propose(canvas)

    def observe(self, draft: Draft, output: TargetOutput, scores: Any, verdict: Any) -> None:
        if isinstance(verdict, BlockFill) and any(self.begun):
            for row, size in enumerate(verdict.sizes.tolist()):
                if self.begun[row]:
                    self.cut[row] += size
                    self.ends[row] = [self.ends[row][0], self.cut[row]]


class AdaptiveBlocksDrafter(UnmaskingDrafter):
    """Drafts the places of blocks whose lengths a rule chooses.

    Args:
        rule: rule that chooses the lengths.
        cache: see `UnmaskingDrafter`.
    """

    session = AdaptiveSession

    def __init__(self, rule: AdaBlock, cache: str = "none") -> None:
        super().__init__(cache=cache)
        self.rule = rule

    def fit(self, target: Target[Any]) -> Self:
        fitted = super().fit(target)
        if fitted.is_causal:
            own = fitted.block_length
            rule = f"needs a model whose places all see each other; this model has blocks of {own}"
            raise InputError("accelerator", "adablock", rule)
        fitted.exactness = Level.LOSSY
        return fitted


def adablock(
    delimiters: int | Sequence[int] = (),
    threshold: float = 0.9,
    delimiter_threshold: float = 0.3,
    block_length: int = 32,
    window: float = 0.25,
    places_per_step: int = 1,
    cache: str = "none",
) -> Accelerator:
    """Decide probable places, in blocks that end at the end of a line (AdaBlock-dLLM, 2509.26432).

    Options: see the rule `AdaBlock`; for `cache`, see `UnmaskingDrafter`.
    """
    rule = AdaBlock(
        places_per_step=places_per_step,
        threshold=threshold,
        delimiters=delimiters,
        delimiter_threshold=delimiter_threshold,
        block_length=block_length,
        window=window,
    )
    return Accelerator("adablock", AdaptiveBlocksDrafter(rule, cache), rule)
