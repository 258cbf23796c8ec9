"""Kernels and events use the device of their tensors, which may differ from the current device."""

from __future__ import annotations

import ast
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mmspec import kernels
from mmspec.core import canvas, statistics
from mmspec.core.canvas import Report
from mmspec.core.statistics import DecodingStats, Timer
from mmspec.kernels.backend import launcher

FOLDER = Path(next(iter(kernels.__path__)))
SECOND = torch.device("cuda:1")


def launches(part: ast.AST) -> bool:
    """Whether code launches a kernel: `some_kernel[grid](...)`."""
    return any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Subscript)
        and ast.unparse(node.func.value).endswith("_kernel")
        for node in ast.walk(part)
    )


def test_every_function_that_launches_a_kernel_is_a_launcher() -> None:
    """Checks the sources; each kernel is launched in one of them."""
    found, unguarded, kernels_seen = 0, [], set()
    for path in FOLDER.glob("*.py"):
        for part in ast.parse(path.read_text()).body:
            if isinstance(part, ast.FunctionDef) and part.name.endswith("_kernel"):
                kernels_seen.add((path.stem, part.name))
            if not launches(part):
                continue
            found += 1
            decorators = [ast.unparse(each) for each in getattr(part, "decorator_list", [])]
            if "launcher" not in decorators:
                unguarded.append(f"{path.stem}.{getattr(part, 'name', part)}")
    assert not unguarded
    assert found > 18 and len(kernels_seen) > 23


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Devices that were made the current one, in place of device 0."""
    entered: list[torch.device] = []

    def device(place: torch.device) -> AbstractContextManager[None]:
        entered.append(place)
        return nullcontext()

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return entered


def on(index: int) -> Any:
    """Return a stand-in for a tensor on the GPU of that index."""
    return SimpleNamespace(is_cuda=True, get_device=lambda: index, device=torch.device("cuda", index))


def test_launchers_change_to_the_device_of_their_tensors(devices: list[torch.device]) -> None:
    @launcher
    def launch(x: Any, more: int) -> tuple[int, int]:
        return more, len(devices)

    assert launch(on(0), 3) == (3, 0)
    assert launch(torch.zeros(1), 3) == (3, 0)
    assert launch(on(1), 3) == (3, 1)
    assert launch([on(1), on(1)], more=4) == (4, 2)
    assert devices == [SECOND, SECOND]


class Event:
    """An event that keeps the streams in which it was recorded."""

    recorded: list[Any] = []

    def __init__(self, **_: Any) -> None:
        pass

    def record(self, stream: Any = "current") -> None:
        self.recorded.append(stream)


def test_events_are_recorded_where_the_numbers_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Event, "recorded", [])
    cuda = SimpleNamespace(Event=Event, current_stream=lambda device: device)
    pinned = SimpleNamespace(copy_=lambda *_, **__: None)
    monkeypatch.setattr(canvas, "torch", SimpleNamespace(cuda=cuda, empty=lambda *_, **__: pinned))
    monkeypatch.setattr(statistics, "torch", SimpleNamespace(cuda=cuda))
    numbers: Any = SimpleNamespace(is_cuda=True, device=SECOND, shape=(2, 3), dtype=torch.int64)
    assert Report.send(numbers, 1, "tv").arrived is not None
    with statistics.timed_by_device():
        timer = Timer(DecodingStats("none", "exact", ""), SECOND)
    timer.start()
    assert Event.recorded == [SECOND, SECOND]
