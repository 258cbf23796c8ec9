"""Times of the ops of `mmspec.kernels`, with their lower bounds and the times of plain torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.gpu.ceilings import Ceilings, attempt, seconds_of
from benchmarks.gpu.kernel_cases import CASES, KernelCase, Shape

__all__ = ["time_kernels"]

LAUNCHES = 20  # calls in a graph, so that launches overlap with the kernels before


def in_graph(work: Callable[[], object]) -> Callable[[], object]:
    """Capture `LAUNCHES` calls in a CUDA graph, and return the function that replays it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(LAUNCHES):
            work()
    return graph.replay


def time_kernels(
    device: torch.device, ceilings: Ceilings, *, tiny: bool = False, cases: Sequence[KernelCase] = CASES
) -> Iterator[dict[str, Any]]:
    """Time every case as single calls of the op, in a CUDA graph, and in plain torch.

    Yields:
        A row for each shape, in seconds: `seconds` of a call with cold caches, launch included; `graph` of a
        call in a graph with warm caches (None without CUDA); `peer` of the same in plain torch; `floor`; and
        `over_floor`, the ratio of the fastest way to the floor. A row of an op that fails has `error`.
    """
    for case in cases:
        for shape in (case.tiny,) if tiny else case.shapes:
            floor = case.cost(shape).floor(ceilings)
            row = {"op": case.op, "shape": dict(shape), "formula": case.floor, "floor": floor}
            yield attempt(row, partial(_times, case, shape, floor, device))


def _times(case: KernelCase, shape: Shape, floor: float, device: torch.device) -> dict[str, float | None]:
    arguments = case.make(shape, device)

    def work() -> object:
        return case.function(*arguments)

    def alone(call: Callable[[], object]) -> float:
        return seconds_of(call, device, repeats=30, cold=True)

    graph = seconds_of(in_graph(work), device) / LAUNCHES if device.type == "cuda" else None
    seconds = alone(work)
    if case.peer is not None:
        peer = alone(partial(case.peer, *arguments))
    else:
        with patch.dict(os.environ, MMSPEC_BACKEND="torch"):
            peer = alone(work)
    best = seconds if graph is None else min(seconds, graph)
    return {"seconds": seconds, "graph": graph, "peer": peer, "over_floor": best / floor}
