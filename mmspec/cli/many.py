"""Option `--ray` of several commands: many workers decode prompts into a folder that can be resumed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mmspec.atomic_file import atomic_file
from mmspec.cli.console import Interruptible, note, progress
from mmspec.cli.loading import absolute_options, absolute_source, read_dtype
from mmspec.errors import InputError
from mmspec.open_types import Json, Keywords

if TYPE_CHECKING:
    from mmspec.cli.loading import AcceleratorChoice
    from mmspec.cli.options import ModelOptions
    from mmspec.many.work import Item

__all__ = ["PromptFile", "RayOptions", "decode_many", "located"]

PromptFile = Annotated[
    str | None,
    typer.Option("--prompt-file", help="File of prompts: one per line, JSON, a table, or a published set."),
]


@dataclass(frozen=True, kw_only=True)
class RayOptions:
    """Options of commands that can use many workers."""

    ray: Annotated[
        bool,
        typer.Option(
            "--ray",
            help="Distribute prompts over workers (Ray Data); --out is a folder, which can be resumed.",
        ),
    ] = False
    workers: Annotated[
        int | None,
        typer.Option(
            min=1, help="Number of workers with --ray.", show_default="one per GPU, or per two cores"
        ),
    ] = None


def located(image: object) -> str:
    """The absolute path of a file; a URL unchanged."""
    path = Path(str(image))
    return str(path.absolute()) if path.is_file() else str(image)


def decode_many(
    source: str,
    choice: AcceleratorChoice,
    items: Sequence[Item],
    settings: Keywords,
    out: Path,
    asked: RayOptions,
    how: ModelOptions,
    *,
    draws: bool,
) -> list[Json]:
    """Decode all items with many workers into a folder; returns one record per item.

    The folder gets a file per item and, at the end, `images.jsonl` or `texts.jsonl` with all records.
    """
    from mmspec.many.pool import check_ray, run_many
    from mmspec.many.work import Work

    check_ray()
    read_dtype(how.dtype)
    if how.device is not None:
        raise InputError("--device", how.device, "cannot be combined with --ray, whose workers use all GPUs")
    work = Work(
        model=absolute_source(source),
        draws=draws,
        accelerator=choice.name,
        options=absolute_options(choice),
        settings=settings,
        seed=how.seed,
        dtype=how.dtype,
        folder=str(out.absolute()),
    )
    with Interruptible() as block, progress(quiet=how.as_json) as bar:
        task = bar.add_task(choice.label, total=len(items))
        records = run_many(work, items, asked.workers, lambda done: bar.update(task, completed=done))
    if block.interrupted:
        note(f"interrupted: run the same command again to continue {out}")
        block.finish()
    name = "images.jsonl" if draws else "texts.jsonl"
    lines = "".join(json.dumps(record) + "\n" for record in records)
    with atomic_file(out / name) as temporary:
        temporary.write_text(lines, encoding="utf-8")
    return records
