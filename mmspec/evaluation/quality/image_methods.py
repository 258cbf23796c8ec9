"""Comparison of image decoding methods on the same prompts and seeds: forwards saved, and quality.

Plain decoding runs twice, with two sets of seeds. The second set is what every method's images are compared
with, so the row of plain decoding shows how far apart two samples of one distribution are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import torch
from torch import Tensor

from mmspec.decoding.stats import DecodingStats, merge_stats
from mmspec.errors import InputError
from mmspec.evaluation.examples import OTHER_SEEDS
from mmspec.evaluation.plots import check_plot
from mmspec.evaluation.quality.set_distances import kernel_distance, token_entropy
from mmspec.evaluation.speed.timing import BASELINE

__all__ = [
    "Drawing",
    "Found",
    "ImageReader",
    "MethodRecord",
    "compare_methods",
    "draw_plot",
    "find_best",
    "write_records",
]

MEASURES = ("forwards", "seconds")


class ImageReader(Protocol):
    """Interface of a network that reads attributes and features from images, trained on real ones only."""

    def attribute_accuracy(self, images: Tensor, captions: Sequence[str]) -> float:
        """Share of the captions' attributes that are in the images [n, 3, H, W] in [0, 1]."""
        ...

    def features(self, images: Tensor) -> Tensor:
        """Features [n, d] of images [n, 3, H, W] in [0, 1]."""
        ...


@dataclass(frozen=True)
class Drawing:
    """One image that a method drew.

    Attributes:
        image: [3, H, W] in [0, 1].
        codes: codebook indices in raster order; None for continuous tokens.
        seconds, decode_seconds: wall-clock of the tokens, and of turning them into pixels.
        overlap: of the chains of draft and target, where it was measured.
    """

    image: Tensor
    codes: list[int] | None
    stats: DecodingStats
    seconds: float
    decode_seconds: float
    overlap: float | None = None


Draw = Callable[[str, int], Drawing]
"""(prompt, seed) -> one image, at batch 1."""


@dataclass(frozen=True)
class MethodRecord:
    """Figures of one method: a row of the table.

    Attributes:
        method: as written on the command line.
        promise: "exact", "tv<=x" (per token), "approximate" or "lossy".
        images: how many, each at batch 1.
        nfe_mean, nfe_max: target forwards per image, the prompt's own included; a guided pair is one.
        step_compression: forwards of plain decoding / nfe_mean.
        speedup, speedup_with_pixels: ratios to plain decoding of median seconds, without and with the
            decoder from tokens to pixels.
        tv_mean, tv_max: measured total variation to the target at judged places; None for exact rules.
        drift_mean, drift_max: measured distance of kept candidates to the target's own vectors, likewise.
        overlap: 1 minus the total variation between the chains of draft and target: what the best rule that
            judges whole chains accepts of first candidates; None where chains have no density.
        acceptance_rate: accepted candidates / candidates.
        rollbacks: rounds that refused a candidate, per image.
        attribute_accuracy: share of prompted attributes that the reader finds.
        feature_distance: kernel distance (KID) of the reader's features to plain decoding with other seeds;
            0 on average for equal distributions, and negative at times (see `kernel_distance`).
        feature_margin: its 95 % interval is feature_distance +- feature_margin.
        entropy: of the use of codes, in nats; None for continuous tokens.
        searched: settings that this one was the best of, on other prompts; None if it was not searched for.
        settings: of the run.
    """

    method: str
    promise: str
    images: int
    nfe_mean: float
    nfe_max: int
    step_compression: float
    acceptance_length: float
    speedup: float
    speedup_with_pixels: float
    tv_mean: float | None
    tv_max: float | None
    drift_mean: float | None
    drift_max: float | None
    overlap: float | None
    acceptance_rate: float
    rollbacks: float
    attribute_accuracy: float
    feature_distance: float
    feature_margin: float
    entropy: float | None
    searched: int | None = None
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Found:
    """The best setting of a method.

    Attributes:
        label: of the setting.
        tried: mean forwards and median seconds of an image, of every setting.
    """

    label: str
    tried: dict[str, tuple[float, float]]


def find_best(
    settings: Mapping[str, Draw],
    prompts: Sequence[str],
    *,
    by: str = "seconds",
    seed: int = 0,
    on_image: Callable[[str], None] = lambda setting: None,
) -> Found:
    """Find the best of several settings of a method, by forwards or by seconds; a single one is not drawn.

    Args:
        settings: by label.
        prompts: other ones than those that methods are compared on.
        by: "seconds" or "forwards".
        seed: prompt i is drawn with seed + i.
        on_image: called with the label after each image.

    Raises:
        InputError: no such measure.
    """
    if by not in MEASURES:
        raise InputError("best", by, " or ".join(MEASURES))
    if len(settings) == 1:
        return Found(next(iter(settings)), {})
    for draw in settings.values():
        draw(prompts[0], seed)  # warm-up
    drawn: dict[str, list[Drawing]] = {label: [] for label in settings}
    for index, prompt in enumerate(prompts):
        for label, draw in settings.items():
            drawn[label].append(draw(prompt, seed + index))
            on_image(label)
    tried = {label: (_forwards(drawings), _seconds(drawings)) for label, drawings in drawn.items()}
    return Found(min(tried, key=lambda label: tried[label][MEASURES.index(by)]), tried)


def compare_methods(
    methods: dict[str, Draw],
    prompts: Sequence[str],
    reader: ImageReader,
    *,
    seed: int = 0,
    searched: Mapping[str, int] | None = None,
    settings: dict[str, Any] | None = None,
    on_image: Callable[[str], None] = lambda method: None,
) -> Iterator[MethodRecord]:
    """Draw every prompt by every method, in turns, then compare the images.

    Args:
        methods: by label; "none" must be among them.
        prompts: at least three.
        reader: of attributes and features.
        seed: prompt i is drawn with seed + i by all methods.
        searched: how many settings a method is the best of, by label.
        settings: written into every record.
        on_image: called with the method's label after each image, for progress bars.

    Raises:
        InputError: "none" is missing, or too few prompts.
    """
    if BASELINE not in methods:
        raise InputError("accelerators", list(methods), f"a list with {BASELINE!r}, which ratios are to")
    if len(prompts) < 3:
        raise InputError("prompts", len(prompts), "at least 3, to have an interval")
    names = list(methods)
    for name in names:
        methods[name](prompts[0], seed)  # warm-up
    drawings: dict[str, list[Drawing]] = {name: [] for name in names}
    reference: list[Drawing] = []
    for index, prompt in enumerate(prompts):
        first = index % len(names)
        for name in names[first:] + names[:first]:
            drawings[name].append(methods[name](prompt, seed + index))
            on_image(name)
        reference.append(methods[BASELINE](prompt, seed + index + OTHER_SEEDS))
        on_image(BASELINE)
    features = reader.features(_pixels(reference))
    for name in names:
        record = _record(name, drawings[name], drawings[BASELINE], features, prompts, reader, settings or {})
        yield replace(record, searched=(searched or {}).get(name))


def _record(
    name: str,
    drawn: list[Drawing],
    plain: list[Drawing],
    reference: Tensor,
    prompts: Sequence[str],
    reader: ImageReader,
    settings: dict[str, Any],
) -> MethodRecord:
    stats = merge_stats([drawing.stats for drawing in drawn])
    distance, margin = kernel_distance(reader.features(_pixels(drawn)), reference)
    forwards = [drawing.stats.target_forwards for drawing in drawn]
    mean_forwards = _forwards(drawn)
    overlaps = [drawing.overlap for drawing in drawn if drawing.overlap is not None]
    codes: list[Any] = [drawing.codes for drawing in drawn]
    return MethodRecord(
        method=name,
        promise=stats.exactness,
        images=len(drawn),
        nfe_mean=mean_forwards,
        nfe_max=max(forwards),
        step_compression=sum(one.stats.target_forwards for one in plain) / len(plain) / mean_forwards,
        acceptance_length=stats.acceptance_length,
        speedup=_seconds(plain) / _seconds(drawn),
        speedup_with_pixels=_seconds(plain, pixels=True) / _seconds(drawn, pixels=True),
        tv_mean=stats.tv_mean,
        tv_max=stats.tv_max if stats.tv_places else None,
        drift_mean=stats.drift_mean,
        drift_max=stats.drift_max if stats.drift_places else None,
        overlap=sum(overlaps) / len(overlaps) if overlaps else None,
        acceptance_rate=stats.acceptance_rate,
        rollbacks=stats.rollbacks / len(drawn),
        attribute_accuracy=reader.attribute_accuracy(_pixels(drawn), prompts),
        feature_distance=distance,
        feature_margin=margin,
        entropy=None if None in codes else token_entropy(codes),
        settings=settings,
    )


def _pixels(drawings: Sequence[Drawing]) -> Tensor:
    return torch.stack([drawing.image for drawing in drawings])


def _forwards(drawings: Sequence[Drawing]) -> float:
    return sum(one.stats.target_forwards for one in drawings) / len(drawings)


def _seconds(drawings: Sequence[Drawing], *, pixels: bool = False) -> float:
    return median(one.seconds + (one.decode_seconds if pixels else 0.0) for one in drawings)


def write_records(path: str | Path, records: Sequence[MethodRecord]) -> Path:
    """Write the table as JSON: the shared settings once, then a row for each method."""
    path = Path(path)
    rows = [{key: value for key, value in asdict(record).items() if key != "settings"} for record in records]
    path.write_text(json.dumps({"settings": records[0].settings, "methods": rows}, indent=1) + "\n")
    return path


def draw_plot(path: str | Path, records: Sequence[MethodRecord]) -> Path:
    """Plot forwards saved and kernel distance of every method.

    Left: how many times fewer forwards, with the promise in the colour; right: kernel distance of the images
    to plain decoding with other seeds, with its 95 % interval. The line at 0 is no difference, the band the
    interval of plain decoding itself.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    path = check_plot(path)
    from matplotlib.figure import Figure

    colours = {"exact": "#1a7f37", "tv": "#bf8700", "approximate": "#bf8700", "lossy": "#d1242f"}
    colour = [colours[record.promise.split("<")[0]] for record in records]
    figure = Figure(figsize=(13, 0.36 * len(records) + 1.4), layout="constrained")
    saved, distance = figure.subplots(1, 2, sharey=True)
    rows = range(len(records))
    bars = saved.barh(rows, [record.step_compression for record in records], color=colour)
    saved.bar_label(
        bars,
        [f" {record.nfe_mean:.0f} NFE, {record.attribute_accuracy:.0%} of attributes" for record in records],
        fontsize=8,
    )
    saved.set_xlim(0, 1.9 * max(record.step_compression for record in records))
    saved.set_yticks(rows, [f"{record.method}  ({record.promise})" for record in records], fontsize=8)
    saved.invert_yaxis()
    saved.margins(y=0.01)
    saved.set_xlabel("times fewer forwards of the target", fontsize=9)
    for row, record in enumerate(records):
        middle, margin = record.feature_distance, record.feature_margin
        distance.errorbar(middle, row, xerr=margin, fmt="o", color=colour[row], capsize=3)
        if record.method == BASELINE:
            distance.axvspan(middle - margin, middle + margin, color=colour[row], alpha=0.1)
    distance.axvline(0, color="0.6", linewidth=0.8)
    distance.set_xlabel("kernel distance to plain decoding (95 %)", fontsize=9)
    figure.savefig(path, dpi=90)
    return path
