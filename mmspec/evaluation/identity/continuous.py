"""Losslessness check of an accelerator on a model of continuous tokens.

Rules that draw the target's own vectors, with the noise of plain decoding, are compared with plain decoding
vector for vector. All others promise the distribution: their images and those of plain decoding are two
samples, whose energy distance is compared with that of random divisions of both together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mmspec.accelerators.accelerator import Accelerator
from mmspec.acceptance.denoising import SharedNoise
from mmspec.acceptance.matching import SampleAndMatch
from mmspec.decoding.stats import merge_stats
from mmspec.drafters.cell_order import CellModelDrafter
from mmspec.evaluation.identity.comparison import Comparison, Difference
from mmspec.evaluation.identity.samples import energy_test
from mmspec.evaluation.identity.text import IdentityCheck
from mmspec.evaluation.image_contender import ImageContender, prepare_images

__all__ = ["ContinuousCheck", "reference_of"]

OTHER_SEEDS = 1_000_003
SAME = 1e-2  # rms of a vector; rounding of forwards with other shapes, grown over an image, stays far below


def reference_of(accelerator: Accelerator, cells: int) -> str:
    """The accelerator whose distribution another one keeps, as the command line writes it.

    Plain decoding of a MAR draws several cells in a forward, a draft of cells is judged one by one.

    Args:
        accelerator: that is checked.
        cells: of an image.
    """
    drafter = accelerator.drafter
    if isinstance(drafter, CellModelDrafter):
        return f"masked:iterations={cells}:order={drafter.order}"
    return "none"


@dataclass(frozen=True)
class ContinuousCheck(IdentityCheck):
    """Losslessness check on images of continuous tokens, one comparison.

    Args:
        settings: of the calls.
    """

    accelerated: ImageContender
    plain: ImageContender
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_token_exact(self) -> bool:
        """True if vectors are those of plain decoding, up to rounding or a tolerance."""
        return isinstance(self.accelerated.accelerator.rule, SampleAndMatch | SharedNoise)

    @property
    def reference(self) -> str:
        """Name of what the accelerator is compared with."""
        return "plain decoding" if self.plain.accelerator.name == "none" else "one cell a forward"

    @property
    def outputs(self) -> int:
        """Number of calls of `on_output`."""
        return len(self.examples) * 2

    def comparisons(self) -> Iterator[Comparison]:
        """Compare vectors, or their distribution."""
        yield self.sampled() if self.is_token_exact else self.distribution()

    def sampled(self) -> Comparison:
        """Compare vectors with those of plain decoding with the same noise."""
        plain, _ = self._draw(self.plain, 0)
        own, stats = self._draw(self.accelerated, 0)
        apart = (own - plain).square().mean(-1).sqrt()  # [n, N]
        differences = [
            Difference(index, int(far[0]), None, None, float(row.max()), 0.0, False)
            for index, row in enumerate(apart)
            if len(far := (~(row <= SAME)).nonzero()[:, 0])
        ]
        return Comparison("same noise", self.reference, len(own), apart.numel(), differences, stats)

    def distribution(self) -> Comparison:
        """Test whether images are drawn from the distribution of the reference."""
        plain, _ = self._draw(self.plain, OTHER_SEEDS)
        own, stats = self._draw(self.accelerated, 0)
        test = energy_test(own, plain, self.seed)
        return Comparison("distribution", self.reference, len(own), test.places, [], stats, test)

    def _draw(self, contender: ImageContender, shift: int) -> tuple[Tensor, Any]:
        """Vectors [n, N, d] of all examples, and the stats."""
        pipe, drawn, stats = contender.enter(), [], []
        for batch, seeds in self._batches():
            shifted = [seed + shift for seed in seeds]
            call = prepare_images(pipe, batch, seeds=shifted, **self.settings, output_type="latent")
            for _ in call.rounds():
                pass
            drawn += pipe.drawn(call.calls[-1].canvas)
            stats.append(call.calls[-1].stats)
            for _ in batch:
                self.on_output()
        return torch.stack(drawn).float().cpu(), merge_stats(stats)
