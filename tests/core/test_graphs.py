"""The cache of CUDA graphs: with a stand-in for capturing that runs on the CPU, and on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mmspec.core import graphs
from mmspec.core.graphs import Graph, GraphCache, can_capture


class Tape:
    """Stand-in for CUDA: a replay runs the function on the captured inputs, into the captured output."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.captured: list[int] = []
        self.fails: Exception | None = None
        monkeypatch.setattr(graphs, "capture", self.capture)
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)

    def capture(self, function: Callable[..., Tensor], inputs: tuple[Tensor, ...], side: Any) -> Graph:
        if self.fails:
            raise self.fails
        self.captured.append(len(inputs[0]))
        output = function(*inputs)
        return Graph(lambda: output.copy_(function(*inputs)), inputs, output, function)


@pytest.fixture
def tape(monkeypatch: pytest.MonkeyPatch) -> Tape:
    return Tape(monkeypatch)


def affine(x: Tensor, y: Tensor) -> Tensor:
    return 2 * x + y.sum(-1, keepdim=True)


def inputs(rows: int, offset: float = 0.0, size: int = 3) -> tuple[Tensor, Tensor]:
    numbers = torch.arange(float(rows * size)).view(rows, size)
    return numbers + offset, numbers[:, :2] - offset


def test_replays_give_what_the_function_gives(tape: Tape):
    cache = GraphCache("net")
    kept = []
    for rows, offset in ((3, 0.0), (4, 1.0), (3, 5.0), (1, 2.0), (0, 0.0)):
        given = inputs(rows, offset)
        kept.append((cache("key", affine, given), affine(*given)))
    assert tape.captured == [4, 1]  # 3 and 4 rows share a graph, none and one another
    for own, expected in kept:  # after all replays: results are not views of a graph's output
        assert torch.equal(own, expected)


def test_what_cannot_be_captured_runs_without_a_graph_and_says_so_once(tape: Tape, caplog: Any):
    tape.fails = RuntimeError("operation not permitted when stream is capturing")
    cache = GraphCache("SomeNet")
    for offset in (0.0, 1.0):
        given = inputs(2, offset)
        assert torch.equal(cache("key", affine, given), affine(*given))
    (record,) = caplog.records
    assert "SomeNet" in record.getMessage() and "not permitted" in record.getMessage()


def test_nothing_is_captured_on_the_cpu_or_where_gradients_are_wanted():
    with torch.no_grad():
        assert not can_capture(torch.device("cpu"))
    assert not can_capture(torch.device("cuda"))


@pytest.mark.gpu
def test_graphs_of_a_gpu_give_what_the_function_gives():
    cache = GraphCache("net")
    with torch.inference_mode():
        assert can_capture(torch.device("cuda"))
        for rows, offset in ((3, 0.0), (4, 1.0), (70, 2.0), (3, 5.0)):
            given = tuple(each.cuda() for each in inputs(rows, offset))
            assert torch.equal(cache("key", affine, given), affine(*given))


@pytest.mark.gpu
def test_a_function_that_reads_back_runs_without_a_graph(caplog: Any):
    def reads(x: Tensor) -> Tensor:
        return x * float(x.sum())

    with torch.inference_mode():
        given = torch.ones(2, 2, device="cuda")
        assert torch.equal(GraphCache("SomeNet")("key", reads, [given]), reads(given))
    assert "SomeNet" in caplog.text
