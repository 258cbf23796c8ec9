"""CUDA graphs of functions of tensors, which replace thousands of small kernel launches by one."""

from __future__ import annotations

import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mmspec.errors import InputError

__all__ = ["GraphCache", "can_capture", "graphs_mode", "has_graphs"]

MODES = ("auto", "compile", "off")

WARM_UPS = 3
WIDEST = 64  # the rows of a graph are rounded up to a power of two up to here, beyond to a multiple of this

logger = logging.getLogger(__name__)


def graphs_mode() -> str:
    """Return when steps and rounds are captured, the value of the environment variable `MMSPEC_GRAPHS`.

    "compile", the default, captures after `pipe.compile()`; "auto" also without it, when a shape has come a
    few times; "off" never.

    Raises:
        InputError: the value is unknown.
    """
    mode = os.environ.get("MMSPEC_GRAPHS", "compile")
    if mode not in MODES:
        raise InputError("MMSPEC_GRAPHS", mode, f"must be one of {', '.join(MODES)}")
    return mode


def has_graphs(device: torch.device) -> bool:
    """Return whether a device replays CUDA graphs."""
    return device.type == "cuda"


def can_capture(device: torch.device) -> bool:
    """Return whether work on a device can be captured: not with gradients, nor inside another graph."""
    return (
        has_graphs(device)
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and not torch.cuda.is_current_stream_capturing()
    )


class Graph(NamedTuple):
    """A captured call; `replay` computes `output` from `inputs`."""

    replay: Callable[[], object]
    inputs: tuple[Tensor, ...]
    output: Tensor
    function: Callable[..., Tensor]  # keeps the tensors alive that the graph reads


class Side(NamedTuple):
    """Stream and memory pool of a device for capturing; a pool can only be shared along one stream."""

    stream: torch.cuda.Stream
    pool: Any


class GraphCache:
    """Least-recently-used cache of CUDA graphs, for functions whose rows are independent.

    Calls must use one stream at a time. Copies of a cache start empty.

    Args:
        name: of the module that the functions belong to, for the log.
        limit: largest number of graphs. A head with fewer steps along an image has one graph for each number
            of steps.
    """

    def __init__(self, name: str, limit: int = 64) -> None:
        self.name, self.limit = name, limit
        self._graphs: OrderedDict[Hashable, Graph | None] = OrderedDict()
        self._sides: dict[torch.device, Side] = {}  # shared by all graphs, because no two run at once
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[GraphCache], tuple[str, int]]:
        return type(self), (self.name, self.limit)

    def __call__(self, key: Hashable, function: Callable[..., Tensor], inputs: Sequence[Tensor]) -> Tensor:
        """Return `function(*inputs)`, replayed from a graph if the function can be captured.

        Args:
            key: identifies functions that compute different things, or read other tensors than `inputs`.
            function: maps tensors [M, ...] on one CUDA device to a tensor [M, ...], without synchronising.
            inputs: its arguments.
        """
        rows = len(inputs[0])
        size = rows_of_graph(rows)
        shapes = tuple((each.shape[1:], each.dtype, each.device) for each in inputs)
        with self._lock:
            graph = self._find((key, size, shapes), function, inputs, size)
            if graph is not None:
                for own, given in zip(graph.inputs, inputs, strict=True):
                    own[:rows].copy_(given)
                graph.replay()
                return graph.output[:rows].clone()  # the next replay overwrites it
        return function(*inputs)

    def _find(
        self, key: Hashable, function: Callable[..., Tensor], inputs: Sequence[Tensor], size: int
    ) -> Graph | None:
        if key not in self._graphs:
            while len(self._graphs) >= self.limit:
                self._graphs.popitem(last=False)
            self._graphs[key] = self._try_capture(function, inputs, size)
        self._graphs.move_to_end(key)
        return self._graphs[key]

    def _try_capture(
        self, function: Callable[..., Tensor], inputs: Sequence[Tensor], size: int
    ) -> Graph | None:
        try:
            # not in inference mode: later calls in any mode write to these tensors
            with torch.inference_mode(False), torch.no_grad():
                device = inputs[0].device
                if device not in self._sides:
                    self._sides[device] = Side(torch.cuda.Stream(device), torch.cuda.graph_pool_handle())
                own = tuple(each.new_zeros(size, *each.shape[1:]) for each in inputs)
                return capture(function, own, self._sides[device])
        except RuntimeError as error:
            logger.warning(
                "%s: capturing a CUDA graph of %d rows failed, running without it: %s", self.name, size, error
            )
            return None


def rows_of_graph(rows: int) -> int:
    """Number of rows of the graph that is used for `rows` rows."""
    return power_of_two(rows) if rows <= WIDEST else -(-rows // WIDEST) * WIDEST


def power_of_two(count: int) -> int:
    """The smallest power of two that is at least `count`."""
    return 1 << max(count - 1, 0).bit_length()


def capture(
    function: Callable[..., Tensor], inputs: tuple[Tensor, ...], side: Side, warm_ups: int = WARM_UPS
) -> Graph:
    """Capture `function(*inputs)`, after warm-up calls that compile kernels and allocate memory.

    Raises:
        RuntimeError: the function cannot be captured in a graph, or memory ran out.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(inputs[0].device):
        side.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side.stream):
            for _ in range(warm_ups):
                function(*inputs)
        torch.cuda.current_stream().wait_stream(side.stream)
        # in the default mode, an allocation by another thread would abort the capture
        with torch.cuda.graph(graph, pool=side.pool, stream=side.stream, capture_error_mode="thread_local"):
            output = function(*inputs)
    return Graph(graph.replay, inputs, output, function)
