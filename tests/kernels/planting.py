"""Planting a bug in a Triton module: the op loads a copy of its source in which a few characters differ."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from mmspec import kernels


def plant(
    patch: pytest.MonkeyPatch, folder: Path, module: str, old: str, new: str, importers: Sequence[str] = ()
) -> None:
    """Replace `old`, which occurs once in a module of mmspec.kernels, for as long as `patch` holds.

    The copy is a file, because Triton reads the source of its kernels. Modules that import names from it
    (`importers`) are loaded anew.
    """
    source = Path(kernels.__path__[0], f"{module}.py").read_text()
    assert source.count(old) == 1, f"{module} no longer holds {old!r} once: plant the bug anew"
    path = folder / f"{module}.py"
    path.write_text(source.replace(old, new))
    name = f"{kernels.__name__}.{module}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    mutant = importlib.util.module_from_spec(spec)
    patch.setitem(sys.modules, name, mutant)
    patch.setattr(kernels, module, mutant, raising=False)
    spec.loader.exec_module(mutant)
    for importer in importers:
        name = f"{kernels.__name__}.{importer}"
        patch.setattr(kernels, importer, None, raising=False)
        patch.delitem(sys.modules, name, raising=False)
        patch.setattr(kernels, importer, importlib.import_module(name))
