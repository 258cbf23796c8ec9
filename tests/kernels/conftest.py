"""Triton kernels in tests: on the GPU if there is one, else in Triton's interpreter on the CPU."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def compiler_forgets() -> Iterator[None]:
    """All ops share one wrapper's code, and the compiler keeps but eight compiled forms of a code."""
    yield
    torch._dynamo.reset()


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Any, Any]]:
    """Call a function twice: with the Triton kernels, and with their twins in torch."""
    pytest.importorskip("triton")

    def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        monkeypatch.setenv("MMSPEC_BACKEND", "triton")
        kernel = function(*args, **kwargs)
        monkeypatch.setenv("MMSPEC_BACKEND", "torch")
        return kernel, function(*args, **kwargs)

    return call
