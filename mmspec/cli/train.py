"""`mmspec train`: the reference models, made again or anew."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mmspec.cli.console import note, print_json
from mmspec.cli.options import AsJson

__all__ = ["train_app"]

Minutes = Annotated[float | None, typer.Option(min=0.0, help="Length of the training.", show_default=False)]
Steps = Annotated[
    int | None, typer.Option(min=1, help="Length in steps instead; reproducible.", show_default=False)
]
Start = Annotated[
    Path | None, typer.Option("--from", help="Trained folder to begin with.", show_default=False)
]
TrainingSeed = Annotated[int, typer.Option(min=0, help="Seed of weights and scenes.")]
Threads = Annotated[
    int | None, typer.Option(min=1, help="CPU threads; torch's choice if not given.", show_default=False)
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on from an interrupted run.")]

train_app = typer.Typer(help="Train models.", no_args_is_help=True)


@train_app.callback()
def _group() -> None:
    """Train models; several GPUs, also with FSDP 2, through `accelerate launch -m mmspec train ...`."""


@train_app.command()
def vlm(
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    size: Annotated[str, typer.Option(help="base, small (the draft model) or tiny.")] = "base",
    minutes: Annotated[
        float | None, typer.Option(min=0.0, help="Length of the training.", show_default="56")
    ] = None,
    steps: Steps = None,
    tower_from: Annotated[
        Path | None,
        typer.Option(help="Trained folder whose vision tower is taken over and frozen.", show_default=False),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Scenes a step and process.")] = 32,
    seed: TrainingSeed = 0,
    threads: Threads = None,
    resume: Resume = False,
    as_json: AsJson = False,
) -> None:
    """Train a reference vision-language model on scenes.

    Resumable; writes an ordinary transformers folder.

    Example:
        mmspec train vlm --out my-scenes-llava --minutes 40
        mmspec train vlm --out my-scenes-llava --minutes 40 --resume
    """
    from mmspec.reference.training.vlm import train_vlm

    folder = train_vlm(
        out,
        size=size,
        minutes=minutes,
        steps=steps,
        tower_from=tower_from,
        batch_size=batch_size,
        seed=seed,
        threads=threads,
        resume=resume,
    )
    _report(folder, as_json, size=size, seed=seed)
    if not as_json:
        note(f"score it: mmspec evaluate vlm {folder}")


@train_app.command()
def reader(
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    start: Start = None,
    size: Annotated[str, typer.Option(help="base or tiny.")] = "base",
    minutes: Minutes = None,
    steps: Steps = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Scenes a step and process.")] = 64,
    seed: TrainingSeed = 0,
    threads: Threads = None,
    resume: Resume = False,
    as_json: AsJson = False,
) -> None:
    """Train the reader of attributes that judges drawn images, on real scenes only.

    Example:
        mmspec train reader --out my-reader --minutes 18
    """
    from mmspec.reference.training.reader import train_reader

    folder = train_reader(
        out,
        start=start,
        size=size,
        minutes=minutes,
        steps=steps,
        batch_size=batch_size,
        seed=seed,
        threads=threads,
        resume=resume,
    )
    _report(folder, as_json, size=size, seed=seed)


@train_app.command()
def vq(
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    reader: Annotated[
        Path | None,
        typer.Option(help="Trained reader whose features are compared too.", show_default=False),
    ] = None,
    start: Start = None,
    size: Annotated[str, typer.Option(help="base or tiny.")] = "base",
    minutes: Minutes = None,
    steps: Steps = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Images a step and process.")] = 16,
    seed: TrainingSeed = 0,
    threads: Threads = None,
    resume: Resume = False,
    as_json: AsJson = False,
) -> None:
    """Train an image tokenizer: 64 x 64 pixels to 16 x 16 tokens.

    Example:
        mmspec train vq --out my-vq --reader my-reader --minutes 9
    """
    from mmspec.reference.training.vq import train_vq

    folder = train_vq(
        out,
        reader=reader,
        start=start,
        size=size,
        minutes=minutes,
        steps=steps,
        batch_size=batch_size,
        seed=seed,
        threads=threads,
        resume=resume,
    )
    _report(folder, as_json, size=size, seed=seed)


@train_app.command()
def image(
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    vq: Annotated[Path, typer.Option(help="Trained image tokenizer.")],
    reader: Annotated[
        Path | None,
        typer.Option(help="Trained reader to put beside the model, for evaluation.", show_default=False),
    ] = None,
    condition: Annotated[str, typer.Option(help="caption, or class (48 labels).")] = "caption",
    start: Start = None,
    size: Annotated[str, typer.Option(help="base or tiny.")] = "base",
    minutes: Minutes = None,
    steps: Steps = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Images a step and process.")] = 16,
    seed: TrainingSeed = 0,
    threads: Threads = None,
    resume: Resume = False,
    as_json: AsJson = False,
) -> None:
    """Train a LlamaGen on the tokens of scenes, and its text encoder with it.

    Writes a folder with transformer, text encoder, tokenizer and image tokenizer.

    Example:
        mmspec train image --out my-scenes --vq my-vq --reader my-reader
        mmspec train image --out my-classes --vq my-vq --condition class --from my-scenes --minutes 8
    """
    from mmspec.reference.training.image import train_image

    folder = train_image(
        out,
        vq,
        reader=reader,
        condition=condition,
        start=start,
        size=size,
        minutes=minutes,
        steps=steps,
        batch_size=batch_size,
        seed=seed,
        threads=threads,
        resume=resume,
    )
    _report(folder, as_json, size=size, seed=seed)
    if not as_json:
        note(f"score it: mmspec evaluate image {folder}")


def _report(folder: Path, as_json: bool, **record: object) -> None:
    if as_json:
        print_json({"folder": str(folder), **record})
    else:
        typer.echo(str(folder))


@train_app.command()
def drafter(
    target: Annotated[str, typer.Option(help="Folder or hub id of the model that it drafts for.")],
    out: Annotated[
        Path | None, typer.Option(help="Folder to write.", show_default="named after target and method")
    ] = None,
    method: Annotated[
        str,
        typer.Option(
            help="eagle, eagle3, flash, hydra, medusa, msd, specvlm or vispec; with settings: flash:block=10."
        ),
    ] = "eagle",
    data: Annotated[
        Path | None,
        typer.Option(
            help="Conversations with images: JSONL, or LLaVA's JSON. For image models a JSONL file of "
            "images: image, and prompt or class. Scenes if not given.",
            show_default=False,
        ),
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(min=1, help="Skip conversations of more tokens.", show_default=False)
    ] = None,
    regenerate: Annotated[
        int, typer.Option(min=0, help="Longest reply that the target writes itself; 0 learns the data's.")
    ] = 0,
    dtype: Annotated[
        str, typer.Option(help="Of the target: float32, bfloat16, float16; auto is bfloat16 on a GPU.")
    ] = "auto",
    start: Start = None,
    minutes: Minutes = None,
    steps: Steps = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences that a process reads at once.")] = 8,
    accumulate: Annotated[int, typer.Option(min=1, help="So many batches make a step.")] = 1,
    seed: TrainingSeed = 0,
    threads: Threads = None,
    resume: Resume = False,
    log_dir: Annotated[Path | None, typer.Option(help="Folder for tensorboard.", show_default=False)] = None,
    as_json: AsJson = False,
) -> None:
    """Train a drafter for a model, which runs along and stays as it is.

    Resumable; writes a folder that `drafter=` and `--drafter` take.

    Example:
        mmspec train drafter --target llava-hf/llava-1.5-7b-hf --data my.jsonl --method flash
        mmspec train drafter --target assets/scenes-llava --out my-flash --method flash:block=10:bias_rank=64
        mmspec train drafter --target assets/scenes-llamagen --out my-eagle --minutes 8
        mmspec train drafter --target assets/scenes-llamagen --out my-eagle --minutes 8 --resume
        mmspec train drafter --target my-llamagen --out my-eagle --data images.jsonl --minutes 60
    """
    from mmspec.cli.choice import parse_options
    from mmspec.training.drafter import train_drafter
    from mmspec.training.methods import METHODS

    name, settings = parse_options("method", method)
    folder = train_drafter(
        target,
        out or Path(f"{Path(target).name}-{name}"),
        method=name,
        settings=settings,
        data=data,
        max_length=max_length,
        regenerate=regenerate,
        dtype=dtype,
        start=start,
        minutes=minutes,
        steps=steps,
        batch_size=batch_size,
        accumulate=accumulate,
        seed=seed,
        threads=threads,
        resume=resume,
        log_dir=log_dir,
    )
    _report(folder, as_json, method=method, seed=seed)
    if not as_json:
        note(f"use it: --accelerator {METHODS[name].accelerator} --drafter {folder}")
