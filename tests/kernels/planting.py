"""A bug in a kernel: a few characters of its file are replaced, and the launcher of the copy is used."""

import importlib
import importlib.util
from pathlib import Path

import pytest


def plant(monkeypatch: pytest.MonkeyPatch, folder: Path, module: str, old: str, new: str) -> None:
    """Let an op of `mmspec.kernels` launch a copy of `<module>_triton.py` in which `old` is `new`."""
    real = importlib.import_module(f"mmspec.kernels.{module}_triton")
    source = Path(real.__file__).read_text()
    assert source.count(old) == 1, f"{module}_triton.py no longer holds {old!r} once: plant the bug anew"
    path = folder / "planted.py"
    path.write_text(source.replace(old, new))
    # a name of its own in the package, for the relative imports; Triton reads the file again
    spec = importlib.util.spec_from_file_location(f"mmspec.kernels.planted_{module}", path)
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    launcher = next(name for name in vars(copy) if name.endswith("_triton"))
    monkeypatch.setattr(real, launcher, getattr(copy, launcher))
