"""Planting a bug in Triton kernels: an op launches a copy of them in which a few characters differ."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import FunctionType

import pytest

JIT = "@triton.jit"


def plant(patch: pytest.MonkeyPatch, folder: Path, module: str, old: str, new: str) -> None:
    """Replace `old`, which occurs once among the kernels of a module, for as long as `patch` holds.

    The copy is a file, because Triton reads the source of its kernels.
    """
    importlib.import_module(f"mmspec.kernels.{module}")
    real = sys.modules[f"mmspec.kernels.{module}"]
    source = Path(str(real.__file__)).read_text()
    kernels = source[source.index(JIT) :]
    assert kernels.count(old) == 1, f"{module} no longer holds {old!r} once: plant the bug anew"
    path = folder / f"{module}.py"
    path.write_text("from __future__ import annotations\n\n" + kernels.replace(old, new))
    changed = dict(vars(real))
    exec(compile(path.read_text(), str(path), "exec"), changed)
    for name, value in changed.items():
        if value is not vars(real).get(name) and not isinstance(value, FunctionType):
            patch.setattr(real, name, value, raising=False)
