"""Times of the ops of `mmspec.kernels`, beside their floors and the same in plain torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from unittest.mock import patch

import torch

from benchmarks.gpu.ceilings import Ceilings, Row, seconds_of
from benchmarks.gpu.kernel_cases import ATTENTION_PEERS, CASES, KernelCase, Shape

__all__ = ["time_attention", "time_kernels"]

LAUNCHES = 20  # in a graph: one is launched while the one before runs


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
) -> Iterator[Row]:
    """Time every case: as the op is called here, in a CUDA graph, and the same in plain torch.

    Yields:
        A row for each shape: seconds of a call (caches overwritten before, launch included), of one of many
        in a graph (caches warm; None off CUDA), of the peer; the floor, and the ratio of the best to it. Or
        `error`, so that one op does not cost the others.
    """
    for case in cases:
        for shape in (case.tiny,) if tiny else case.shapes:
            floor = case.cost(shape).floor(ceilings)
            row = {"op": case.op, "shape": dict(shape), "formula": case.floor, "floor": floor}
            yield Row(row, partial(_times, case, shape, floor, device))


def time_attention(device: torch.device, ceilings: Ceilings, *, tiny: bool = False) -> Iterator[Row]:
    """Time `tree_attention`, and torch's own attention of the same draft: SDPA with a mask, FlexAttention.

    Yields:
        A row for each shape and way: seconds of a call (caches overwritten before), and the floor.
    """
    case = next(case for case in CASES if case.op == "tree_attention")
    for shape in (case.tiny,) if tiny else case.shapes:
        for way, prepare in ATTENTION_PEERS.items():
            row = {"way": way, "shape": dict(shape), "floor": case.cost(shape).floor(ceilings)}
            yield Row(row, partial(_attention, case, shape, prepare, device), 20 if way == "flex" else 3)


def _attention(
    case: KernelCase, shape: Shape, prepare: Callable[..., Callable[[], object]], device: torch.device
) -> dict[str, float]:
    work = prepare(*case.make(shape, device))
    return {"seconds": seconds_of(work, device, repeats=30, cold=True)}


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
