"""Plots of tables need matplotlib, which not every installation has."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from mmspec.errors import MissingDependencyError

__all__ = ["check_plot"]


def check_plot(path: str | Path) -> Path:
    """The path of a plot to be drawn.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingDependencyError(f"drawing {path} needs matplotlib: pip install 'mmspec[eval]'")
    return Path(path)
