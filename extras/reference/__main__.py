"""`python -m extras.reference`: train and score models of the families of mmspec-extras."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from mmspec.cli import run
from mmspec.cli.console import print_result
from mmspec.cli.options import AsJson, Model, unpack_options
from mmspec.cli.train import TrainingOptions
from mmspec.errors import InputError
from mmspec_extras.cppd import CPPDConfig
from reference.evaluate import Seed
from reference.train import LLAMAGEN, BegunWith, Out

train_app = typer.Typer(help="Train models.", no_args_is_help=True)
DIFFUSION = Path("assets/scenes-diffusion")

evaluate_app = typer.Typer(help="Score models.", no_args_is_help=True)
app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
app.add_typer(train_app, name="train")
app.add_typer(evaluate_app, name="evaluate")


@evaluate_app.callback()
def _evaluate() -> None:
    """Score models."""


@train_app.command()
@unpack_options
def coarse(
    out: Out,
    start: BegunWith = LLAMAGEN,
    clusters: Annotated[int, typer.Option(min=1, help="Number of coarse tokens.")] = 128,
    refiner_layers: Annotated[int, typer.Option(min=1, help="Layers of the refiner.")] = 4,
    *,
    training: TrainingOptions,
) -> None:
    """Train a LlamaGen of coarse tokens, and the refiner that predicts the fine ones (CTF).

    Resumable; writes a folder with transformer, text encoder, tokenizer and
    image tokenizer. By default it takes 30 minutes, in batches of 16.

    Example:
        python -m extras.reference train coarse --from assets/scenes-llamagen --out my-scenes-coarse
    """
    from extras.reference.coarse import train_coarse

    folder = train_coarse(out, start=start, clusters=clusters, refiner_layers=refiner_layers, **training.plan)
    training.report(folder, "score it: python -m reference evaluate image")


@train_app.command()
@unpack_options
def clips(
    out: Out,
    start: BegunWith = LLAMAGEN,
    frames: Annotated[int, typer.Option(min=2, help="Frames of a clip.")] = 5,
    *,
    training: TrainingOptions,
) -> None:
    """Train a LlamaGen to draw clips, a row of a frame in each forward pass (NBP).

    Resumable; writes a folder with transformer, text encoder, tokenizer and
    image tokenizer. By default it takes 60 minutes, in batches of 4 clips.

    Example:
        python -m extras.reference train clips --from assets/scenes-llamagen --out my-scenes-clips
    """
    from extras.reference.clips import train_clips

    folder = train_clips(out, start=start, frames=frames, **training.plan)
    training.report(folder, "score it: python -m extras.reference evaluate clips")


@train_app.command()
@unpack_options
def trajectories(
    out: Out,
    start: Annotated[Path, typer.Option("--from", help="The trained diffusion model.")] = DIFFUSION,
    denoising_steps: Annotated[int, typer.Option(min=1, help="Forward passes per block.")] = 2,
    plain: Annotated[
        bool, typer.Option("--plain", help="Learn from masked blocks alone, as plain GRPO does.")
    ] = False,
    *,
    training: TrainingOptions,
) -> None:
    """Train a diffusion model on the states of its own decoding (CJ-GRPO).

    Resumable; writes a transformers folder. By default it takes 30 minutes, with 4 scenes per step.

    Example:
        python -m extras.reference train trajectories --out my-scenes-diffusion
    """
    from extras.reference.trajectories import train_trajectories

    decoding: dict[str, Any] = {"denoising_steps": denoising_steps, "is_plain": plain}
    folder = train_trajectories(out, start=start, **decoding, **training.plan)
    training.report(folder, "score it: python -m reference evaluate diffusion")


@train_app.command()
@unpack_options
def axial(
    out: Out,
    start: BegunWith = LLAMAGEN,
    outer_layers: Annotated[int, typer.Option(min=1, help="Layers that run once per row.")] = 6,
    inner_layers: Annotated[int, typer.Option(min=1, help="Layers that run once per token.")] = 2,
    *,
    training: TrainingOptions,
) -> None:
    """Train an axial transformer: an outer stack over rows, an inner one within a row.

    Resumable; writes a folder with transformer, text encoder, tokenizer and
    image tokenizer. By default it takes 30 minutes, in batches of 16.

    Example:
        python -m extras.reference train axial --from assets/scenes-llamagen --out my-scenes-axial
    """
    from extras.reference.axial import train_axial

    layers = {"outer_layers": outer_layers, "inner_layers": inner_layers}
    folder = train_axial(out, start=start, **layers, **training.plan)
    training.report(folder, "score it: python -m reference evaluate image")


@train_app.command()
@unpack_options
def distilled(
    out: Out,
    start: BegunWith = LLAMAGEN,
    queries: Annotated[Path | None, typer.Option(help="Trained LPD that the student begins with.")] = None,
    images: Annotated[int, typer.Option(min=1, help="Images whose noise is made.")] = 1024,
    guidance_scale: Annotated[float, typer.Option(min=0.0, help="Guidance scale of the model.")] = 2.0,
    *,
    training: TrainingOptions,
) -> None:
    """Train a student that draws images of a LlamaGen in few forward passes (Distilled Decoding).

    Resumable; writes a folder with transformer, text encoder, tokenizer and
    image tokenizer. By default it takes 30 minutes after the noise is made, in batches of 16.

    Example:
        python -m extras.reference train distilled --queries assets/scenes-parallel --out my-student
    """
    from extras.reference.distilled import train_distilled

    how: dict[str, Any] = {"queries": queries, "images": images}
    how["guidance_scale"] = guidance_scale
    folder = train_distilled(out, start=start, **how, **training.plan)
    training.report(folder, "score it: mmspec evaluate images --accelerator distilled:generation_steps=4")


@train_app.command()
@unpack_options
def bands(out: Out, start: BegunWith = LLAMAGEN, *, training: TrainingOptions) -> None:
    """Train an image tokenizer of frequency bands (NFIG), which begins with that of a LlamaGen.

    Resumable; writes a folder for the `vq` of an NFIG. By default it takes 10 minutes, in batches of 16.

    Example:
        python -m extras.reference train bands --out my-nfig/vq
    """
    from extras.reference.bands import train_bands

    folder = train_bands(out, start=start, **training.plan)
    training.report(folder, "pass it as the vq of an NFIG")


@train_app.command()
@unpack_options
def words(
    out: Out,
    alphabet: Annotated[str, typer.Option(help="The characters of the words.")] = CPPDConfig.alphabet,
    longest: Annotated[int, typer.Option(min=1, max=25, help="Characters of the longest words.")] = 10,
    hidden_size: Annotated[int, typer.Option(min=4, help="Width of the model.")] = 128,
    *,
    training: TrainingOptions,
) -> None:
    """Train CPPD on rendered random words, and score it on held-out ones.

    Resumable; writes a transformers folder. By default it takes 20 minutes, with 32 words per step.

    Example:
        python -m extras.reference train words --out my-cppd
    """
    from extras.reference.words import train_words

    shape: dict[str, Any] = {"alphabet": alphabet, "longest": longest, "hidden_size": hidden_size}
    training.report(train_words(out, **shape, **training.plan))


@train_app.command()
@unpack_options
def peptides(
    out: Out,
    decoders: Annotated[
        str, typer.Option(help="crossed, or parallel or autoregressive to train one alone.")
    ] = "crossed",
    hidden_size: Annotated[int, typer.Option(min=8, help="Width of the model.")] = 128,
    *,
    training: TrainingOptions,
) -> None:
    """Train CrossNovo on synthetic mass spectra of random peptides.

    Resumable; writes a transformers folder, whose training.json has the accuracy of
    each decoder. By default it takes 6 minutes, with 32 peptides per step.

    Example:
        python -m extras.reference train peptides --out my-crossnovo --steps 1200
    """
    from extras.reference.peptides import train_peptides

    training.report(train_peptides(out, decoders=decoders, hidden_size=hidden_size, **training.plan))


@evaluate_app.command("clips")
def score(
    model: Model = None,
    scenes: Annotated[int, typer.Option(min=1, help="Held-out captions.")] = 100,
    seed: Seed = 20_000,
    accelerators: Annotated[
        str, typer.Option(help="Accelerators with options; none is plain decoding.")
    ] = "none,sparse_context:context_blocks=16",
    batch_size: Annotated[int, typer.Option(min=1, help="Clips per batch.")] = 16,
    as_json: AsJson = False,
) -> None:
    """Score a model of clips on held-out prompts, frame by frame.

    Example:
        python -m extras.reference evaluate clips my-scenes-clips --scenes 100
    """
    from extras.reference.clips import score_clips
    from mmspec.evaluation.tables import figures

    if model is None:
        raise InputError("model", None, "must be a folder that `extras.reference train clips` wrote")
    names = [name.strip() for name in accelerators.split(",")]
    scores = score_clips(model, scenes, seed, accelerators=names, batch_size=batch_size)
    rows = []
    for name, found in scores.items():
        forwards = f"{found['forwards']:.0f}" if "forwards" in found else ""
        rows.append(
            (name, forwards, *(f"{share:.1%}" for share in (found["frames"][0], found["frames"][-1])))
        )
    columns = ("", "forward passes per clip", "facts in the first frame", "in the last")
    table = figures(columns, rows, title=f"{scenes} captions from seed {seed}")
    print_result({"model": model, **scores}, table, as_json)


@evaluate_app.command("bands")
def score_tokenizer(
    folder: Annotated[Path, typer.Argument(help="Folder that `train bands` wrote.")],
    start: BegunWith = LLAMAGEN,
    scenes: Annotated[int, typer.Option(min=3, help="Held-out scenes.")] = 96,
    seed: Seed = 20_000,
    as_json: AsJson = False,
) -> None:
    """Score an image tokenizer of frequency bands, beside that of a LlamaGen.

    Example:
        python -m extras.reference evaluate bands my-nfig/vq
    """
    from extras.reference.bands import score_bands
    from mmspec.evaluation.quality.intervals import jsonable
    from mmspec.evaluation.tables import figures

    scores = score_bands(folder, start, scenes, seed)
    columns = ("decoded", "squared error", "facts")
    rows = [(name, *map(str, found)) for name, found in scores.items()]
    table = figures(columns, rows, title=f"{scenes} scenes from seed {seed}")
    measured = {name: jsonable(dict(zip(columns[1:], found, strict=True))) for name, found in scores.items()}
    print_result({"folder": str(folder), **measured}, table, as_json)


if __name__ == "__main__":
    run(app)
