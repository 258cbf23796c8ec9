"""Plots of the recorded parts. They need only the JSON files, and not the GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.gpu.steps import WAYS
from mmspec.evaluation.tables import check_plot

__all__ = ["draw_kernels", "draw_steps"]


def draw_kernels(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Plot the times of each op as a call, in a graph and in plain torch, with its floor.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    check_plot(path)
    from matplotlib.figure import Figure

    rows = [row for row in rows if "error" not in row]
    labels = [f"{row['op']} {'x'.join(map(str, row['shape'].values()))}" for row in rows]
    figure = Figure(figsize=(7, 0.45 * len(rows) + 1.4), layout="constrained")
    panel = figure.subplots()
    for name, marker in (("seconds", "o"), ("graph", "s"), ("peer", "x")):
        points = [(row[name] * 1e6, place) for place, row in enumerate(rows) if row[name] is not None]
        if points:
            panel.plot(*zip(*points, strict=True), marker, label={"seconds": "call"}.get(name, name))
    panel.plot([row["floor"] * 1e6 for row in rows], range(len(rows)), "k|", markersize=14, label="floor")
    panel.set_yticks(range(len(rows)), labels, fontsize=8)
    panel.set_xscale("log")
    panel.set_xlabel("microseconds")
    panel.legend(fontsize=8)
    figure.savefig(path, dpi=130)
    return path


def draw_steps(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Plot milliseconds per step against nodes for each target, with transformers' `generate` as lines.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    check_plot(path)
    from matplotlib.figure import Figure

    rows = [row for row in rows if "ms" in row]
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    figure = Figure(figsize=(4 * max(1, len(shapes)), 3.6), layout="constrained")
    panels = figure.subplots(1, max(1, len(shapes)), squeeze=False)[0]
    for panel, shape in zip(panels, shapes, strict=False):
        of_shape = [row for row in rows if row["shape"] == shape]
        for colour, batch in enumerate(dict.fromkeys(row["batch"] for row in of_shape)):
            own = [row for row in of_shape if row["batch"] == batch and row["way"] in WAYS]
            for way, marker in zip(WAYS, ("o-", "s--"), strict=True):
                points = [(row["nodes"], row["ms"]) for row in own if row["way"] == way]
                if points:
                    panel.loglog(
                        *zip(*points, strict=True), f"C{colour}{marker}", label=f"{way}, batch {batch}"
                    )
            floors = sorted({(row["nodes"], row["floor_ms"]) for row in own})
            if floors:
                panel.loglog(*zip(*floors, strict=True), f"C{colour}:", label="floor")
            for row in of_shape:
                if row["batch"] == batch and row["way"] not in WAYS:
                    style = "--" if "static" in row["way"] else "-."
                    panel.axhline(row["ms"], color=f"C{colour}", linestyle=style, label=row["way"], lw=0.8)
        panel.set_title(shape, fontsize=10)
        panel.set_xlabel("nodes")
    panels[0].set_ylabel("ms per step")
    entries = panels[0].get_legend_handles_labels()
    figure.legend(*entries, loc="outside lower center", ncols=5, fontsize=6)
    figure.savefig(path, dpi=130)
    return path
