"""Search for the best settings of a method, and for the fastest accelerator of a model."""

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
STAGES = ((2, 1, 0.34), (4, 2, 0.5))  # prompts, repeats, and the share kept for the next stage
FEWEST = 3  # candidates kept at least


@dataclass(frozen=True)
class Trial:
    """Record of a candidate in its last stage, counted from 1."""

    label: str
    stage: int
    record: Record

    def as_dict(self) -> Json:
        """The trial for JSON."""
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
    """Candidate settings of a method on a target, in the syntax of the command line.

    These are the tuned settings of the method's record, with windows up to the size of the image. A method
    with a bound gets the whole allowed total variation `tv`.
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
    """Measure decoders on batches; `on_run` is called with the decoder's name after every run."""
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
    """Measure candidates in stages; each stage has more prompts and keeps the faster candidates.

    The decoders must contain plain decoding ("none"), which stays in all stages. The last stage measures all
    batches `repeats` times.

    Returns:
        One trial per candidate, sorted by stage (last first) and speed.
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
    """The fastest candidate of the last stage, or plain decoding if none is significantly faster.

    A candidate is significantly faster if the interval of its speed-up is above 1; with too few prompts for
    intervals, if its speed-up is above 1.
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
    """Find the best of several settings of each method; use other prompts than for the comparison.

    Args:
        groups: labels of the settings of each method; a method with one setting is not measured.
        decoders: decoders by label, including plain decoding ("none").
        batches, device, on_run, clock: as in `measured`.
        by: one of `MEASURES`.

    Returns:
        For the best setting of each method, `seconds` and `forwards` per prompt of every measured setting;
        {} for a method with one setting.

    Raises:
        InputError: an unknown measure.
    """
    if by not in MEASURES:
        raise InputError("best", by, f"must be {' or '.join(MEASURES)}")
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
