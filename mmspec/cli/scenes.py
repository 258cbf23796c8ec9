"""`mmspec scenes`: a contact sheet of images of the toy world, on which the reference models are trained."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mmspec.cli.console import print_result
from mmspec.cli.options import AsJson

__all__ = ["scenes"]


def scenes(
    out: Annotated[Path, typer.Option(help="Image file to write.")] = Path("scenes.png"),
    seed: Annotated[int, typer.Option(min=0, help="Seed of the first scene.")] = 0,
    count: Annotated[int, typer.Option(min=1, help="Number of scenes.")] = 24,
    as_json: AsJson = False,
) -> None:
    """Draw scenes with their captions to an image file.

    Example:
        mmspec scenes --out sheet.png --count 12
    """
    from mmspec.errors import InputError
    from mmspec.scenes import draw_contact_sheet

    try:
        path = draw_contact_sheet(out, seed=seed, count=count)
    except (OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError("--out", str(out), f"must be an image file that can be written ({error})") from error
    print_result({"path": str(path), "seed": seed, "count": count}, str(path), as_json)
