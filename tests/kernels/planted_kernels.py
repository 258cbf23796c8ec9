"""Planting a bug in a Triton kernel: a few characters of its module are replaced while a test runs."""

import importlib
import importlib.util
import sys
from pathlib import Path

import pytest


def plant(name: str, old: str, new: str, folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Put a changed copy in the place of a module of kernels, from which ops import their launchers.

    Args:
        name: of the module, in mmspec.kernels.
        old, new: text that occurs once in it, and the text to put there.
        folder: where the copy is written; Triton reads the source of its kernels.
    """
    real = importlib.import_module(f"mmspec.kernels.{name}")
    source = Path(real.__file__).read_text()
    assert source.count(old) == 1, f"{name} no longer holds {old!r} once: plant the bug anew"
    path = folder / f"{name}.py"
    path.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location(real.__name__, path)
    mutant = importlib.util.module_from_spec(spec)
    patch.setitem(sys.modules, real.__name__, mutant)
    spec.loader.exec_module(mutant)
