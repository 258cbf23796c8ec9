"""Triton kernels in tests: on the GPU if there is one, else in Triton's interpreter on the CPU."""

import pkgutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import pytest
import torch

from mmspec import kernels


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def compiler_forgets() -> Iterator[None]:
    """All ops share the code of one wrapper, and the compiler keeps only eight compiled forms of it."""
    yield
    torch._dynamo.reset()


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Any, Any]]:
    """Call a function twice: with the Triton kernels, and with their torch forms."""
    pytest.importorskip("triton")

    def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        monkeypatch.setenv("MMSPEC_BACKEND", "triton")
        kernel = function(*args, **kwargs)
        monkeypatch.setenv("MMSPEC_BACKEND", "torch")
        return kernel, function(*args, **kwargs)

    return call


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts of calls of each launcher of a kernel."""
    pytest.importorskip("triton")
    counts: Counter[str] = Counter()

    def spy(module: Any, name: str) -> None:
        real = getattr(module, name)

        def counted(*args: Any) -> Any:
            counts[name.removesuffix("_triton")] += 1
            return real(*args)

        monkeypatch.setattr(module, name, counted)

    rooms = {found.name for found in pkgutil.iter_modules(kernels.__path__)} - {"backend"}
    for room in rooms:
        import_module(f"mmspec.kernels.{room}")
        module = sys.modules[f"mmspec.kernels.{room}"]
        for name, value in [*vars(module).items()]:
            if name.endswith("_triton") and getattr(value, "__module__", "") == module.__name__:
                spy(module, name)
    return counts
