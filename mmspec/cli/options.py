"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = [
    "AsJson",
    "BatchSize",
    "Device",
    "Drafter",
    "Dtype",
    "GuidanceScale",
    "Images",
    "JsonLines",
    "Model",
    "Prompts",
    "Seed",
    "Task",
    "TopK",
    "TopP",
]

Model = Annotated[
    str | None,
    typer.Argument(
        help="Checkpoint folder or hub id; the reference model in assets/ if none is given.",
        show_default=False,
    ),
]
Drafter = Annotated[
    str | None,
    typer.Option(
        help="Folder or hub id of the draft model or head, for accelerators that need one; by default what "
        "drafters.json in the model's folder names.",
        show_default=False,
    ),
]
Prompts = Annotated[
    list[str] | None,
    typer.Option("--prompt", "--prompts", help="What to ask; may be repeated.", show_default=False),
]
Images = Annotated[
    list[str] | None,
    typer.Option(
        "--image", "--images", help="Image to ask about (path or URL); may be repeated.", show_default=False
    ),
]
JsonLines = Annotated[
    str | None,
    typer.Option(
        "--jsonl",
        help="File of the MMSpec benchmark's form: an object a line with turns, image, category, id.",
        show_default=False,
    ),
]
Task = Annotated[
    str | None,
    typer.Option(
        help="Without prompts of your own: caption, describe, question, two_images, clip or mixed, on "
        "scenes; or generate, for models that draw."
    ),
]
GuidanceScale = Annotated[
    float | None, typer.Option("--guidance", help="Guidance scale; 1 is off.", show_default="the model's")
]
TopK = Annotated[int | None, typer.Option(help="0 keeps every token.", show_default="the model's")]
TopP = Annotated[float | None, typer.Option(help="1 keeps every token.", show_default="the model's")]
BatchSize = Annotated[int, typer.Option(min=1, help="Prompts decoded together.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of sampling and of the choice of scenes.")]
Dtype = Annotated[
    str,
    typer.Option(help="auto (the checkpoint's own), float32, bfloat16 or float16."),
]
Device = Annotated[
    str | None,
    typer.Option(help="cpu, cuda, cuda:1, ... or auto (spread over all); the GPU if there is one."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON to stdout.")]
