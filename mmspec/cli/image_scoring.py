"""Options, networks, reference and report of `mmspec evaluate images`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mmspec.cli.console import note, print_result
from mmspec.cli.loading import check_device
from mmspec.cli.options import ModelOptions
from mmspec.errors import CheckpointError, InputError
from mmspec.open_types import Json, Keywords

if TYPE_CHECKING:
    from mmspec.evaluation.quality.image_folder import ImageSet
    from mmspec.evaluation.quality.reference_statistics import Reference

__all__ = ["SCENES", "Scoring", "Session", "report"]

SCENES = "scenes"
CLIP = "openai/clip-vit-base-patch16"


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """Options for the metrics, the networks and the reference."""

    against: Annotated[
        str | None,
        typer.Option(
            help="Reference of distances: scenes, a folder of images, a .safetensors file of --cache, "
            "an .npz file with images (arr_0) or with mu and sigma of features, or an accelerator, which "
            "runs with other seeds.",
            show_default="scenes, for their captions",
        ),
    ] = None
    metrics: Annotated[
        str | None,
        typer.Option(
            help="Some of fid, kid, precision_recall, density_coverage, inception_score, clip_score, "
            "attributes; entropy and diversity are always included.",
            show_default="all that can be computed, except clip_score",
        ),
    ] = None
    features: Annotated[
        str,
        typer.Option(help="Network: scenes, inception, dinov2, clip, or a vision model's folder or hub id."),
    ] = SCENES
    clip: Annotated[str, typer.Option(help="CLIP model for clip_score: folder or hub id.")] = CLIP
    cache: Annotated[
        Path | None,
        typer.Option(help="Cache folder for reference features.", show_default="~/.cache/mmspec/statistics"),
    ] = None


class Session:
    """The networks and the reference of one run; `left_out` has the reason for each metric that is skipped.

    Args:
        scoring, how: options of the command.
        metrics, named: the metrics, and whether the user chose them.
        source: the model or folder, which may have its own `reader/`.
    """

    def __init__(
        self, scoring: Scoring, how: ModelOptions, metrics: Sequence[str], named: bool, source: str
    ) -> None:
        import torch

        from mmspec.evaluation.quality.attributes import AttributeJudge, scenes_network
        from mmspec.evaluation.quality.feature_network import load_network
        from mmspec.evaluation.quality.image_scores import Scorer, clip_scorer

        device = "cuda" if torch.cuda.is_available() else "cpu"
        if how.device not in (None, "auto"):
            device = str(how.device)
            check_device(device)
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
        of_scenes: bool,
        objects: int | None = None,
        is_drawn: bool = False,
    ) -> Reference | None:
        """Select the metrics and read the reference, before any image is generated.

        Args:
            count, size, prompts: number, size and prompts of the images.
            of_scenes: True if the prompts are those of rendered scenes, which are then the default reference.
            objects: number of objects in the scenes of the reference; None for any.
            is_drawn: True if the reference will be generated.

        Returns:
            The reference; None without distances, or if the reference will be generated.
        """
        from mmspec.evaluation.quality import image_folder, image_scores, reference_statistics

        against = self.scoring.against
        if against is None and of_scenes and image_folder.has_scenes(size):
            against = SCENES
        for metric in list(self.metrics):
            lacks = image_scores.missing_for(
                metric, count, self.network, has_reference=against is not None, prompts=prompts
            )
            if lacks is not None and self.named:
                raise InputError(f"--metrics {metric}", f"{count} images", f"needs {lacks}")
            if lacks is not None:
                self._leave_out(metric, lacks)
        if against is None or is_drawn or not set(self.metrics) & {*image_scores.DISTANCES}:
            return None
        if against.endswith(".safetensors"):
            reference = reference_statistics.read_statistics(Path(against), self.network)
        elif against.endswith(".npz"):
            reference = self._published(Path(against), count)
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

    def _published(self, path: Path, count: int) -> Reference:
        """Read a published reference, and skip the metrics that cannot be computed from it."""
        from mmspec.evaluation.quality import image_scores, reference_statistics

        cache = self.scoring.cache or reference_statistics.DEFAULT_CACHE
        reference = reference_statistics.read_published(path, self.network, count, cache)
        for metric in [name for name in self.metrics if name in image_scores.DISTANCES and name != "fid"]:
            if reference.features is None:
                lacks = f"{count} images of the reference, but {path.name} has fewer, or only mu and sigma"
                if self.named:
                    raise InputError(f"--metrics {metric}", str(path), f"needs {lacks}")
                self._leave_out(metric, lacks)
        if reference.moments is not None:
            note(f"fid uses mu and sigma of {path.name}, which does not state the number of images")
        return reference

    def score(self, images: ImageSet, reference: Reference | None) -> Json:
        """Score a set of images."""
        from mmspec.evaluation.quality.image_scores import score_images

        return dict(score_images(images, reference, self.metrics, self.scorer))

    def _leave_out(self, metric: str, lacks: str) -> None:
        self.metrics.remove(metric)
        self.left_out[metric] = f"needs {lacks}"
        note(f"{metric} is skipped: it needs {lacks}")


def report(
    session: Session,
    scores: dict[str, Json],
    reference: Reference | None,
    count: int,
    sampling: Keywords | None = None,
) -> None:
    """Print the figures: one row per metric, one column per set of images."""
    from mmspec.evaluation.quality.intervals import jsonable
    from mmspec.evaluation.tables import figures

    about, against = session.network.described, None if reference is None else reference.label
    settings = {"n": count, "seed": session.seed, "features": about["network"]}
    settings |= {"weights": about["weights"][:16], "against": against, **(sampling or {})}
    names = list(next(iter(scores.values())))
    rows = [[name, *(shown(row[name]) for row in scores.values())] for name in names]
    caption = f"value [95 % interval]; features of {about['network']!r}, width {session.network.width}"
    if about["network"] == SCENES:
        caption += ", a small network trained on scenes only: compare within this table"
    title = f"{count} images" + ("" if against is None else f", against {against}")
    table = figures(("", *scores), rows, title=title, caption=caption, caption_justify="left")
    found = [{"images": label} | jsonable(row) for label, row in scores.items()]
    value = {"settings": settings, "left_out": session.left_out, "rows": found}
    print_result(value, table, session.as_json)


def shown(value: object) -> str:
    """A figure as text, with its interval if it has one."""
    return f"{value:.1f}" if isinstance(value, float) else str(value)
