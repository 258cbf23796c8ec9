"""Ceilings of a device, measured: bytes copied and operations done a second; and timing of single calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch

__all__ = ["Ceilings", "Cost", "Row", "measure_ceilings", "seconds_of"]

L2_BYTES = 256 * 2**20  # written between two calls, so that no input is in a cache


@dataclass(frozen=True)
class Ceilings:
    """The most that a device does.

    Attributes:
        bytes_per_second: read and written together, by a large copy.
        flops_per_second: of a large matrix product, a multiply-add being two.
    """

    bytes_per_second: float
    flops_per_second: float


@dataclass(frozen=True)
class Cost:
    """Least work of a computation: bytes that must be moved and operations that must be done."""

    bytes: int
    flops: int = 0

    def floor(self, ceilings: Ceilings) -> float:
        """Seconds below which it cannot be done."""
        return max(self.bytes / ceilings.bytes_per_second, self.flops / ceilings.flops_per_second)


def measure_ceilings(
    device: torch.device, dtype: torch.dtype, *, copied: int | None = None, width: int | None = None
) -> Ceilings:
    """Measure the ceilings of a device.

    Args:
        device: a CPU or a GPU.
        dtype: of the matrices.
        copied: bytes of the copy; beyond what caches hold if None.
        width: of the square matrices; large enough to be efficient if None.
    """
    on_gpu = device.type == "cuda"
    source = torch.ones(copied or (2**31 if on_gpu else 2**27), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    width = width or (8192 if on_gpu else 1024)
    matrix = torch.ones(width, width, dtype=dtype, device=device)
    copying = seconds_of(lambda: target.copy_(source), device)
    multiplying = seconds_of(lambda: matrix @ matrix, device)
    return Ceilings(2 * source.nbytes / copying, 2 * width**3 / multiplying)


def seconds_of(
    work: Callable[[], object],
    device: torch.device,
    *,
    repeats: int = 10,
    warm_up: int = 3,
    cold: bool = False,
) -> float:
    """Time a call: median seconds, by events on a GPU.

    Args:
        work: what to call.
        device: that it works on.
        repeats: calls that are timed.
        warm_up: calls before, which are not.
        cold: whether a GPU's caches are overwritten before each call.
    """
    for _ in range(warm_up):
        work()
    if device.type != "cuda":
        found = []
        for _ in range(repeats):
            started = perf_counter()
            work()
            found.append(perf_counter() - started)
        return median(found)
    junk = torch.empty(L2_BYTES, dtype=torch.uint8, device=device) if cold else None
    pairs = []
    for _ in range(repeats):
        if junk is not None:
            junk.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        pairs.append((begin, end))
    torch.cuda.synchronize(device)
    return float(median(begin.elapsed_time(end) / 1000 for begin, end in pairs))


@dataclass(frozen=True)
class Row:
    """A row of a record, which is measured if there is time for it.

    Attributes:
        labels: what is measured.
        measure: returns the figures.
        seconds: that this takes on a GPU, roughly; a row that needs more than is left is skipped.
        failure: name of the column that says what went wrong.
    """

    labels: dict[str, Any]
    measure: Callable[[], dict[str, Any]]
    seconds: float = 5.0
    failure: str = "error"

    def measured(self) -> dict[str, Any]:
        """Return the labels with the figures or with what went wrong, so that rows fail alone."""
        try:
            return self.labels | self.measure()
        except Exception as error:
            return self.labels | {self.failure: f"{type(error).__name__}: {error}"[:500]}
