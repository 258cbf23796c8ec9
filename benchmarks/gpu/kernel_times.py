"""Times of the ops of `mmspec.kernels`, beside their floors and the same in plain torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks.ceilings import Ceilings, seconds_of
from benchmarks.gpu.kernel_cases import CASES, KernelCase

__all__ = ["in_graph", "time_kernels"]

LAUNCHES = 20  # in a graph: one is launched while the one before runs


@contextmanager
def backend(name: str) -> Iterator[None]:
    """Choose the form of the ops: "triton" or "torch"."""
    before = os.environ.get("MMSPEC_BACKEND")
    os.environ["MMSPEC_BACKEND"] = name
    try:
        yield
    finally:
        del os.environ["MMSPEC_BACKEND"]
        if before is not None:
            os.environ["MMSPEC_BACKEND"] = before


def in_graph(work: Callable[[], object]) -> Callable[[], object]:
    """Capture `LAUNCHES` calls in a CUDA graph; return its replay."""
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
    """Time every case: as the op is called here, in a CUDA graph, and the same in plain torch.

    Yields:
        A row for each shape: seconds of a call (caches overwritten before, launch included), of one of many
        in a graph (caches warm; None off CUDA), of the peer; the floor, and the ratio of the best to it. Or
        `error`, so that one op does not cost the others.
    """
    for case in cases:
        for shape in (case.tiny,) if tiny else case.shapes:
            row: dict[str, Any] = {"op": case.op, "shape": dict(shape), "formula": case.floor}
            row["floor"] = case.cost(shape).floor(ceilings)
            try:
                row |= _times(case, case.make(shape, device), device)
                best = min(time for time in (row["seconds"], row["graph"]) if time is not None)
                row["over_floor"] = best / row["floor"]
            except Exception as error:
                row["error"] = f"{type(error).__name__}: {error}"[:500]
            yield row


def _times(case: KernelCase, arguments: tuple[Any, ...], device: torch.device) -> dict[str, float | None]:
    def work() -> object:
        return case.function(*arguments)

    on_gpu = device.type == "cuda"
    graph = seconds_of(in_graph(work), device) / LAUNCHES if on_gpu else None
    found = {"seconds": seconds_of(work, device, repeats=30, cold=True), "graph": graph}
    if case.peer is not None:
        peer = case.peer
        return {**found, "peer": seconds_of(lambda: peer(*arguments), device, repeats=30, cold=True)}
    with backend("torch"):
        return {**found, "peer": seconds_of(work, device, repeats=30, cold=True)}
