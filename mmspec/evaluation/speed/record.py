"""Summary of timed runs: one record for each accelerator.

Ratios are to plain decoding in the same process, dtype and batch size. Intervals are bootstrapped over
prompts, which differ more than repeats do, and keep the runs of one prompt paired.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median, quantiles

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mmspec.core.statistics import PARTS, merge_stats
from mmspec.errors import InputError
from mmspec.evaluation.speed.timing import BASELINE, PEER, TimedRun
from mmspec.open_types import Json, Keywords

__all__ = ["Record", "as_json", "ratio_interval", "speedup_interval", "summarise"]

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class Record:
    """Measurements of one accelerator on all batches: sums over batches, medians over repeats.

    Attributes:
        accelerator: as the caller named it, options included.
        exactness: "exact", "tv<=x", "approximate" or "lossy".
        identical: share of outputs that equal those of plain decoding, token for token.
        samples: conversations in one repeat; `new_tokens` and `target_forwards` are of the first repeat.
        acceptance_length: tokens per scoring forward pass, bonus token included; plain decoding has 1.
        acceptance_rate: accepted draft tokens / draft tokens.
        acceptance_by_position: share of rounds that accepted at least 1, 2, ... draft tokens.
        seconds: wall-clock for all batches; `tokens_per_second` is new_tokens / seconds.
        speedup: seconds of plain decoding / seconds.
        speedup_min, speedup_max: extremes of that ratio over repeats.
        decode_speedup: the ratio for seconds per token after the first token; 1 if there are none.
        time_to_first_token: median over calls of the seconds of prefill.
        time: shares of the seconds, which sum to 1: `prompt` (prefill), `target` (scoring), `draft` (the
            drafter), `verify` (warping, verification and commit) and `rest` (the loop, the canvas, and the
            pipeline's work before and after).
        draft_passes: forward passes of the drafter's own model per round.
        nfe_mean, nfe_max: forward passes of the target per row, prefill included; a guided pair is one.
        step_compression: nfe_mean of plain decoding / nfe_mean.
        tv: `mean` and `max` of the measured total variation to the target at verified places; None if not
            measured, as for exact rules.
        drift: `mean` and `max` distance of kept candidates to the target's own vectors, or None.
        rollbacks: rounds of a row that rejected a candidate.
        state_bytes: size of the target's keys and values.
        pixel_seconds: wall-clock from image tokens to pixels, which only `speedup_with_pixels` includes.
        peak_memory_bytes: the most memory held during any run; `memory_kind` names the counter.
        speedup_interval, acceptance_interval: paired 95 % bootstrap intervals over prompts (batches); None
            for fewer than three.
        joules_per_token: energy of the device / new tokens; None if its driver does not report energy.
        over_plain: ratios of plain decoding's seconds on the same prompts in the same repeat: `median`, and
            quartiles `low` and `high`.
        over_generate: the same for transformers' plain `generate`; None if it did not run.
        quality: scores of the images (`score_images`) by name, each with `value`, `low` and `high`; distances
            are to images of plain decoding with other seeds. None if images were not scored.
        word_error_rate: of the transcripts whose words are known; None without any.
        category: the group of examples; empty for all of them.
        own, settings: settings of this accelerator (drafter, window, promise), and of the whole run.
    """

    accelerator: str
    exactness: str
    identical: float
    samples: int
    repeats: int
    new_tokens: int
    target_forwards: int
    acceptance_length: float
    acceptance_rate: float
    acceptance_by_position: list[float]
    seconds: float
    speedup: float
    speedup_min: float
    speedup_max: float
    decode_speedup: float
    tokens_per_second: float
    time_to_first_token: float
    time: dict[str, float]
    draft_passes: float
    nfe_mean: float
    nfe_max: int
    step_compression: float
    tv: dict[str, float] | None
    drift: dict[str, float] | None
    rollbacks: int
    state_bytes: int
    pixel_seconds: float
    speedup_with_pixels: float
    peak_memory_bytes: int
    memory_kind: str
    speedup_interval: tuple[float, float] | None = None
    acceptance_interval: tuple[float, float] | None = None
    joules_per_token: float | None = None
    over_plain: dict[str, float] | None = None
    over_generate: dict[str, float] | None = None
    quality: dict[str, dict[str, float]] | None = None
    word_error_rate: float | None = None
    category: str = ""
    own: Keywords = field(default_factory=dict)
    settings: Keywords = field(default_factory=dict)


def as_json(records: Sequence[Record]) -> Json:
    """Records of one run for JSON: the run's settings once, and each record with its own settings."""
    rows = []
    for record in records:
        figures = asdict(record)
        del figures["settings"]
        rows.append({**figures.pop("own"), **figures})
    return {"settings": records[0].settings, "records": rows}


def summarise(
    runs: Sequence[TimedRun],
    names: Sequence[str],
    *,
    category: str | None = None,
    settings: Mapping[str, object] | None = None,
    own: Mapping[str, Mapping[str, object]] | None = None,
) -> list[Record]:
    """Summarise timed runs in one record for each accelerator, in the order of `names`.

    Args:
        runs: results of `measure`. From an interrupted measurement, only repeats that every accelerator
            finished are used; without any, the batches of the first repeat that all of them finished.
        names: the accelerators, including "none".
        category: uses only batches of this category.
        settings: settings of the run, stored in every record.
        own: settings of single accelerators, by name.

    Raises:
        InputError: no batch was finished by all accelerators.
    """
    runs = sorted((run for run in runs if category in (None, run.category)), key=lambda run: run.batch)
    cells = _complete_cells(runs, names)
    if not cells:
        raise InputError("runs", len(runs), "must contain a batch that every accelerator finished")
    table = {
        name: [
            [run for run in runs if run.accelerator == name and (run.repeat, run.batch) in cell]
            for cell in cells
        ]
        for name in names
    }
    return [
        replace(
            _record(name, table[name], table[BASELINE]),
            over_plain=_paired(table[name], table[BASELINE]),
            over_generate=_paired(table[name], table[PEER]) if PEER in table else None,
            category=category or "",
            own=dict((own or {}).get(name, {})),
            settings=dict(settings or {}),
        )
        for name in names
    ]


Repeats = list[list[TimedRun]]
"""Runs of one accelerator, by repeat and by batch."""


def _complete_cells(runs: Sequence[TimedRun], names: Sequence[str]) -> list[set[tuple[int, int]]]:
    """Find the usable repeats: one set of (repeat, batch) each, with the same batches in every set."""
    finished: dict[tuple[int, int], set[str]] = {}
    for run in runs:
        finished.setdefault((run.repeat, run.batch), set()).add(run.accelerator)
    whole = {cell for cell, done in finished.items() if done >= set(names)}
    first = {batch for repeat, batch in whole if repeat == 0}
    by_repeat = [{(repeat, batch) for batch in first} for repeat in sorted({repeat for repeat, _ in whole})]
    return [cell for cell in by_repeat if cell and cell <= whole]


def _paired(repeats: Repeats, reference: Repeats) -> dict[str, float]:
    """Median and quartiles of the reference's seconds / these seconds, run by run."""
    pairs = (_seconds(reference) / _seconds(repeats)).ravel().tolist()
    low, _, high = quantiles(pairs, n=4, method="inclusive") if len(pairs) > 1 else pairs * 3
    return {"median": median(pairs), "low": low, "high": high}


def _record(name: str, repeats: Repeats, plain: Repeats) -> Record:
    every, first = [run for cell in repeats for run in cell], repeats[0]
    seconds, plain_seconds = (_seconds(each).sum(1) for each in (repeats, plain))
    pixels, plain_pixels = (_pixel_seconds(each).sum(1) for each in (repeats, plain))
    calls = [stats for run in every for stats in run.decoded.stats]
    once, plain_once = (
        merge_stats([one for run in each[0] for one in run.decoded.stats]) for each in (repeats, plain)
    )
    same = [
        ours == theirs
        for run, other in zip(every, (run for cell in plain for run in cell), strict=True)
        for ours, theirs in zip(run.decoded.tokens, other.decoded.tokens, strict=True)
    ]
    accepted = Counter(once.accepted_histogram)
    rounds = once.target_forwards - sum(len(run.decoded.stats) for run in first)
    new_tokens, middle = sum(once.new_tokens), median(seconds.tolist())
    time = {
        part: sum(getattr(stats, f"{part}_seconds") for stats in calls) / float(seconds.sum())
        for part in PARTS
    }
    ratios = (plain_seconds / seconds).tolist()
    paces = [_seconds_per_token(each) for each in (plain, repeats)]
    by_batch = [merge_stats(run.decoded.stats) for run in first]
    return Record(
        accelerator=name,
        exactness=once.exactness,
        identical=sum(same) / len(same),
        samples=sum(len(run.decoded.tokens) for run in first),
        repeats=len(repeats),
        new_tokens=new_tokens,
        target_forwards=once.target_forwards,
        acceptance_length=once.acceptance_length,
        acceptance_rate=once.acceptance_rate,
        acceptance_by_position=[
            sum(count for length, count in accepted.items() if length >= depth) / accepted.total()
            for depth in range(1, max(accepted, default=0) + 1)
        ],
        seconds=middle,
        speedup=median(plain_seconds.tolist()) / middle,
        speedup_min=min(ratios),
        speedup_max=max(ratios),
        decode_speedup=paces[0] / paces[1] if all(paces) else 1.0,
        tokens_per_second=new_tokens / middle,
        time_to_first_token=median(stats.prefill_seconds for stats in calls),
        time={**time, "rest": 1 - sum(time.values())},
        draft_passes=once.draft_passes / rounds if rounds else 0.0,
        nfe_mean=once.nfe_mean,
        nfe_max=once.nfe_max,
        step_compression=plain_once.nfe_mean / once.nfe_mean if once.nfe_mean else 1.0,
        tv=None if once.tv_mean is None else {"mean": once.tv_mean, "max": once.tv_max},
        drift=None if once.drift_mean is None else {"mean": once.drift_mean, "max": once.drift_max},
        rollbacks=once.rollbacks,
        state_bytes=once.cache_bytes,
        pixel_seconds=median(pixels.tolist()),
        speedup_with_pixels=median((plain_seconds + plain_pixels).tolist())
        / median((seconds + pixels).tolist()),
        peak_memory_bytes=max(run.peak_bytes for run in every),
        memory_kind=every[0].memory_kind,
        speedup_interval=speedup_interval(_seconds(plain), _seconds(repeats)),
        acceptance_interval=ratio_interval(
            [one.acceptance_length * sum(one.rounds) for one in by_batch],
            [sum(one.rounds) for one in by_batch],
        ),
        joules_per_token=_joules(repeats, new_tokens),
    )


def _pixel_seconds(repeats: Repeats) -> FloatArray:
    """Wall-clock seconds from image tokens to pixels [R, B]."""
    return np.array([[run.decoded.pixel_seconds for run in cell] for cell in repeats])


def _seconds(repeats: Repeats) -> FloatArray:
    """Wall-clock seconds for tokens [R, B], without pixels."""
    return np.array([[run.seconds for run in cell] for cell in repeats]) - _pixel_seconds(repeats)


def _seconds_per_token(repeats: Repeats) -> float:
    """Median over repeats of the seconds per token after the first one of each row; 0 without any."""
    found = []
    for cell in repeats:
        calls = [stats for run in cell for stats in run.decoded.stats]
        tokens = sum(sum(stats.new_tokens) - sum(map(bool, stats.new_tokens)) for stats in calls)
        seconds = sum(stats.seconds - stats.prefill_seconds for stats in calls)
        found.append(seconds / tokens if tokens else 0.0)
    return median(found)


def _joules(repeats: Repeats, new_tokens: int) -> float | None:
    """Median over repeats of the energy per new token; None if a run has none."""
    if not new_tokens or any(run.joules is None for cell in repeats for run in cell):
        return None
    return median(sum(run.joules or 0.0 for run in cell) for cell in repeats) / new_tokens


RESAMPLES = 2000
PERCENTILES = 2.5, 97.5
FEWEST = 3


def speedup_interval(plain: ArrayLike, ours: ArrayLike) -> tuple[float, float] | None:
    """95 % bootstrap interval of the speed-up: medians over repeats of sums over prompts.

    Args:
        plain, ours: seconds [R][B] of the same prompts in the same repeats.

    Returns:
        The ends, between which the speed-up lies; None for fewer than three prompts.
    """
    both = np.asarray(plain, dtype=float), np.asarray(ours, dtype=float)
    chosen = _choices(both[0].shape[1])
    if chosen is None:
        return None
    theirs, own = (np.median(seconds[:, chosen].sum(-1), axis=0) for seconds in both)
    return _ends(theirs / own, np.median(both[0].sum(-1)) / np.median(both[1].sum(-1)))


def ratio_interval(counts: Sequence[float], per: Sequence[float]) -> tuple[float, float] | None:
    """95 % bootstrap interval of sum(counts) / sum(per) over prompts [B], such as tokens per forward pass.

    Returns:
        The ends, between which the ratio lies; None for fewer than three prompts or an empty denominator.
    """
    above, below = np.asarray(counts, dtype=float), np.asarray(per, dtype=float)
    chosen = _choices(len(above))
    if chosen is None or not below.sum():
        return None
    sums = below[chosen].sum(-1)
    return _ends(above[chosen].sum(-1)[sums > 0] / sums[sums > 0], above.sum() / below.sum())


def _choices(prompts: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]] | None:
    """[RESAMPLES, B] prompts drawn with replacement, the same every time; None for too few of them."""
    if prompts < FEWEST:
        return None
    return np.random.default_rng(0).integers(prompts, size=(RESAMPLES, prompts))


def _ends(drawn: FloatArray, estimate: float) -> tuple[float, float]:
    low, high = np.percentile(drawn, PERCENTILES)
    return min(float(low), float(estimate)), max(float(high), float(estimate))
