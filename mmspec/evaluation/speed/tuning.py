"""Searches: for the best of several settings of a method, and for the fastest accelerator of a model."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch

from mmspec.accelerators import options_of
from mmspec.errors import InputError
from mmspec.evaluation.examples import Example
from mmspec.evaluation.speed.record import Record, summarise
from mmspec.evaluation.speed.timing import BASELINE, Decode, measure
from mmspec.open_types import Json
from mmspec.plugins import METHODS
from mmspec.registry import alternatives
from mmspec.targets import AnyTarget

__all__ = ["MEASURES", "Trial", "allowed_by", "best_of", "fastest", "search", "variants"]

MEASURES = ("seconds", "forwards")
WINDOW = re.compile(r"\bwindow=(\d+)")
STAGES = ((2, 1, 0.34), (4, 2, 0.5))  # prompts, repeats, and the share that goes on
FEWEST = 3  # that go on, if there are so many


@dataclass(frozen=True)
class Trial:
    """Record of a candidate in the last stage that it was measured in, counted from 1."""

    label: str
    stage: int
    record: Record

    def as_dict(self) -> Json:
        """Figures for JSON."""
        figures = ("speedup", "speedup_interval", "acceptance_length", "target_forwards", "identical")
        one = self.record
        return {
            "accelerator": self.label,
            "stage": self.stage,
            "promise": one.exactness,
            "samples": one.samples,
            "repeats": one.repeats,
            **{name: getattr(one, name) for name in figures},
        }


def variants(name: str, target: AnyTarget, tv: float) -> list[str]:
    """Settings of a method that are worth a try on a target, as the command line writes them.

    Those of its record, with windows up to the image, and the whole of the allowed TV where it has a bound.
    """
    method = METHODS[name]
    labels = [label for written in method.tuned for label in alternatives(written)]
    if not labels:
        trees = [f"{name}:num_draft_tokens={count}" for count in (8, 48)]
        return [name, *trees, f"{name}:length=cost"]
    length = target.grid.length if target.grid is not None else 1
    windowed = {label: int(found[1]) for label in labels if (found := WINDOW.search(label))}
    labels = [label for label in labels if windowed.get(label, 0) <= length] or [
        WINDOW.sub(f"window={length}", labels[0])
    ]
    if "delta" in options_of(method):
        labels = [label.replace(name, f"{name}:delta={tv:g}", 1) for label in labels]
    return labels


def allowed_by(exactness: str, tv: float) -> bool:
    """True if a promise is exact, or a bound of at most `tv` per token."""
    if exactness == "exact":
        return True
    return exactness.startswith("tv<=") and float(exactness.removeprefix("tv<=")) <= tv


def measured(
    decoders: Mapping[str, Decode],
    batches: Sequence[Sequence[Example]],
    repeats: int,
    device: torch.device,
    on_run: Callable[[str], None],
    clock: Callable[[], float],
) -> list[Record]:
    """Summarise what decoders did on batches; `on_run` is told their name after every run."""
    runs = []
    for run in measure(decoders, batches, repeats, device, clock=clock):
        runs.append(run)
        on_run(run.accelerator)
    return summarise(runs, list(decoders))


def search(
    decoders: Mapping[str, Decode],
    batches: Sequence[Sequence[Example]],
    repeats: int,
    device: torch.device,
    on_run: Callable[[str], None] = lambda label: None,
    clock: Callable[[], float] = perf_counter,
) -> list[Trial]:
    """Measure candidates in stages; each stage takes more prompts, and the faster ones of the one before.

    Plain decoding ("none") is among the decoders and stays in all stages; the last stage takes all batches,
    as often as `repeats` says.

    Returns:
        One trial for each candidate: those of the last stage first, then by speed.
    """
    trials: dict[str, Trial] = {}
    left = list(decoders)
    for stage, (prompts, times, share) in enumerate((*STAGES, (len(batches), repeats, 1.0)), start=1):
        chosen = {label: decoders[label] for label in left}
        for record in measured(chosen, batches[:prompts], times, device, on_run, clock):
            trials[record.accelerator] = Trial(record.accelerator, stage, record)
        ranked = _ranked(trials[label] for label in left if label != BASELINE)
        kept = max(FEWEST, round(share * len(ranked)))
        left = [BASELINE, *(trial.label for trial in ranked[:kept])]
    return sorted(trials.values(), key=lambda trial: (-trial.stage, -trial.record.speedup))


def fastest(trials: Sequence[Trial]) -> Trial:
    """The fastest candidate of the last stage; plain decoding unless another one is surely faster.

    Sure is an interval above 1; where there are too few prompts for intervals, the ratio itself.
    """
    last = max(trial.stage for trial in trials)
    finalists = [trial for trial in trials if trial.stage == last]
    plain = next(trial for trial in finalists if trial.label == BASELINE)
    faster = [
        trial
        for trial in finalists
        if (trial.record.speedup_interval or (trial.record.speedup,))[0] > 1.0 and trial is not plain
    ]
    return _ranked(faster)[0] if faster else plain


def _ranked(trials: Iterable[Trial]) -> list[Trial]:
    return sorted(trials, key=lambda trial: -trial.record.speedup)


def best_of(
    groups: Sequence[Sequence[str]],
    decoders: Mapping[str, Decode],
    batches: Sequence[Sequence[Example]],
    device: torch.device,
    by: str = "seconds",
    on_run: Callable[[str], None] = lambda label: None,
    clock: Callable[[], float] = perf_counter,
) -> dict[str, dict[str, dict[str, float]]]:
    """Find the best of several settings of each method, on other prompts than methods are compared on.

    Args:
        groups: labels of the settings of each method; a single one is not decoded.
        decoders: by label, plain decoding ("none") among them.
        batches, device, on_run, clock: as of `measured`.
        by: one of `MEASURES`.

    Returns:
        For the best setting of each method, `seconds` and `forwards` of a prompt by every setting that was
        tried; {} where there was one.

    Raises:
        InputError: no such measure.
    """
    if by not in MEASURES:
        raise InputError("best", by, " or ".join(MEASURES))
    tried = [BASELINE, *(label for group in groups if len(group) > 1 for label in group)]
    figures: dict[str, dict[str, float]] = {}
    if len(tried) > 1:
        records = measured({label: decoders[label] for label in tried}, batches, 1, device, on_run, clock)
        figures = {
            one.accelerator: {"seconds": one.seconds / one.samples, "forwards": one.nfe_mean}
            for one in records
        }
    return {
        min(group, key=lambda label: figures[label][by] if len(group) > 1 else 0.0): {
            label: figures[label] for label in group if len(group) > 1
        }
        for group in groups
    }
