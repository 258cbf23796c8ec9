"""Plot the forward passes that methods save on images of several sizes.

The input is the JSON output of `mmspec bench --task generate` for each size.

python benchmarks/image_sizes.py 16x16=a.json 32x32=b.json --out sizes.png
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from matplotlib.figure import Figure


def main(
    tables: Annotated[list[str], typer.Argument(help="NAME=FILE for each size, smallest first.")],
    out: Annotated[Path, typer.Option(help="Image file to write.")] = Path("sizes.png"),
) -> None:
    """Plot the reduction of forward passes by each method over the size of the image."""
    saved: dict[str, dict[str, float]] = {}
    sizes = [table.partition("=")[0] for table in tables]
    for size, table in zip(sizes, tables, strict=True):
        for row in json.loads(Path(table.partition("=")[2]).read_text())["records"]:
            saved.setdefault(f"{row['accelerator']} ({row['exactness']})", {})[size] = row["step_compression"]
    figure = Figure(figsize=(6, 6), layout="constrained")
    axes = figure.subplots()
    for method, by_size in saved.items():
        if len(by_size) == len(sizes):
            axes.plot(sizes, [by_size[size] for size in sizes], marker="o", label=method)
    axes.set_ylabel("forward passes of plain decoding / of the method", fontsize=9)
    axes.set_xlabel("image tokens", fontsize=9)
    axes.set_ylim(0)
    figure.legend(fontsize=8, loc="outside lower center")
    figure.savefig(out, dpi=120)
    print(f"written: {out}")


if __name__ == "__main__":
    typer.run(main)
