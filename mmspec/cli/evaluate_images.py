"""`mmspec evaluate images`: quality and variety of images, from folders or drawn by a model."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmspec.cli.choice import parse_choice, parse_choices
from mmspec.cli.console import note, print_result, progress
from mmspec.cli.loading import REFERENCE_IMAGE, load_pipeline, reference_model, with_drafter
from mmspec.cli.options import GuidanceScale, HeadSteps, Model, ModelOptions, unpack_options
from mmspec.errors import CheckpointError, InputError
from mmspec.validation import given_of

if TYPE_CHECKING:
    from mmspec.evaluation.quality.image_folder import Asked, ImageSet
    from mmspec.evaluation.quality.reference_statistics import Reference

__all__ = ["images"]

SAMPLES = 200  # more than the features of the network of scenes
SCENES = "scenes"
REFERENCE = "reference"
CLIP = "openai/clip-vit-base-patch16"


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """Options that say what is measured, and with what."""

    against: Annotated[
        str | None,
        typer.Option(
            help="What distances are to: scenes, a folder of images, a .safetensors file that --cache wrote, "
            "or an accelerator, which draws with other seeds.",
            show_default="scenes",
        ),
    ] = None
    metrics: Annotated[
        str | None,
        typer.Option(
            help="Of fid, kid, precision_recall, density_coverage, inception_score, clip_score, attributes; "
            "entropy and diversity always come along.",
            show_default="all that can be computed here but clip_score",
        ),
    ] = None
    features: Annotated[
        str,
        typer.Option(help="Network: scenes, inception, dinov2, clip, or a vision model's folder or hub id."),
    ] = SCENES
    clip: Annotated[str, typer.Option(help="CLIP for clip_score: folder or hub id.")] = CLIP
    cache: Annotated[
        Path | None,
        typer.Option(help="Folder for reference features.", show_default="~/.cache/mmspec/statistics"),
    ] = None


@unpack_options
def images(
    model: Model = None,
    accelerator: Annotated[
        str | None,
        typer.Option(
            "--accelerator",
            "--accelerators",
            help="Who draws; several with commas between.",
            show_default="none",
        ),
    ] = None,
    folder: Annotated[
        Path | None, typer.Option(help="Score the images in this folder.", show_default=False)
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="Prompts, a line each, in the order of the images.", show_default=False),
    ] = None,
    n: Annotated[
        int | None, typer.Option(min=3, help="How many images.", show_default="200; all in a folder")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Keep what is drawn, in a folder for each accelerator.", show_default=False),
    ] = None,
    guidance_scale: GuidanceScale = None,
    num_inference_steps: HeadSteps = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Images drawn together.")] = 16,
    *,
    scoring: Scoring,
    how: ModelOptions,
) -> None:
    """Score images: distances to others, agreement with prompts, entropy and diversity.

    Images come from a folder, or are drawn by a model with each of the named
    accelerators, by default from captions of held-out scenes. Sets are compared
    at equal numbers and sizes only. Every figure has a 95 % interval.

    The network "scenes" has seen scenes only: compare its figures with one
    another. Published figures are made with --features inception.

    Example:
        mmspec evaluate images --accelerator none,sjd,lantern --n 32
        mmspec evaluate images --folder drawn/sjd --against drawn/none
    """
    from mmspec.evaluation.quality.feature_network import check_network_name
    from mmspec.evaluation.quality.image_folder import draw_images, read_images, read_prompts
    from mmspec.evaluation.quality.image_methods import REFERENCE_SEEDS
    from mmspec.evaluation.quality.image_scores import chosen_metrics
    from mmspec.evaluation.quality.reference_statistics import reference_of
    from mmspec.evaluation.quality.set_distances import check_torchmetrics
    from mmspec.evaluation.speed.bench_record import merge_stats
    from mmspec.pipelines import ImageGenerationPipeline

    check_torchmetrics()
    metrics, named = chosen_metrics(scoring.metrics)
    check_network_name(scoring.features)
    asked = None if prompts is None else read_prompts(prompts)
    if folder is not None:
        if model is not None or accelerator is not None or out is not None:
            raise InputError("--folder", str(folder), "either a folder, or a model that draws")
        found = with_prompts(read_images(folder, n), asked)
        session = Session(scoring, how, metrics, named, str(folder))
        reference = session.reference(len(found.images), found.size, found.prompts)
        report(session, {found.label: session.score(found, reference)}, reference, len(found.images))
        return
    choices = parse_choices(accelerator or "none")
    against = scoring.against
    rival = parse_choice(str(against)) if is_accelerator(against) else None
    source = model or reference_model(REFERENCE_IMAGE)
    choices = [with_drafter(choice, source, how.drafter) for choice in choices]
    rival = rival and with_drafter(rival, source, how.drafter)
    check_empty(out)
    session = Session(scoring, how, metrics, named, source)
    pipe = load_pipeline(ImageGenerationPipeline, source, how)
    subjects = subjects_of(pipe, asked, n, how.seed)
    size = (pipe.target.grid.columns * pipe.stride, pipe.target.grid.rows * pipe.stride)
    objects = 1 if pipe.target.vector_size and "class_labels" in subjects[0][1] else None
    words = [prompt for prompt, _ in subjects]
    reference = session.reference(len(subjects), size, words, objects=objects, is_drawn=rival is not None)
    sampling = given_of(guidance_scale=guidance_scale, num_inference_steps=num_inference_steps)
    draw: dict[str, Any] = {"batch_size": batch_size, "settings": sampling}
    scores: dict[str, dict[str, Any]] = {}
    with kept(out) as where, progress(quiet=how.as_json) as bar:
        work = bar.add_task("drawing", total=(len(choices) + (rival is not None)) * len(subjects))
        draw["on_images"] = lambda count: bar.advance(work, count)
        if rival is not None:  # other seeds: what draws alike would have a distance of exactly 0
            pipe.set_accelerator(rival.name, **rival.options)
            draw_images(pipe, subjects, where / REFERENCE, seed=how.seed + REFERENCE_SEEDS, **draw)
            drawn = read_images(where / REFERENCE, label=f"{rival.label}, other seeds")
            reference = reference_of(drawn.label, drawn.images, session.network, None)
        for choice in choices:
            bar.update(work, description=choice.label)
            pipe.set_accelerator(choice.name, **choice.options)
            place = where / folder_name(choice.label)
            stats = merge_stats(draw_images(pipe, subjects, place, seed=how.seed, **draw))
            drawn = read_images(place, label=choice.label)
            figures = {"promise": stats.exactness, "forwards per image": stats.nfe_mean}
            scores[choice.label] = figures | session.score(drawn, reference)
    report(session, scores, reference, len(subjects), pipe.sampling(sampling))


class Session:
    """The networks and the reference of one run.

    Args:
        scoring, how: options of the command.
        metrics, named: what is measured, and whether the user said so.
        source: the model or folder, in which a reader of its own may lie.

    Attributes:
        left_out: metrics that cannot be computed here, and what they lack.
    """

    def __init__(
        self, scoring: Scoring, how: ModelOptions, metrics: Sequence[str], named: bool, source: str
    ) -> None:
        import torch

        from mmspec.evaluation.quality.feature_network import load_network
        from mmspec.evaluation.quality.image_scores import Scorer, clip_scorer
        from mmspec.reference.scoring.attributes import AttributeJudge
        from mmspec.reference.scoring.scenes_network import scenes_network

        self.scoring, self.seed, self.metrics, self.named = scoring, how.seed, list(metrics), named
        self.as_json, self.left_out = how.as_json, dict[str, str]()
        judge: AttributeJudge | None = None
        if scoring.features == SCENES or "attributes" in metrics:
            try:
                judge = AttributeJudge.of_model(source)
            except CheckpointError:
                if scoring.features == SCENES or named:
                    raise
                self._leave_out("attributes", "a reader of scenes")
        device = how.device or ("cuda" if torch.cuda.is_available() else "cpu")
        if scoring.features == SCENES and judge is not None:
            judge.reader.to(device)
            self.network = scenes_network(judge)
        else:
            self.network = load_network(scoring.features, device)
        clip = clip_scorer(scoring.clip, device) if "clip_score" in metrics else None
        self.scorer = Scorer(self.network, judge, clip)

    def reference(
        self,
        count: int,
        size: tuple[int, int],
        prompts: Sequence[str] | None,
        *,
        objects: int | None = None,
        is_drawn: bool = False,
    ) -> Reference | None:
        """Settle what is measured, and read what images are compared with; before anything is drawn.

        Args:
            count: of images.
            size: of them.
            prompts: of each, or None.
            objects: in scenes that they are compared with; None is any number.
            is_drawn: the reference will be drawn.

        Returns:
            None where distances are left out, or the reference will be drawn.

        Raises:
            InputError: a metric that was named cannot be computed; or the reference cannot be read, has
                fewer images, or is of another size.
        """
        from mmspec.evaluation.quality import image_folder, image_scores, reference_statistics

        against = self.scoring.against
        if against is None and image_folder.shows_scenes(size, prompts):
            against = SCENES
        for metric in list(self.metrics):
            lacks = image_scores.missing_for(
                metric, count, self.network, has_reference=against is not None, prompts=prompts
            )
            if lacks is not None and self.named:
                raise InputError(f"--metrics {metric}", f"{count} images", f"it needs {lacks}")
            if lacks is not None:
                self._leave_out(metric, lacks)
        if against is None or is_drawn or not set(self.metrics) & {*image_scores.DISTANCES}:
            return None
        if against.endswith(".safetensors"):
            reference = reference_statistics.read_statistics(Path(against), self.network)
        else:
            if against == SCENES:
                shown = image_folder.real_scenes(count, size, self.seed, objects=objects)
                found = image_folder.ImageSet(SCENES, shown)
            else:
                found = image_folder.read_images(against, count)
            cache = self.scoring.cache or reference_statistics.DEFAULT_CACHE
            reference = reference_statistics.reference_of(found.label, found.images, self.network, cache)
            note(f"reference features {'read from' if reference.cached else 'written to'} {reference.path}")
        reference.check(count, size)
        return reference

    def score(self, images: ImageSet, reference: Reference | None) -> dict[str, Any]:
        """Figures of a set."""
        from mmspec.evaluation.quality.image_scores import score_images

        return dict(score_images(images, reference, self.metrics, self.scorer))

    def _leave_out(self, metric: str, lacks: str) -> None:
        self.metrics.remove(metric)
        self.left_out[metric] = f"needs {lacks}"
        note(f"{metric} is left out: it needs {lacks}")


def is_accelerator(against: str | None) -> bool:
    """True for what is neither scenes, nor a file of statistics, nor a folder."""
    return against not in (None, SCENES) and not (
        str(against).endswith(".safetensors") or "/" in str(against) or Path(str(against)).is_dir()
    )


def with_prompts(images: ImageSet, prompts: list[str] | None) -> ImageSet:
    """The images with prompts of a file, if there is one.

    Raises:
        InputError: fewer prompts than images.
    """
    if prompts is None:
        return images
    if len(prompts) < len(images.images):
        count = len(images.images)
        raise InputError("--prompts", f"{len(prompts)} prompts", f"one for each of the {count} images")
    return replace(images, prompts=prompts[: len(images.images)])


def subjects_of(pipe: Any, prompts: list[str] | None, n: int | None, seed: int) -> list[Asked]:
    """What is drawn: the user's prompts, in turn, or captions or classes of scenes."""
    from mmspec.evaluation.image_contender import image_subjects

    if prompts is None:
        return list(image_subjects(pipe, n or SAMPLES, seed).items())
    return [
        (prompts[i % len(prompts)], {"prompt": prompts[i % len(prompts)]}) for i in range(n or len(prompts))
    ]


def check_empty(out: Path | None) -> None:
    """Raise InputError where there is something in the way of new images."""
    if out is not None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError("--out", str(out), "a new or empty folder: images of two runs are never mixed")


@contextmanager
def kept(out: Path | None) -> Iterator[Path]:
    """The folder to draw into; a temporary one where none is named."""
    if out is not None:
        yield out
        return
    with tempfile.TemporaryDirectory(prefix="mmspec-") as folder:
        yield Path(folder)


def folder_name(label: str) -> str:
    """An accelerator with its options as the name of a folder."""
    return "".join(letter if letter.isalnum() or letter in "=.-_" else "," for letter in label)


def report(
    session: Session,
    scores: dict[str, dict[str, Any]],
    reference: Reference | None,
    count: int,
    sampling: dict[str, Any] | None = None,
) -> None:
    """Print the figures: a row for each, a column for each set of images."""
    from mmspec.evaluation.quality.intervals import Estimate
    from mmspec.evaluation.tables import figures

    about = session.network.described
    settings = {
        "n": count,
        "seed": session.seed,
        "features": about["network"],
        "weights": about["weights"][:16],
    }
    settings |= {"against": None if reference is None else reference.label, **(sampling or {})}
    names = list(next(iter(scores.values())))
    rows = [[name, *(shown(row[name]) for row in scores.values())] for name in names]
    caption = f"value [95 % interval]; features of {about['network']!r}, {session.network.width} of them"
    if about["network"] == SCENES:
        caption += ", a small network that knows scenes only: compare within this table"
    title = f"{count} images" + ("" if reference is None else f", against {reference.label}")
    table = figures(("", *scores), rows, title=title, caption=caption, caption_justify="left")
    value = {
        "settings": settings,
        "left_out": session.left_out,
        "rows": [
            {"images": label}
            | {name: vars(one) if isinstance(one, Estimate) else one for name, one in row.items()}
            for label, row in scores.items()
        ],
    }
    print_result(value, table, session.as_json)


def shown(value: Any) -> str:
    """A figure with its interval, or a word."""
    return f"{value:.1f}" if isinstance(value, float) else str(value)
