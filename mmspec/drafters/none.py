"""Plain decoding through the same loop, every benchmark's baseline.

Nothing is proposed but the root. Models without a next token have a plain decoding of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mmspec.decoding.canvas import Canvas
from mmspec.decoding.draft import Draft, DraftKind, Tree
from mmspec.decoding.interfaces import Drafter, DraftSession, PromptOutput, Request, Target
from mmspec.decoding.random_stream import RandomStream
from mmspec.decoding.rows import named
from mmspec.decoding.sampling import Sampler
from mmspec.drafters.masked_blocks import PlainUnmasking
from mmspec.drafters.noise_canvas import PlainNoiseCanvas
from mmspec.drafters.parallel_cells import PlainCellsDrafter
from mmspec.errors import InputError
from mmspec.targets.diffusion_gemma import DiffusionGemmaTarget
from mmspec.targets.masked import MaskedTarget
from mmspec.targets.parallel_images import ParallelImageTarget

__all__ = ["NoDrafter"]


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
        if isinstance(target, DiffusionGemmaTarget):
            return PlainNoiseCanvas().fit(target)
        if isinstance(target, ParallelImageTarget):
            return PlainCellsDrafter().fit(target)
        return PlainUnmasking().fit(target) if isinstance(target, MaskedTarget) else self

    def start(
        self, requests: Sequence[Request], prefill: PromptOutput, sampler: Sampler, random: RandomStream
    ) -> DraftSession:
        return self

    def propose(self, canvas: Canvas) -> Draft:
        return Tree.chain(canvas.root[:, None], self.kind)
