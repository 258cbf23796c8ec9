"""Sampling settings of continuous tokens: from a model's output to distributions of vectors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from torch import Tensor

from mmspec.call_fields import ABOVE_ZERO
from mmspec.core.draft import Draft
from mmspec.core.interfaces import AnyDraft
from mmspec.core.processors import History
from mmspec.core.rows import named
from mmspec.core.sampling import RowSettings, check_setting, read_setting, values_of
from mmspec.kernels.sampling import of_rows
from mmspec.registry import require_known
from mmspec.vectors.denoising import Denoising
from mmspec.vectors.denoising_head import DenoisingHead, DenoisingSchedule

__all__ = ["DenoisingSampler"]

GUIDANCE_SCHEDULES = ("constant", "rising", "falling")


@dataclass(frozen=True, kw_only=True)
class DenoisingSampler(RowSettings):
    """Sampling settings of continuous tokens with a denoising head.

    Temperature and guidance are one value for all rows, or a sequence with one for each of the B rows.

    Args:
        source: the head.
        schedule: of its steps.
        temperature: factor of the deviations of its steps, above 0; the first noise is not scaled.
        guidance_scale: s of u + s (c - u) at every step; 1 is off.
        guidance_schedule: "constant"; "rising" from 1 to s with the decided share of the image (MAR,
            2406.11838); or "falling" from s to 1 (NextStep-1, 2508.10711). Both are linear.
        normalize: whether each drawn token is normalised.
        length: number of tokens of the image, for guidance schedules.

    Raises:
        InputError: a value outside its range.
    """

    row_fields = named("guidance_scale")

    source: DenoisingHead
    schedule: DenoisingSchedule
    temperature: float | Sequence[float] = 1.0
    guidance_scale: float | Sequence[float] = 1.0
    guidance_schedule: str = "constant"
    normalize: bool = False
    length: int = 0

    def __post_init__(self) -> None:
        temperature = read_setting("temperature", self.temperature, ABOVE_ZERO)
        object.__setattr__(self, "temperature", temperature)
        scale = read_setting("guidance_scale", self.guidance_scale, check_setting)
        object.__setattr__(self, "guidance_scale", scale)
        require_known("guidance_schedule", self.guidance_schedule, GUIDANCE_SCHEDULES)

    def of_model(self, model: Any) -> Self:
        """Return these settings for another model with the `Target` interface, with its own head."""
        return replace(self, source=model.denoiser)

    def __call__(self, conditions: Tensor, draft: Draft, history: History, first: Tensor) -> Denoising:
        """Turn a model's conditions, [B, n, D] or [2B, n, D] under guidance, into distributions."""
        nodes = conditions.view(1 + self.is_guided, *draft.lanes.valid.shape, conditions.shape[-1])
        scale, temperature = (self._of_nodes(name, nodes[0]) for name in ("guidance_scale", "temperature"))
        if self.is_guided and self.guidance_schedule != "constant":
            scale = 1 + (scale - 1) * self._share(draft, first, nodes[0])
            scale = scale.expand(*nodes.shape[1:3], 1) if isinstance(scale, Tensor) else scale
        unconditional = nodes[1] if self.is_guided else None
        return Denoising(
            self.source,
            self.schedule_of(draft),
            nodes[0],
            unconditional,
            scale,
            temperature,
            normalize=self.normalize,
        )

    def _of_nodes(self, name: str, nodes: Tensor) -> float | Tensor:
        """Return a setting at nodes [T, n, D]: a number, or [T, n, 1] if rows differ."""
        numbers: float | Tensor = of_rows(values_of(getattr(self, name)), nodes)
        if not isinstance(numbers, Tensor):
            return numbers
        lanes = len(nodes) // max(1, len(numbers))
        return numbers.repeat_interleave(lanes, 0).expand(*nodes.shape[:2], 1)

    def _share(self, draft: Draft, first: Tensor, nodes: Tensor) -> float | Tensor:
        """Share of the scale: rising with the decided share after this round, falling with that before it."""
        before, after = self.progress(draft, first, nodes)
        if self.guidance_schedule == "falling":
            return 1 - before / self.length
        last = self.length - 1
        return (after.clamp_max(last) if isinstance(after, Tensor) else min(after, last)) / self.length

    def schedule_of(self, draft: AnyDraft) -> DenoisingSchedule:
        """Return the schedule of the head's steps for a draft."""
        return self.schedule

    def progress(self, draft: AnyDraft, first: Tensor, like: Tensor) -> tuple[float | Tensor, float | Tensor]:
        """Number of places decided before and after each node's, [T, n, 1], in sequential order."""
        before = (first[:, None] + draft.lanes.depth).to(like.dtype)[..., None]
        return before, before + 1
