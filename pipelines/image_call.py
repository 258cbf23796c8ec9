"""Calls of image pipelines: batch after batch, round by round, and images of what there is so far."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any, Protocol

from diffusers.image_processor import VaeImageProcessor
from torch import Tensor

from mmspec.accelerators.accelerator import Accelerator, Call
from mmspec.decoding.canvas import Canvas, Stopping
from mmspec.decoding.image_grid import ImageGrid
from mmspec.decoding.interfaces import Request, Round
from mmspec.decoding.random_stream import RandomStream
from mmspec.decoding.stats import merge_stats
from mmspec.errors import NumericalError
from mmspec.pipelines.image_settings import ImageBatchSettings
from mmspec.pipelines.outputs import ImageOutput

__all__ = ["ImageCall", "ImageDecoder"]


class ImageDecoder(Protocol):
    """Interface of a pipeline that makes images of tokens."""

    target: Any
    accelerator: Accelerator

    def drawn(self, canvas: Canvas) -> list[Any]:
        """The tokens of every row that are there so far."""

    def latents(self, grid: ImageGrid, rows: Sequence[Any]) -> Tensor:
        """Tokens of images in their places, and a mark where there is none; rows as `drawn` gives them."""

    def pixels(self, grid: ImageGrid, latents: Tensor) -> Tensor:
        """Images [n, 3, H, W] in [-1, 1] on the CPU, grey where nothing is drawn yet."""


@dataclass(eq=False, repr=False)
class ImageCall:
    """One call in batches: the requests, and the tokens decoded so far.

    Attributes:
        requests: one for each image.
        calls: the batches that were begun.
        committed: tokens of all images so far.
    """

    pipeline: ImageDecoder
    requests: list[Request]
    settings: ImageBatchSettings
    sampler: Any
    random: RandomStream
    calls: list[Call] = field(default_factory=list, init=False)
    committed: int = field(default=0, init=False)

    def rounds(self) -> Iterator[Round]:
        """Decode batch after batch, yielding every round; `calls[-1]` is the batch that it belongs to."""
        size = self.settings.batch_size
        for first in range(0, len(self.requests), size):
            call = self.batch(first, size)
            self.calls.append(call)
            for step in call.rounds():
                self.committed += sum(map(len, step.emission.tokens))
                yield step

    def batch(self, first: int, size: int) -> Call:
        """Set up the decoding of `size` images, fewer at the end."""
        requests = self.requests[first : first + size]
        rows = range(first, first + len(requests))
        sampler, random = self.sampler.part(rows), self.random.part(rows)
        stopping = Stopping(self.grid.length)
        return self.pipeline.accelerator.call(self.pipeline.target, sampler, requests, stopping, random)

    def progress(self) -> dict[str, Any]:
        """Progress of the current batch: its rows, their tokens, and a function that makes images of them."""
        first = self.settings.batch_size * (len(self.calls) - 1)
        tokens = self.pipeline.drawn(self.calls[-1].canvas)
        return {
            "rows": range(first, first + len(tokens)),
            "tokens": tokens,
            "preview": partial(self._images, "pil", tokens),
        }

    def errors(self) -> Iterator[tuple[int, NumericalError]]:
        """Errors of the images that ended in one."""
        found = [error for call in self.calls for error in call.canvas.errors]
        return ((index, error) for index, error in enumerate(found) if error is not None)

    def output(self) -> ImageOutput:
        """Make the output of the images drawn so far."""
        begun = [call.canvas for call in self.calls]
        missing = len(self.requests) - sum(len(batch.ids) for batch in begun)
        tokens: list[Any] = [row for batch in begun for row in self.pipeline.drawn(batch)]
        tokens += [[] for _ in range(missing)]
        reasons = [reason or "interrupted" for batch in begun for reason in batch.finish_reasons]
        drafted = [row for batch in begun for row in batch.drafted]
        kind, clock = self.settings.output_type, perf_counter()
        return ImageOutput(
            self._images(kind, tokens),
            tokens,
            merge_stats([call.stats for call in self.calls]),
            reasons + ["interrupted"] * missing,
            drafted + [[] for _ in range(missing)],
            perf_counter() - clock,
        )

    @property
    def grid(self) -> ImageGrid:
        """Grid of the images."""
        grid: ImageGrid = self.requests[0].grid or self.pipeline.target.grid  # one call has one size
        return grid

    def _images(self, kind: str, tokens: Sequence[Any]) -> Any:
        """Images of tokens, in the form of an `output_type`."""
        latents = self.pipeline.latents(self.grid, tokens)
        if kind == "latent":
            return latents
        return VaeImageProcessor().postprocess(self.pipeline.pixels(self.grid, latents), kind)
