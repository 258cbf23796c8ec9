"""Compile the Triton kernels of all cases at once, in processes that share Triton's cache on disk."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch

from benchmarks.gpu.ceilings import Row
from benchmarks.gpu.kernel_cases import CASES

__all__ = ["compile_kernels"]

PROCESSES = 8  # each has a CUDA context, and the compiler one core


def compile_kernels(device: torch.device, tiny: bool) -> Iterator[Row]:
    """Launch the op of every case once, so that later parts find its kernels compiled.

    Args:
        device: of the tensors; on a CPU nothing is compiled.
        tiny: two cases with their tiny shapes.

    Yields:
        One row: the number of cases, and what failed.
    """

    def compiled() -> dict[str, Any]:
        cases = range(2 if tiny else len(CASES))
        workers = min(PROCESSES, len(cases), os.cpu_count() or 1)
        with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
            found = pool.map(_launch, cases, [str(device)] * len(cases), [tiny] * len(cases))
            return {"cases": len(cases), "processes": workers, "failed": [each for each in found if each]}

    yield Row({"compiled": "kernels"}, compiled, 60)


def _launch(index: int, device: str, tiny: bool) -> str | None:
    """Launch the op of a case on all its shapes; return what went wrong."""
    case = CASES[index]
    try:
        for shape in (case.tiny,) if tiny else case.shapes:
            case.function(*case.make(shape, torch.device(device)))
    except Exception as error:  # the row of the case says it again
        return f"{case.op}: {type(error).__name__}: {error}"[:200]
    return None
