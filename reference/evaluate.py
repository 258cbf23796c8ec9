"""`python -m reference evaluate`: scores of the reference models on held-out scenes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from mmspec.cli.console import print_result
from mmspec.cli.loading import REFERENCE_IMAGE, reference_model
from mmspec.cli.options import AsJson, Model
from mmspec.errors import InputError

__all__ = ["evaluate_app"]

Seed = Annotated[int, typer.Option(min=0, help="Seed of the first scene.")]
Card = Annotated[bool, typer.Option("--card", help="Write figures and training to the model card.")]

THRESHOLDS = (0.99, 0.9, 0.7, 0.5)
RULES = "entropy_bound,low_confidence:denoising_steps=4,sequential:places_per_step=4"
BLOCKS = ",".join(["none,freedave:states=17", *(f"threshold:threshold={each}" for each in THRESHOLDS), RULES])

evaluate_app = typer.Typer(help="Score models.", no_args_is_help=True)


@evaluate_app.command()
def vlm(
    model: Model = None,
    scenes: Annotated[int, typer.Option(min=1, help="Number of held-out scenes.")] = 500,
    seed: Seed = 10_000,
    descriptions: Annotated[bool, typer.Option(help="Score long descriptions too (slow).")] = True,
    several: Annotated[
        bool, typer.Option(help="Score captions of pairs and clips too, for a model trained on them.")
    ] = False,
    stories: Annotated[
        bool,
        typer.Option(help="Score stories about images and descriptions too, for a model trained on replies."),
    ] = False,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts per generate call.")] = 50,
    card: Card = False,
    as_json: AsJson = False,
) -> None:
    """Score a vision-language model on held-out scenes.

    Every caption, answer and description is either right or wrong.

    Example:
        python -m reference evaluate vlm assets/scenes-llava --scenes 500
    """
    from mmspec.models.checkpoint import check_source, load_config
    from reference.vlm_scores import score_vlm

    source = model or reference_model()
    load_config(check_source(source))  # raises a short error if there is no checkpoint
    asked: dict[str, Any] = {"descriptions": descriptions, "several": several, "stories": stories}
    scores = score_vlm(source, scenes, seed, batch_size=batch_size, **asked)
    rows = []
    for name, value in scores.items():
        if isinstance(value, float) and name != "seconds":
            rows.append((name, f"{value:.1%}"))
        elif isinstance(value, dict):
            name = name.removesuffix("_by_kind")
            rows += [(f"  {name}: {part}", f"{share:.1%}") for part, share in value.items()]
    flags = "" if descriptions else " --no-descriptions"
    flags += "".join(f" --{name}" for name in ("several", "stories") if asked[name])
    _report("vlm", source, scores, ("greedy", "right"), rows, as_json, card, flags)


@evaluate_app.command()
def diffusion(
    model: Annotated[str, typer.Argument(help="Folder that `reference train diffusion` wrote.")],
    scenes: Annotated[int, typer.Option(min=1, help="Held-out scenes.")] = 32,
    seed: Seed = 20_000,
    blocks: Annotated[
        str, typer.Option(help='Accelerators for the mode of masked blocks; "" skips the mode.')
    ] = BLOCKS,
    autoregressive: Annotated[str, typer.Option(help="Accelerators for the autoregressive mode.")] = (
        "none,self_speculation:num_draft_tokens=15"
    ),
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts per batch.")] = 8,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 for greedy decoding.")] = 0.0,
    card: Card = False,
    as_json: AsJson = False,
) -> None:
    """Score a masked-block model in both of its modes, on captions and descriptions.

    Example:
        python -m reference evaluate diffusion my-scenes-diffusion --scenes 32
    """
    from mmspec.cli.loading import parse_choices
    from mmspec.evaluation.tables import figures
    from reference.cards import write_card
    from reference.diffusion_scores import aup, score_modes

    asked = {"blocks": blocks, "autoregressive": autoregressive}
    choices = {mode: parse_choices(names) for mode, names in asked.items() if names}
    scores = score_modes(model, choices, scenes, seed, batch_size=batch_size, temperature=temperature)
    rows, curve = [], []
    for row in scores["records"]:
        low, high = row["interval"] or (row["tokens_a_forward"],) * 2
        shown = f"{row['tokens_a_forward']:.2f} ({low:.2f}-{high:.2f})"
        shares = f"{row['right']:.1%}", f"{row['identical']:.1%}", f"{row['edits']:.3f}"
        label = f"{row['mode']}: {row['accelerator']}"
        rows.append((label, row["task"], row["exactness"], *shares, shown, f"{row['seconds']:.1f} s"))
        is_published = row["accelerator"].startswith("threshold") and "fallback" not in row["accelerator"]
        if row["task"] == "describe" and is_published:  # the curve compares settings of a single rule
            curve.append((row["tokens_a_forward"], 100 * row["right"]))
    scores["aup"] = aup(curve)
    columns = (
        "",
        "task",
        "promise",
        "right",
        "identical",
        "edits per token",
        "tokens per forward pass (95 %)",
        "time",
    )
    title = f"{scenes} scenes from seed {seed}, temperature {temperature:g}, AUP {scores['aup']:.0f}"
    if card:
        command = f"python -m reference evaluate diffusion {model} --scenes {scenes} --seed {seed}"
        write_card(model, title, columns, rows, command)
    print_result(scores, figures(columns, rows, title=title), as_json)


@evaluate_app.command()
def image(
    model: Model = None,
    scenes: Annotated[int, typer.Option(min=3, help="Number of held-out scenes.")] = 200,
    seed: Seed = 20_000,
    guidance_scales: Annotated[str, typer.Option(help="Guidance scales to try.")] = "1,2,3,4,5",
    batch_size: Annotated[int, typer.Option(min=1, help="Images per batch.")] = 32,
    card: Card = False,
    as_json: AsJson = False,
) -> None:
    """Score an image model of scenes on held-out prompts.

    A network that was trained on real scenes only reads the objects in the
    images. Entropy and context sensitivity show how hard the model is to
    speed up.

    Example:
        python -m reference evaluate image assets/scenes-llamagen --scenes 200
    """
    from reference.image_scores import score_image_model

    source = model or reference_model(REFERENCE_IMAGE)
    try:
        scales = [float(part) for part in guidance_scales.split(",")]
    except ValueError as error:
        raise InputError(
            "--guidance-scales", guidance_scales, "must be numbers separated by commas, such as 1,3,5"
        ) from error
    scores = score_image_model(source, scenes, seed, guidance_scales=scales, batch_size=batch_size)
    names = list(scores["real"]["by_attribute"])
    found = {f"guidance {scale}": one for scale, one in scores["guidance"].items()}
    found |= {name: scores[name] for name in ("prompts", "reconstructed", "real") if name in scores}
    rows = []
    for label, one in found.items():
        shares = [one["share"], *map(one["by_attribute"].get, names), one["exact"]]
        rows.append([label, *("" if share is None else f"{share:.1%}" for share in shares)])
    if "nats" in scores:
        caption = (
            f"entropy {scores['entropy_mean']:.2f} nats (median {scores['entropy_median']:.2f}), "
            f"TV of neighbours {scores['neighbour_tv']:.2f}, after a redraw {scores['redraw_tv']:.2f}"
        )
    else:
        caption = "kernel distance to real images: " + ", ".join(
            f"{one['kernel_distance']:.3g} +- {one['margin']:.2g} at guidance {scale}"
            for scale, one in scores["guidance"].items()
        )
    flags, columns = f" --guidance-scales {guidance_scales}", ("", "all facts", *names, "all right")
    _report("image", source, scores, columns, rows, as_json, card, flags, caption)


def _report(
    kind: str,
    source: str,
    scores: dict[str, Any],
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    as_json: bool,
    card: bool,
    flags: str,
    caption: str | None = None,
) -> None:
    """Print the scores of `evaluate <kind>`, and write them to the model's card if `card` is set."""
    from mmspec.evaluation.tables import figures
    from reference.cards import write_card

    scenes, seed = scores["scenes"], scores["seed"]
    title = f"{scenes} scenes from seed {seed}, {scores['device']}, {scores['seconds']} s"
    if card:
        command = f"python -m reference evaluate {kind} {source} --scenes {scenes} --seed {seed}{flags}"
        write_card(source, f"{title}; {caption}" if caption else title, columns, rows, command)
    print_result({"model": source, **scores}, figures(columns, rows, title=title, caption=caption), as_json)
