"""`mmspec evaluate growth`: time of a round as its work grows, beside its floor."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any

import typer

from mmspec.cli.console import Interruptible, note, print_result, progress
from mmspec.cli.loading import read_dtype
from mmspec.cli.options import AsJson, Plot, Table
from mmspec.errors import InputError
from mmspec.registry import did_you_mean

__all__ = ["growth"]


def growth(
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
        mmspec evaluate growth
        mmspec evaluate growth --size 7b --device cuda --out growth.json --plot growth.png
    """
    import torch

    from mmspec.evaluation.machine import environment
    from mmspec.evaluation.plots import check_plot
    from mmspec.evaluation.speed import growth as growing
    from mmspec.evaluation.speed.ceilings import measure_ceilings

    if plot is not None:
        check_plot(plot)
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    on_gpu = where.type == "cuda"
    size = size or ("7b" if on_gpu else "small")
    if size not in growing.SIZES:
        raise InputError("--size", size, did_you_mean(size, growing.SIZES))
    weights = read_dtype(dtype) or (torch.bfloat16 if on_gpu else torch.float32)
    asked = {"context": context or (growing.AXES["context"] if on_gpu else 1024), "nodes": nodes}
    asked |= {"batch": batch, "vocabulary": vocabulary}
    total = sum(len(growing.values_of(axis, last)) for axis, last in asked.items())
    rows: list[growing.GrowthRow] = []
    with Interruptible() as block, progress(quiet=as_json) as bar:
        work = bar.add_task("ceilings", total=total)
        ceilings = measure_ceilings(where, weights)
        for row in growing.measure_growth(size, where, weights, ceilings, asked, rounds):
            rows.append(row)
            bar.update(work, advance=1, description=f"{row.axis} {row.value}")
    if not rows:
        note("nothing was measured")
        block.finish()
    described: dict[str, Any] = {"size": size, "rounds": rounds, **environment(where, weights)}
    described |= {"copy_gb_per_second": round(ceilings.bytes_per_second / 1e9, 1)}
    described |= {"matmul_tflops": round(ceilings.flops_per_second / 1e12, 3)}
    powers = {
        axis: {name: growing.exponents(of_axis, name) for name in (*growing.MEASURED, "floor")}
        for axis, of_axis in growing.by_axis(rows).items()
    }
    value = {"settings": described, "rows": list(map(asdict, rows)), "exponents": powers}
    if out is not None:
        out.write_text(json.dumps(value, indent=1) + "\n")
        note(f"written: {out}")
    if plot is not None:
        note(f"written: {growing.draw_growth(plot, rows)}")
    print_result(value, growing.growth_report(rows, described), as_json)
    block.finish()
