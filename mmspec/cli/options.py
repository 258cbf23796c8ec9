"""Options that several commands share, single or grouped in a dataclass for `unpack_options`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from mmspec.call_fields import CALL_FIELDS

__all__ = [
    "Accelerator",
    "AsJson",
    "BatchSize",
    "GuidanceScale",
    "HeadSteps",
    "Host",
    "LastStepNoise",
    "LoadOptions",
    "Model",
    "ModelOptions",
    "Plot",
    "Port",
    "Seed",
    "Table",
    "Temperature",
    "TopK",
    "TopP",
    "Wide",
    "setting",
    "unpack_options",
]

Model = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL", help="Checkpoint folder or hub id; by default the reference model in assets/."
    ),
]
Accelerator = Annotated[
    str | None,
    typer.Option(
        help="NAME or NAME:option=value; `mmspec accelerators` lists the names, and auto uses the result of "
        "`mmspec tune`. By default that of drafters.json in the model's folder; otherwise copy, or none for "
        "masked models."
    ),
]
BatchSize = Annotated[int, typer.Option(min=1, help="Prompts decoded together.")]


def setting(name: str, *flags: str, **how: Any) -> Any:
    """An option for a call field of pipelines, with the field's help; `how` are other settings of typer."""
    return typer.Option(*flags, help=CALL_FIELDS[name].help, **how)


OF_MODEL = "that of the model"
Temperature = Annotated[float, setting("temperature", min=0.0)]
GuidanceScale = Annotated[float | None, setting("guidance_scale", show_default=OF_MODEL)]
TopK = Annotated[int | None, setting("top_k", show_default=OF_MODEL)]
TopP = Annotated[float | None, setting("top_p", show_default=OF_MODEL)]
HeadSteps = Annotated[int | None, setting("num_inference_steps", min=2, show_default=OF_MODEL)]
LastStepNoise = Annotated[bool, setting("last_step_noise", "--last-step-noise")]
Table = Annotated[Path | None, typer.Option(help="JSON file to write in addition.")]
Plot = Annotated[Path | None, typer.Option(help="Plot of the results to write (needs matplotlib).")]
Wide = Annotated[bool, typer.Option("--wide", help="Print all columns of the tables.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of all random numbers.")]
Host = Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 means all.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 selects a free one.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON to stdout.")]


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """Options of every command that loads a model."""

    drafter: Annotated[
        str | None,
        typer.Option(
            help="Folder or hub id of the draft model or head, for accelerators that need one; by default "
            "that of drafters.json in the model's folder."
        ),
    ] = None
    dtype: Annotated[str, typer.Option(help="auto (as in the checkpoint), float32, bfloat16 or float16.")] = (
        "auto"
    )
    device: Annotated[
        str | None,
        typer.Option(
            help="cpu, cuda, cuda:1, ... or auto (spread over all); by default the GPU if there is one."
        ),
    ] = None
    mode: Annotated[
        str | None,
        typer.Option(
            help="Decoding of models that were trained to fill masked blocks and to predict the next token: "
            "blocks or autoregressive.",
            show_default="blocks",
        ),
    ] = None
    pack: Annotated[
        bool,
        typer.Option(
            help="On a CPU, pack linear layers into up to half of the free memory, which is faster."
        ),
    ] = True


@dataclass(frozen=True, kw_only=True)
class ModelOptions(LoadOptions):
    """Options of every command that decodes with a model and prints a result."""

    seed: Seed = 0
    as_json: AsJson = False


def unpack_options(command: Callable[..., None]) -> Callable[..., None]:
    """Decorator that turns the fields of a command's dataclass arguments into options of typer.

    Fields need a default, and are annotated like options of typer.
    """
    signature = inspect.signature(command, eval_str=True)
    kinds = {name: one.annotation for name, one in signature.parameters.items()}
    groups: dict[str, Any] = {name: kind for name, kind in kinds.items() if is_dataclass(kind)}

    @wraps(command)
    def unpacked(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        command(**given)

    options = []
    for name, one in signature.parameters.items():
        if name in groups:
            hints = get_type_hints(groups[name], include_extras=True)
            found = [(field.name, field.default, hints[field.name]) for field in fields(groups[name])]
        else:
            found = [(name, one.default, one.annotation)]
        options += [
            inspect.Parameter(option, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
            for option, default, kind in found
        ]
    unpacked.__dict__["__signature__"] = inspect.Signature(options)  # read by typer
    return unpacked
