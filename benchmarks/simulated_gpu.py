"""A GPU simulated on the CPU: counts kernel launches, and records CUDA graphs and replays them.

A launch is an operator of torch that computes something, or a kernel of `mmspec.kernels`. A graph holds the
launches of its capture with their tensors. A replay runs them again on the same tensors, so that values which
Python computed, and tensors that were allocated later, have no effect on it, as on a GPU. Reads by the host
fail during a capture.

Launches take planted seconds of a clock that events read. As on a GPU, the time between two events is known
once the host has waited for something later.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from mmspec import kernels
from mmspec.core import graphs, loop
from mmspec.core.canvas import Report
from mmspec.core.graphs import Graph
from mmspec.kernels import ordering, philox
from mmspec.models import linear_layers
from mmspec.models.linear_layers import Way

__all__ = ["Counts", "SimulatedGPU"]

WARM_UPS = 1
#: Operators that return memory without a launch, in addition to views.
ALLOCATING = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "lift_fresh", "lift"}
READING = {"item", "is_nonzero", "_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2"}
MOVING = {"index_select", "cat", "index_copy_", "copy_", "clone", "_foreach_copy_"}
HOST_READS = ("tolist", "numpy", "__array__")
#: Launches of a kernel that has more than one.
LAUNCHES = {
    "tree_attention": 2,
    "verify_chain": 2,
    "sample_tokens": 2,
    "reject_tree": 2,
    "redraw": 2,
    "warp_logits": 2,
    "penalize_tokens": 2,
}
#: Functions that return tensors made of numbers on the host, and so copy them to the device.
COPYING = {torch: ("tensor", "as_tensor", "from_numpy"), Tensor: ("new_tensor",)}


@dataclass
class Counts:
    """Counts since the last `take`.

    Attributes:
        launches: launches outside graphs by operator.
        captured: launches that replays of graphs replaced.
        replays, captures: of graphs.
        copies: copies of numbers from the host to the device.
        reads: reads by the host, which wait for the device.
        moved_bytes: bytes that copying operators wrote outside graphs.
    """

    launches: Counter[str] = field(default_factory=Counter)
    captured: int = 0
    replays: int = 0
    captures: int = 0
    copies: int = 0
    reads: int = 0
    moved_bytes: int = 0

    @property
    def outside_graphs(self) -> int:
        """Launches of a round as the driver sees them: a replay is one."""
        return self.launches.total() + self.replays

    @property
    def total(self) -> int:
        """Kernels of a round, in graphs and outside."""
        return self.launches.total() + self.captured


Step = tuple[Callable[..., Any], Sequence[Any], dict[str, Any], Any]
LAUNCH_SECONDS = 5e-6


class Event:
    """Event of a simulated GPU, with the methods of `torch.cuda.Event`."""

    def __init__(self, gpu: SimulatedGPU) -> None:
        self._gpu, self._seconds = gpu, float("inf")

    def record(self, stream: None = None) -> None:
        if self._gpu.is_capturing:
            raise RuntimeError("an event would be recorded in every replay")
        self._seconds = self._gpu.seconds

    def synchronize(self) -> None:
        self._gpu.waited = max(self._gpu.waited, self._seconds)

    def elapsed_time(self, later: Event) -> float:
        if later._seconds > self._gpu.waited:
            raise RuntimeError("device not ready: the event has not been reached")
        return 1000 * (later._seconds - self._seconds)


class SimulatedGPU(TorchDispatchMode):
    """Context in which torch's operators on the CPU count as launches on a GPU.

    Functions are replaced in all modules of mmspec until it is left.

    Args:
        cost: seconds of a launch, or of one in a replay; by default the same for all.

    Attributes:
        seconds: the time that launches have taken.
        waited: the time that the host has waited for; later events are not known to have happened.
    """

    def __init__(self, cost: Callable[[Step], float] = lambda step: LAUNCH_SECONDS) -> None:
        super().__init__()
        self.cost, self.seconds, self.waited = cost, 0.0, 0.0
        self.counts = Counts()
        self._tape: list[Step] | None = None
        self._written: dict[int, tuple[Tensor, Tensor]] = {}  # during a capture: memory, and what it held
        self._stack = ExitStack()
        self._is_quiet = False

    @property
    def is_capturing(self) -> bool:
        return self._tape is not None

    def take(self) -> Counts:
        """Return the counts since the last call, and start again."""
        counts, self.counts = self.counts, Counts()
        return counts

    def __enter__(self) -> SimulatedGPU:
        replaced = [(getattr(kernels, name), self._kernel(name)) for name in kernels.OPS]
        replaced += [
            (graphs.can_capture, self._can_capture),
            (graphs.capture, self._capture),
            (graphs.has_graphs, lambda device: True),
            (graphs.Side, lambda *_: None),
            (loop.runs_by_itself, lambda device: True),
            (linear_layers.fastest, lambda *_, **__: Way.TORCH),
        ]
        attributes = [
            (sys.modules["mmspec.targets.attention"], "use_triton", lambda device: True),
            (philox, "uniforms_on_host", philox._uniforms_in_torch),
            (ordering, "_sort_on_host", ordering._sort_in_torch),
            (ordering, "_largest_on_host", ordering._largest_in_torch),
            (Report, "send", self._send),
            (torch.cuda, "Event", lambda **_: Event(self)),
            (torch.cuda, "current_stream", lambda *_: None),
            (torch.cuda, "Stream", lambda *_: None),
            (torch.cuda, "graph_pool_handle", lambda: None),
            *((Tensor, name, self._reading(getattr(Tensor, name))) for name in HOST_READS),
            *(
                (at, name, self._copying(getattr(at, name)))
                for at, names in COPYING.items()
                for name in names
            ),
        ]
        # torch keeps the functions that take a default device from here on, which must not be replacements
        _device_constructors()
        swap(replaced)
        # also in modules that are imported meanwhile
        self._stack.callback(swap, [(new, old) for old, new in replaced])
        for place, name, new in attributes:
            self._stack.enter_context(patch.object(place, name, new))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._stack.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        if name in READING:
            self._read(name)
        if self._tape is not None and func._schema.is_mutable:
            self._protect(args, kwargs)
        out = func(*args, **kwargs)
        is_view = func.is_view and is_alias(out, (args, kwargs))  # `reshape` and `contiguous` may copy
        if not is_view and name not in ALLOCATING:
            self._launch(name, 1, (func, args, kwargs, out))
        return out

    def _can_capture(self, device: torch.device) -> bool:
        return self._tape is None and not self._is_quiet and not torch.is_grad_enabled()

    def _send(self, numbers: Tensor, *how: Any) -> Report:
        copied, arrived = numbers.clone(), Event(self)
        arrived.record()
        return Report(copied, arrived, *how)  # type: ignore[arg-type]  # has its methods

    def _launch(self, name: str, launches: int, step: Step) -> None:
        if self._tape is not None:
            self._tape += [step, *[(nothing, (), {}, None)] * (launches - 1)]
        elif not self._is_quiet:
            self.counts.launches[name] += launches
            self.seconds += self.cost(step)
            if name in MOVING:
                written = step[1][0] if step[3] is None else step[3]  # lists are written in place
                self.counts.moved_bytes += sum(
                    x.nbytes for x in tree_leaves(written) if isinstance(x, Tensor)
                )

    def _read(self, name: str) -> None:
        if self._tape is not None:
            raise RuntimeError(f"{name} is not permitted while a stream is capturing")
        if not self._is_quiet:
            self.counts.reads += 1

    def _kernel(self, name: str) -> Callable[..., Any]:
        op = getattr(kernels, name)

        def run(*args: Any, **kwargs: Any) -> Any:
            if self._tape is not None:
                self._protect(args, kwargs)
            with self._without_counting():
                out = op(*args, **kwargs)
            self._launch(name, LAUNCHES.get(name, 1), (op, args, kwargs, out))
            return out

        return run

    def _reading(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            self._read(real.__name__)
            with self._without_counting():
                return real(tensor, *args, **kwargs)

        return read

    def _copying(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def copy(*args: Any, **kwargs: Any) -> Any:
            on_host = str(kwargs.get("device")) == "cpu"
            if self._tape is not None and not on_host:
                raise RuntimeError(f"{real.__name__} is not permitted while a stream is capturing")
            if not self._is_quiet and not on_host:
                self.counts.copies += 1
            return real(*args, **kwargs)

        return copy

    def _protect(self, args: Any, kwargs: Any) -> None:
        """Keep the memory that an operator may write during a capture, which computes nothing."""
        with self._without_counting():
            for tensor in tree_leaves((args, kwargs)):
                if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in self._written:
                    storage = tensor.untyped_storage()
                    flat = torch.empty(0, dtype=torch.uint8).set_(storage)
                    self._written[storage.data_ptr()] = flat, flat.clone()

    def _capture(
        self, function: Callable[..., Any], inputs: tuple[Tensor, ...], side: object, warm_ups: int = WARM_UPS
    ) -> Graph:
        with self._without_counting():
            for _ in range(warm_ups):
                function(*inputs)
        if self._tape is not None:
            raise RuntimeError("a stream is capturing already")
        tape: list[Step] = []
        self._tape = tape
        try:
            output = function(*inputs)
        finally:
            self._tape = None
            with self._without_counting():
                for memory, before in self._written.values():
                    memory.copy_(before)
            self._written.clear()
        self.counts.captures += 1

        def replay() -> None:
            if not self._is_quiet:
                self.counts.replays += 1
                self.counts.captured += len(tape)
                self.seconds += sum(map(self.cost, tape))
            with self._without_counting():
                for step, args, kwargs, out in tape:
                    overwrite(out, step(*args, **kwargs))

        return Graph(replay, inputs, output, function)

    @contextmanager
    def _without_counting(self) -> Iterator[None]:
        before, self._is_quiet, tape = self._is_quiet, True, self._tape
        self._tape = None
        try:
            with _disable_current_modes():
                yield
        finally:
            self._is_quiet, self._tape = before, tape


def nothing() -> None:
    """A further launch of a kernel that has several."""


def is_alias(out: Any, inputs: Any) -> bool:
    """Whether all results are in the memory of the inputs."""
    memory = {x.untyped_storage().data_ptr() for x in tree_leaves(inputs) if isinstance(x, Tensor)}
    return all(x.untyped_storage().data_ptr() in memory for x in tree_leaves(out) if isinstance(x, Tensor))


def overwrite(old: Any, new: Any) -> None:
    """Write results into the tensors that the capture made."""
    for kept, computed in zip(tree_leaves(old), tree_leaves(new), strict=True):
        if isinstance(kept, Tensor) and kept.data_ptr() != computed.data_ptr():
            kept.copy_(computed)


def swap(pairs: Sequence[tuple[Any, Any]]) -> None:
    """Replace the first of each pair by the second, in all modules of mmspec."""
    others = {id(old): new for old, new in pairs}
    for module in [module for name, module in sys.modules.items() if name.split(".")[0] == "mmspec"]:
        for name, value in list(vars(module).items()):
            if id(value) in others:
                setattr(module, name, others[id(value)])
