"""Table of drafters by tasks on one target: speed-ups, and shares of the time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from mmspec.accelerators.accelerator import Accelerator
from mmspec.errors import InputError
from mmspec.evaluation.examples import Example, scene_examples
from mmspec.evaluation.plots import check_plot
from mmspec.evaluation.speed.record import BenchRecord
from mmspec.evaluation.speed.report import PARTS_EXPLAINED, describe_settings
from mmspec.evaluation.speed.timing import BASELINE
from mmspec.evaluation.tables import figures
from mmspec.targets.causal import CausalTarget

__all__ = [
    "TASKS",
    "as_rows",
    "count_parameters",
    "draw_plot",
    "drafter_report",
    "task_examples",
    "write_rows",
]

TASKS = ("caption", "describe", "question", "two_images", "clip")
COPIED = (
    *("exactness", "samples", "repeats", "new_tokens", "identical", "acceptance_length"),
    *("acceptance_by_position", "draft_passes", "decode_speedup", "decode_speedup_mean"),
    *("speedup", "speedup_min", "speedup_max", "seconds", "time_to_first_token"),
)


def task_examples(tasks: Sequence[str], samples: int, seed: int = 0) -> list[Example]:
    """Make examples of held-out scenes, as many for each task; their categories are the tasks.

    Raises:
        InputError: no tasks, or one that is not in `TASKS`.
    """
    if not tasks or not set(tasks) <= set(TASKS):
        raise InputError("tasks", list(tasks), f"some of {', '.join(TASKS)}")
    return [example for task in dict.fromkeys(tasks) for example in scene_examples(task, samples, seed)]


def count_parameters(accelerator: Accelerator) -> int:
    """Count the weights of a drafter's own model; 0 for one that has no model."""
    model = getattr(accelerator.drafter, "model", None)
    if isinstance(model, CausalTarget):
        model = model.model
    return 0 if model is None else sum(weights.numel() for weights in model.parameters())


def as_rows(records: Sequence[BenchRecord]) -> list[dict[str, Any]]:
    """Convert records into rows of the table, one for each drafter and task.

    Rows hold figures of `BenchRecord` under the same names, the drafter's `folder` and `parameters`, its
    `accepted_length` (the acceptance length without the bonus token), and `time`: the parts of the seconds
    that sum to 1. `decode_speedup` leaves out the reading of the prompts; `speedup` is end to end, with the
    preparing and reading of the images.
    """
    rows = []
    for record in records:
        rows.append(
            {
                "drafter": record.accelerator,
                "task": record.category,
                "folder": record.settings["drafter"],
                "parameters": record.settings["parameters"],
                **{name: getattr(record, name) for name in COPIED},
                "accepted_length": record.acceptance_length - 1,
                "time": record.shares,
            }
        )
    return rows


def write_rows(path: str | Path, rows: Sequence[dict[str, Any]], settings: dict[str, Any]) -> Path:
    """Write the table as JSON: the shared settings once, then the rows."""
    path = Path(path)
    path.write_text(json.dumps({"settings": settings, "rows": rows}, indent=1) + "\n")
    return path


def drafter_report(records: Sequence[BenchRecord]) -> Group:
    """Render the table for people, a part for each task."""
    rows = as_rows(records)
    parts: list[Any] = [Text(describe_settings(records[0].settings, records[0]), style="dim")]
    for task in dict.fromkeys(row["task"] for row in rows):
        parts.append(_task_table(task, [row for row in rows if row["task"] == task]))
    explained = (
        "accepted: draft tokens a round; with bonus: tokens a target forward. passes: forwards of the "
        f"drafter's model a round. decoding: ratio to {BASELINE} without reading the prompts; end to end: "
        f"with it. prompt to rest: parts of the wall-clock time; {PARTS_EXPLAINED}."
    )
    return Group(*parts, Text(explained, style="dim"))


def _task_table(task: str, rows: Sequence[dict[str, Any]]) -> Table:
    title = f"{task}: {rows[0]['samples']} prompts, {rows[0]['new_tokens']} tokens"
    columns = (
        *("drafter", "parameters", "identical", "accepted", "with\nbonus", "passes", "decoding"),
        *("end to end\n(min-max)", *rows[0]["time"]),
    )
    cells = (
        (
            row["drafter"],
            f"{row['parameters'] / 1e6:.2f} M" if row["parameters"] else "-",
            f"{row['identical']:.0%}",
            f"{row['accepted_length']:.2f}",
            f"{row['acceptance_length']:.2f}",
            f"{row['draft_passes']:.1f}",
            f"{row['decode_speedup']:.2f}x",
            f"{row['speedup']:.2f}x ({row['speedup_min']:.2f}-{row['speedup_max']:.2f})",
            *(f"{part:.0%}" for part in row["time"].values()),
        )
        for row in rows
    )
    return figures(columns, cells, title=title)


def draw_plot(path: str | Path, rows: Sequence[dict[str, Any]]) -> Path:
    """Plot the table: a column for each task, a bar for each drafter.

    Bars are the speed-up of decoding, dots the one end to end; the words say the acceptance length, bonus
    included, and how many outputs are those of plain decoding where not all are.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    path = check_plot(path)
    from matplotlib.figure import Figure

    tasks = list(dict.fromkeys(row["task"] for row in rows))
    drafters = list(dict.fromkeys(row["drafter"] for row in rows))
    figure = Figure(figsize=(2.6 * len(tasks) + 2.4, 0.36 * len(drafters) + 1.3), layout="constrained")
    panels = figure.subplots(1, len(tasks), sharey=True, squeeze=False)[0]
    places, longest = range(len(drafters)), max(row["decode_speedup"] for row in rows)
    for panel, task in zip(panels, tasks, strict=True):
        of_task = [row for row in rows if row["task"] == task]
        decoding = [row["decode_speedup"] for row in of_task]
        bars = panel.barh(places, decoding, color=["#1a7f37" if one >= 1 else "#bf8700" for one in decoding])
        panel.plot([row["speedup"] for row in of_task], places, "o", color="#0d1117", markersize=4)
        panel.bar_label(bars, [f" {_words(row)}" for row in of_task], fontsize=7)
        panel.axvline(1.0, color="#656d76", linewidth=0.8)
        panel.set_xlim(0, 1.5 * longest)
        panel.set_title(task.replace("_", " "), fontsize=10)
        panel.set_xlabel("times plain decoding", fontsize=8)
    panels[0].set_yticks(places, drafters, fontsize=8)
    panels[0].invert_yaxis()
    figure.suptitle("bars: decoding alone; dots: end to end; numbers: tokens a target forward", fontsize=8)
    figure.savefig(path, dpi=130)
    return path


def _words(row: dict[str, Any]) -> str:
    same = "" if row["identical"] == 1.0 else f", {row['identical']:.0%} identical"
    return f"{row['acceptance_length']:.2f}{same}"
