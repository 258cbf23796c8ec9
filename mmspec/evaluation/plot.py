"""Check for matplotlib, which plots need and not every installation has."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from mmspec.errors import MissingDependencyError

__all__ = ["check_plot"]


def check_plot(path: str | Path) -> Path:
    """Check that plots can be drawn; return the path of one.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingDependencyError(f"drawing {path} needs matplotlib: pip install 'mmspec[eval]'")
    return Path(path)
