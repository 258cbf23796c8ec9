"""Time of a round as context, nodes, batch and vocabulary grow, beside the floor of bytes moved.

python -m benchmarks.growth --out growth.json --plot growth.png
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Group
from rich.table import Table as Shown
from rich.text import Text
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.ceilings import Ceilings, measure_ceilings
from benchmarks.rounds import RoundShape, cost_of_round, measure_round
from mmspec.cli.console import Interruptible, note, print_result, progress
from mmspec.cli.loading import read_dtype
from mmspec.cli.options import AsJson, Plot, Table
from mmspec.errors import InputError
from mmspec.evaluation.machine import environment
from mmspec.evaluation.tables import check_plot, figures
from mmspec.registry import did_you_mean
from mmspec.targets import CausalTarget, adapt

#: Largest value of each axis where nothing else is asked for; each begins at the base and grows fourfold.
AXES = {"context": 16_384, "nodes": 64, "batch": 16, "vocabulary": 150_000}
BASE = {"context": 256, "nodes": 1, "batch": 1, "vocabulary": 1000}
MEASURED = ("seconds", "target", "verify", "rest")

#: Decoders by size: layers, width, heads, key-value heads, width of the feed-forward.
SIZES = {
    "tiny": (2, 64, 4, 2, 128),
    "small": (4, 256, 4, 4, 688),
    "1b": (16, 2048, 32, 8, 8192),
    "7b": (32, 4096, 32, 32, 11_008),
}


@dataclass(frozen=True)
class GrowthRow:
    """A round of one shape: measured seconds and those of its parts, and the floor.

    Attributes:
        axis: what grows; the other three are at their base.
        value: how far.
        floor: seconds of the least work, by the ceilings of this device.
    """

    axis: str
    value: int
    seconds: float
    target: float
    draft: float
    verify: float
    rest: float
    floor: float


def random_llama(size: str, vocabulary: int, device: torch.device, dtype: torch.dtype) -> CausalTarget:
    """A target of random weights."""
    layers, width, heads, kv_heads, wide = SIZES[size]
    config = LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=wide,
        vocab_size=vocabulary,
        max_position_embeddings=2 * AXES["context"],
    )
    with torch.device(device):
        model: Any = LlamaForCausalLM(config)
    return adapt(model.to(dtype).eval())


def values_of(axis: str, largest: int) -> list[int]:
    """Values of an axis: from its base in steps of 4, and the largest."""
    values, value = [], BASE[axis]
    while value < largest:
        values.append(value)
        value *= 4
    return [*values, largest]


def measure_growth(
    size: str,
    device: torch.device,
    dtype: torch.dtype,
    ceilings: Ceilings,
    largest: Mapping[str, int],
    rounds: int = 10,
) -> Iterator[GrowthRow]:
    """Time rounds along each axis, the other three at their base.

    Args:
        size: of the target, in `SIZES`.
        device, dtype: of its weights.
        ceilings: of the device.
        largest: axis -> its last value; axes that are not there are left out.
        rounds: that are timed of each shape.
    """
    target: CausalTarget | None = None
    for axis, last in largest.items():
        for value in values_of(axis, last):
            at = {**BASE, axis: value}
            vocabulary = at.pop("vocabulary")
            if target is None or target.vocabulary != vocabulary:
                target = None  # before the next one is there
                target = random_llama(size, vocabulary, device, dtype)
            shape = replace(RoundShape(), **at)
            time = measure_round(target, shape, rounds=rounds)
            floor = sum(cost.floor(ceilings) for cost in cost_of_round(target, shape).values())
            yield GrowthRow(axis, value, time.seconds, time.target, time.draft, time.verify, time.rest, floor)


def exponents(rows: Sequence[GrowthRow], column: str) -> dict[str, float]:
    """Exponents of growth along one axis: time goes as the value to that power.

    Args:
        rows: of one axis.
        column: of `GrowthRow`.

    Returns:
        `fitted` to all values by least squares of logarithms, and of the `last` step, where what is fixed
        hides least.
    """
    points = [(math.log(row.value), math.log(max(getattr(row, column), 1e-12))) for row in rows]
    if len(points) < 2:
        return {"fitted": 0.0, "last": 0.0}
    mean_x, mean_y = (sum(part) / len(points) for part in zip(*points, strict=True))
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    fitted = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
    (x0, y0), (x1, y1) = points[-2:]
    return {"fitted": fitted, "last": (y1 - y0) / (x1 - x0)}


def by_axis(rows: Sequence[GrowthRow]) -> dict[str, list[GrowthRow]]:
    """Rows of each axis."""
    return {
        axis: [row for row in rows if row.axis == axis] for axis in dict.fromkeys(row.axis for row in rows)
    }


def growth_report(rows: Sequence[GrowthRow], described: Mapping[str, Any]) -> Group:
    """Render a table for each axis, with the exponents of growth under the times."""
    above = ", ".join(f"{name} {value}" for name, value in described.items() if not isinstance(value, dict))
    parts: list[Any] = [Text(above, style="dim")]
    parts += [_axis_table(axis, of_axis) for axis, of_axis in by_axis(rows).items()]
    explained = (
        "ms of a round; floor: bytes moved over the measured copy bandwidth, or operations over the measured "
        "rate where those take longer. exponent: time grows as the value to that power, fitted to all "
        "values, and in the last step: none should be above the floor's."
    )
    return Group(*parts, Text(explained, style="dim"))


def _axis_table(axis: str, rows: Sequence[GrowthRow]) -> Shown:
    columns = (axis, "round", "target", "verify", "rest", "floor", "round /\nfloor")
    cells = [
        (
            f"{row.value:,}",
            *(f"{1000 * getattr(row, name):.3f}" for name in (*MEASURED, "floor")),
            f"{row.seconds / row.floor:.1f}x",
        )
        for row in rows
    ]
    for which in ("fitted", "last"):
        powers = (exponents(rows, name)[which] for name in (*MEASURED, "floor"))
        cells.append((f"exponent, {which}", *(f"{power:.2f}" for power in powers), ""))
    return figures(columns, cells, title=f"{axis} grows")


def draw_growth(path: str | Path, rows: Sequence[GrowthRow]) -> Path:
    """Plot the times against each axis, both logarithmic.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    path = check_plot(path)
    from matplotlib.figure import Figure

    axes = by_axis(rows)
    figure = Figure(figsize=(3.6 * len(axes), 3.4), layout="constrained")
    panels = figure.subplots(1, len(axes), squeeze=False)[0]
    for panel, (axis, of_axis) in zip(panels, axes.items(), strict=True):
        values = [row.value for row in of_axis]
        for name in (*MEASURED, "floor"):
            times = [1000 * getattr(row, name) for row in of_axis]
            panel.loglog(values, times, "k--" if name == "floor" else "o-", markersize=3, label=name)
        panel.set_xlabel(axis)
    panels[0].set_ylabel("ms of a round")
    panels[0].legend(fontsize=7)
    figure.savefig(path, dpi=130)
    return path


def main(
    size: Annotated[
        str | None,
        typer.Option(help="Of the target: tiny, small, 1b or 7b.", show_default="small; 7b on a GPU"),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(min=256, help="Most tokens before a draft.", show_default="1024; 16384 on a GPU"),
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, help="Most nodes of a draft.")] = 64,
    batch: Annotated[int, typer.Option(min=1, help="Most rows.")] = 16,
    vocabulary: Annotated[int, typer.Option(min=1000, help="Largest vocabulary.")] = 150_000,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each shape that are timed.")] = 10,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ...; the GPU if there is one.")] = None,
    dtype: Annotated[str, typer.Option(help="Of the weights.", show_default="float32; bfloat16 on a GPU")] = (
        "auto"
    ),
    out: Table = None,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Time rounds of a random target as context, nodes, batch and vocabulary grow.

    Beside each time stands the floor of the bytes that a round must move, by the
    measured bandwidth of the device, and below the exponents of growth: nothing in
    a round should grow faster than its floor.

    Example:
        python -m benchmarks.growth
        python -m benchmarks.growth --size 7b --device cuda --out growth.json --plot growth.png
    """
    if plot is not None:
        check_plot(plot)
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    on_gpu = where.type == "cuda"
    size = size or ("7b" if on_gpu else "small")
    if size not in SIZES:
        raise InputError("--size", size, did_you_mean(size, SIZES))
    weights = read_dtype(dtype) or (torch.bfloat16 if on_gpu else torch.float32)
    asked = {"context": context or (AXES["context"] if on_gpu else 1024), "nodes": nodes}
    asked |= {"batch": batch, "vocabulary": vocabulary}
    total = sum(len(values_of(axis, last)) for axis, last in asked.items())
    rows: list[GrowthRow] = []
    with Interruptible() as block, progress(quiet=as_json) as bar:
        work = bar.add_task("ceilings", total=total)
        ceilings = measure_ceilings(where, weights)
        for row in measure_growth(size, where, weights, ceilings, asked, rounds):
            rows.append(row)
            bar.update(work, advance=1, description=f"{row.axis} {row.value}")
    if not rows:
        note("nothing was measured")
        block.finish()
    described: dict[str, Any] = {"size": size, "rounds": rounds, **environment(where, weights)}
    described |= {"copy_gb_per_second": round(ceilings.bytes_per_second / 1e9, 1)}
    described |= {"matmul_tflops": round(ceilings.flops_per_second / 1e12, 3)}
    powers = {
        axis: {name: exponents(of_axis, name) for name in (*MEASURED, "floor")}
        for axis, of_axis in by_axis(rows).items()
    }
    value = {"settings": described, "rows": list(map(asdict, rows)), "exponents": powers}
    if out is not None:
        out.write_text(json.dumps(value, indent=1) + "\n")
        note(f"written: {out}")
    if plot is not None:
        note(f"written: {draw_growth(plot, rows)}")
    print_result(value, growth_report(rows, described), as_json)
    block.finish()


if __name__ == "__main__":
    typer.run(main)
