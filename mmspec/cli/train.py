"""`mmspec train`: the reference models, made again or anew, and drafters for any model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from mmspec.cli.console import note, print_result
from mmspec.cli.options import AsJson, unpack_options

__all__ = ["train_app"]

Out = Annotated[Path, typer.Option(help="Folder to write.")]
Size = Annotated[str, typer.Option(help="base or tiny.")]
Start = Annotated[
    Path | None, typer.Option("--from", help="Trained folder to begin with.", show_default=False)
]
Height = Annotated[
    int | None, typer.Option(help="Pixels of images that the target draws.", show_default="the model's own")
]
Width = Annotated[
    int | None, typer.Option(help="Pixels of images that the target draws.", show_default="the model's own")
]
ComparingReader = Annotated[
    Path | None, typer.Option(help="Trained reader whose features are compared too.", show_default=False)
]

train_app = typer.Typer(help="Train models.", no_args_is_help=True)


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """Options of every training; None leaves the choice to the trainer."""

    minutes: Annotated[
        float | None, typer.Option(min=0.0, help="Length of the training.", show_default=False)
    ] = None
    steps: Annotated[
        int | None, typer.Option(min=1, help="Length in steps instead; reproducible.", show_default=False)
    ] = None
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Examples that a process reads at once.", show_default=False)
    ] = None
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights and examples.")] = 0
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads; torch's choice if not given.", show_default=False)
    ] = None
    resume: Annotated[bool, typer.Option("--resume", help="Go on from an interrupted run.")] = False
    as_json: AsJson = False

    @property
    def plan(self) -> dict[str, Any]:
        """The keywords of a trainer that are given, see `RunOptions`."""
        return {name: value for name, value in vars(self).items() if value is not None and name != "as_json"}

    def report(self, folder: Path, hint: str | None = None, **record: str) -> None:
        """Print the folder and a hint, a command that takes it; or the folder and its record as JSON."""
        print_result({"folder": str(folder), **record, "seed": self.seed}, str(folder), self.as_json)
        if hint is not None and not self.as_json:
            note(f"{hint} {folder}")


@train_app.callback()
def _group() -> None:
    """Train models; several GPUs, also with FSDP 2, through `accelerate launch -m mmspec train ...`."""


@train_app.command()
@unpack_options
def vlm(
    out: Out,
    size: Annotated[
        str, typer.Option(help="base, small (the draft model), hybrid (layout of Qwen3.5) or tiny.")
    ] = "base",
    tower_from: Annotated[
        Path | None,
        typer.Option(help="Trained folder whose vision tower is taken over and frozen.", show_default=False),
    ] = None,
    *,
    training: TrainingOptions,
) -> None:
    """Train a reference vision-language model on scenes.

    Resumable; writes an ordinary transformers folder. By default it takes
    56 minutes, 32 examples at once.

    Example:
        mmspec train vlm --out my-scenes-llava --minutes 40
        mmspec train vlm --out my-scenes-llava --minutes 40 --resume
    """
    from mmspec.reference.training.vlm import train_vlm

    folder = train_vlm(out, size=size, tower_from=tower_from, **training.plan)
    training.report(folder, "score it: mmspec evaluate vlm", size=size)


@train_app.command()
@unpack_options
def reader(out: Out, start: Start = None, size: Size = "base", *, training: TrainingOptions) -> None:
    """Train the reader of attributes that judges drawn images, on real scenes only.

    By default it takes 10 minutes, 64 examples at once.

    Example:
        mmspec train reader --out my-reader --minutes 18
    """
    from mmspec.reference.training.reader import train_reader

    training.report(train_reader(out, start=start, size=size, **training.plan), size=size)


@train_app.command()
@unpack_options
def vq(
    out: Out,
    reader: ComparingReader = None,
    start: Start = None,
    size: Size = "base",
    *,
    training: TrainingOptions,
) -> None:
    """Train an image tokenizer: 64 x 64 pixels to 16 x 16 tokens.

    By default it takes 25 minutes, 16 examples at once.

    Example:
        mmspec train vq --out my-vq --reader my-reader --minutes 9
    """
    from mmspec.reference.training.vq import train_vq

    training.report(train_vq(out, reader=reader, start=start, size=size, **training.plan), size=size)


@train_app.command()
@unpack_options
def autoencoder(
    out: Out,
    reader: ComparingReader = None,
    start: Start = None,
    size: Size = "base",
    *,
    training: TrainingOptions,
) -> None:
    """Train a KL autoencoder: 64 x 64 pixels to 16 x 16 continuous tokens.

    Resumable; writes a folder that diffusers' AutoencoderKL loads. By default
    it takes 20 minutes, 8 examples at once.

    Example:
        mmspec train autoencoder --out my-vae --reader my-reader --minutes 20
        mmspec train autoencoder --out my-vae --reader my-reader --minutes 20 --resume
    """
    from mmspec.reference.training.autoencoder import train_autoencoder

    folder = train_autoencoder(out, reader=reader, start=start, size=size, **training.plan)
    training.report(folder, size=size)


@train_app.command()
@unpack_options
def latents(
    out: Out,
    vae: Annotated[Path, typer.Option(help="Trained autoencoder (mmspec train autoencoder).")],
    kind: Annotated[str, typer.Option(help="nextstep, given a prompt, or mar, given a class.")] = "nextstep",
    reader: Annotated[
        Path | None,
        typer.Option(help="Trained reader to put beside the model, for evaluation.", show_default=False),
    ] = None,
    start: Start = None,
    size: Size = "base",
    target: Annotated[
        Path | None,
        typer.Option(help="Model that a --size draft drafts for.", show_default=False),
    ] = None,
    *,
    training: TrainingOptions,
) -> None:
    """Train a model of continuous image tokens on the latents of scenes: a NextStep or a MAR.

    Writes a folder with the model and its autoencoder.
    By default it takes 90 minutes, 16 examples at once.

    Example:
        mmspec train latents --out my-nextstep --vae my-vae --minutes 150
        mmspec train latents --out my-draft --vae my-vae --size draft --target my-nextstep --minutes 20
    """
    from mmspec.reference.training.latent_images import train_latent_model

    own: dict[str, Any] = {"kind": kind, "reader": reader, "start": start, "size": size, "target": target}
    made = train_latent_model(out, vae, **own, **training.plan)
    training.report(made, size=size)


@train_app.command()
@unpack_options
def image(
    out: Out,
    vq: Annotated[Path, typer.Option(help="Trained image tokenizer.")],
    reader: Annotated[
        Path | None,
        typer.Option(help="Trained reader to put beside the model, for evaluation.", show_default=False),
    ] = None,
    condition: Annotated[str, typer.Option(help="caption, or class (48 labels).")] = "caption",
    start: Start = None,
    size: Annotated[str, typer.Option(help="base, long (32 x 32 tokens) or tiny.")] = "base",
    *,
    training: TrainingOptions,
) -> None:
    """Train a LlamaGen on the tokens of scenes, and its text encoder with it.

    Writes a folder with transformer, text encoder, tokenizer and image tokenizer.
    By default it takes 75 minutes, 16 examples at once.

    Example:
        mmspec train image --out my-scenes --vq my-vq --reader my-reader
        mmspec train image --out my-classes --vq my-vq --condition class --from my-scenes --minutes 8
    """
    from mmspec.reference.training.image import train_image

    folder = train_image(out, vq, reader=reader, condition=condition, start=start, size=size, **training.plan)
    training.report(folder, "score it: mmspec evaluate image", size=size)


@train_app.command()
@unpack_options
def drafter(
    target: Annotated[str, typer.Option(help="Folder or hub id of the model that it drafts for.")],
    out: Annotated[
        Path | None, typer.Option(help="Folder to write.", show_default="named after target and method")
    ] = None,
    method: Annotated[
        str,
        typer.Option(
            help="cjd, dflash, dspark, eagle, eagle3, flash, hydra, medusa, msd, mtp, specvlm, ssd or "
            "vispec; with settings: flash:block=10."
        ),
    ] = "eagle",
    data: Annotated[
        Path | None,
        typer.Option(
            help="Conversations with images: JSONL, or LLaVA's JSON. For image models a JSONL file of "
            "images: image, and prompt or class; cjd and ssd need none. Scenes if not given.",
            show_default=False,
        ),
    ] = None,
    height: Height = None,
    width: Width = None,
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
    accumulate: Annotated[int, typer.Option(min=1, help="So many batches make a step.")] = 1,
    log_dir: Annotated[Path | None, typer.Option(help="Folder for tensorboard.", show_default=False)] = None,
    *,
    training: TrainingOptions,
) -> None:
    """Train a drafter for a model, which runs along and stays as it is.

    Resumable; writes a folder that `drafter=` and `--drafter` take. By default
    it takes 10 minutes, 8 examples at once.

    Example:
        mmspec train drafter --target llava-hf/llava-1.5-7b-hf --data my.jsonl --method flash
        mmspec train drafter --target assets/scenes-llava --out my-flash --method flash:block=10:bias_rank=64
        mmspec train drafter --target assets/scenes-llamagen --out my-eagle --minutes 8
        mmspec train drafter --target assets/scenes-llamagen --out my-eagle --minutes 8 --resume
        mmspec train drafter --target my-llamagen --out my-eagle --data images.jsonl --minutes 60
        mmspec train drafter --target deepseek-ai/Janus-Pro-7B --method cjd --data prompts.jsonl --minutes 600
    """
    from mmspec.cli.choice import parse_options
    from mmspec.errors import InputError
    from mmspec.pipelines.drafter_prompts import ImagePrompts
    from mmspec.reference.training.drafter_data import scene_data
    from mmspec.training.drafter import train_drafter
    from mmspec.training.methods import METHODS, check_method

    name, settings = parse_options("method", method)
    check_method(name, settings)
    source: Any = data or scene_data
    if data is not None and METHODS[name].record.of_images:
        source = ImagePrompts(data, height, width)
    elif (height, width) != (None, None):
        raise InputError("height, width", (height, width), "nothing, unless the target draws the images")
    folder = train_drafter(
        target,
        out or Path(f"{Path(target).name}-{name}"),
        method=name,
        settings=settings,
        data=source,
        max_length=max_length,
        regenerate=regenerate,
        dtype=dtype,
        start=start,
        accumulate=accumulate,
        log_dir=log_dir,
        **training.plan,
    )
    training.report(folder, f"use it: --accelerator {METHODS[name].accelerator} --drafter", method=method)
