"""Kernels and events use the device of their tensors, which may differ from the current device."""

from __future__ import annotations

import ast
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import mmspec
from mmspec import kernels
from mmspec.core import canvas, statistics
from mmspec.core.canvas import Report
from mmspec.core.statistics import DecodingStats, Timer
from mmspec.kernels.backend import launcher

FOLDER = Path(next(iter(kernels.__path__)))
SECOND = torch.device("cuda:1")


def unguarded(source: str) -> tuple[list[str], int]:
    """Functions of a module that launch a kernel without `launcher`, and the number of those that launch.

    A launch is `some_kernel[grid](...)`, or so of any function that is decorated by `triton.jit`.
    """
    body = ast.parse(source).body
    functions = [part for part in body if isinstance(part, ast.FunctionDef)]
    jitted = {
        part.name for part in functions if any("jit" in ast.unparse(one) for one in part.decorator_list)
    }
    found, count = [], 0
    for part in body:
        launched = {
            ast.unparse(node.func.value)
            for node in ast.walk(part)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)
        }
        if not any(name in jitted or name.endswith("_kernel") for name in launched):
            continue
        count += 1
        decorators = [ast.unparse(each) for each in getattr(part, "decorator_list", [])]
        if decorators[:1] != ["launcher"]:
            found.append(getattr(part, "name", "the module"))
    return found, count


def test_every_function_that_launches_a_kernel_is_a_launcher() -> None:
    """Checks the sources of the kernels, and that nothing else in the package launches one."""
    checked = {path: unguarded(path.read_text()) for path in FOLDER.glob("*.py")}
    assert not {path.stem: found for path, (found, _) in checked.items() if found}
    assert sum(count for _, count in checked.values()) > 18
    package = Path(next(iter(mmspec.__path__)))
    outside = [path for path in package.rglob("*.py") if "kernels" not in path.parts]
    assert len(outside) > 100
    assert not [path for path in outside if "triton.jit" in path.read_text()]


@pytest.mark.parametrize("decorator", ["", "@other\n", "@other\n@launcher\n"])
def test_a_launch_that_nobody_guards_is_found(decorator: str) -> None:
    kernel = "@triton.jit(debug=True)\ndef add(x_ptr): pass\n"
    for name in ("add", "sum_kernel"):
        launch = f"{decorator}def launch(x):\n    if x.numel():\n        {name}[(1,)](x)\n"
        assert unguarded(kernel + launch) == (["launch"], 1)
        assert unguarded(kernel + launch.removeprefix(decorator).join(["@launcher\n", ""])) == ([], 1)


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
