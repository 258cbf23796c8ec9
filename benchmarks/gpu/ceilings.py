"""Measured limits of a device, in bytes and operations per second, and timing of single calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch

__all__ = ["Ceilings", "Cost", "attempt", "measure_ceilings", "seconds_of"]

L2_BYTES = 256 * 2**20  # bytes written between two calls, so that no input is in the L2 cache


@dataclass(frozen=True)
class Ceilings:
    """Limits of a device.

    Attributes:
        bytes_per_second: bytes read and written by a large copy.
        flops_per_second: operations of a large matrix product; a multiply-add counts as two.
    """

    bytes_per_second: float
    flops_per_second: float


@dataclass(frozen=True)
class Cost:
    """Least work of a computation: bytes moved, and floating-point operations."""

    bytes: int
    flops: int = 0

    def floor(self, ceilings: Ceilings) -> float:
        """Return the least seconds that the computation takes on a device."""
        return max(self.bytes / ceilings.bytes_per_second, self.flops / ceilings.flops_per_second)


def measure_ceilings(
    device: torch.device, dtype: torch.dtype, *, copied: int | None = None, width: int | None = None
) -> Ceilings:
    """Measure the ceilings of a device.

    Args:
        device: a CPU or a GPU.
        dtype: dtype of the matrices.
        copied: bytes of the copy; by default more than the caches of the device.
        width: width of the square matrices; by default large enough to be efficient.
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
    """Return the median seconds of a call, measured with events on a GPU.

    Args:
        work: the function to call.
        device: the device that it uses.
        repeats: number of timed calls.
        warm_up: number of calls before them.
        cold: whether the caches of a GPU are overwritten before each call.
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


def attempt(
    row: dict[str, Any], measure: Callable[[], dict[str, Any]], failure: str = "error"
) -> dict[str, Any]:
    """Return a row with its measurements, or with the error as `failure`, so that other rows still run."""
    try:
        return row | measure()
    except Exception as error:
        return row | {failure: f"{type(error).__name__}: {error}"[:500]}
