"""Decoding statistics: tokens, rounds, acceptance, times and memory.

The acceptance length counts the bonus token, as in vLLM, so that plain decoding has 1.0. A `Timer` measures
the parts of a loop by the host's clock; benchmarks can use GPU events instead, which need no synchronisation
until the loop ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, replace
from functools import reduce
from operator import add
from time import perf_counter
from typing import cast

import torch

from mmspec.core.rows import Rows, named, overwrite
from mmspec.open_types import Keywords

#: Parts of a call's time, each with a field `<part>_seconds`.
PARTS = ("prompt", "target", "draft", "verify")
ROW_COUNTS = ("new_tokens", "rounds", "drafted_rounds", "drafted", "accepted", "accepted_histograms")
# merged statistics take the last value of LATEST, the largest of LARGEST, and the sum of all other fields
LATEST = ("accelerator", "exactness", "keeps", "prompt_forwards")
LARGEST = ("tv_max", "drift_max", "cache_bytes")
_by_device = ContextVar("by_device", default=False)


@dataclass
class DecodingStats(Rows):
    """Counts and times of one call.

    Attributes:
        accelerator: name of the accelerator.
        exactness: "exact", "tv<=x", "approximate" or "lossy".
        keeps: the distribution that "exact" refers to, in words, for models with more than one.
        new_tokens: tokens emitted, per row.
        rounds: scoring forward passes in which a row was active, per row.
        drafted_rounds: how many of these rounds scored a draft, per row.
        target_forwards: forward passes of the target for the batch, the prefill included.
        prompt_forwards: 1 if a prefill decides the first token of each row; 0 if there is no prefill.
        drafted: draft tokens proposed while a row was active, per row.
        accepted: draft tokens accepted, per row, without those after a stop.
        accepted_histograms: number of rounds that accepted 0, 1, 2, ... draft tokens, per row.
        tv_sum, tv_max, tv_places: total variation between the emitted distribution and the target's, over the
            verified places where it was measured; zero places for exact rules.
        drift_sum, drift_max, drift_places: distance of accepted candidates to the target's own vectors (root
            mean square over their components), for rules that accept vectors within a distance.
        rollbacks: rounds of a row that rejected a candidate.
        draft_faults: rounds in which a drafter's output was not finite and its draft was dropped.
        draft_passes: forward passes of the drafter's own model, without its prefill.
        seconds: wall-clock time of the call; `prefill_seconds` is the time to the first token.
        prompt_seconds, target_seconds, draft_seconds, verify_seconds: its parts: the target's prefill; its
            scoring; the drafter's prefill, drafting and observing; and warping, verifying and committing. The
            remainder is the loop's own: the canvas, and waiting for the device. Measured by the host's clock,
            or the device's (`timed_by_device`).
        cache_bytes: size of the target's KV cache.
        cached_prompt_tokens: tokens of all prompts that the prefix cache supplied.
    """

    row_fields = named(*ROW_COUNTS)

    accelerator: str = "none"
    exactness: str = "exact"
    keeps: str = ""
    new_tokens: list[int] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)
    drafted_rounds: list[int] = field(default_factory=list)
    target_forwards: int = 0
    prompt_forwards: int = 1
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    accepted_histograms: list[Counter[int]] = field(default_factory=list)
    tv_sum: float = 0.0
    tv_max: float = 0.0
    tv_places: int = 0
    drift_sum: float = 0.0
    drift_max: float = 0.0
    drift_places: int = 0
    rollbacks: int = 0
    draft_faults: int = 0
    draft_passes: int = 0
    seconds: float = 0.0
    prefill_seconds: float = 0.0
    prompt_seconds: float = 0.0
    target_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    cache_bytes: int = 0
    cached_prompt_tokens: int = 0

    def count_round(self, row: int, drafted: int, accepted: int, faulty: int) -> None:
        """Count one scoring forward pass of an active row."""
        self.rounds[row] += 1
        self.drafted_rounds[row] += drafted > 0
        self.drafted[row] += drafted
        self.accepted[row] += accepted
        self.draft_faults += faulty
        self.rollbacks += accepted < drafted
        self.accepted_histograms[row][accepted] += 1

    def count_measured(self, name: str, total: float, largest: float, places: int) -> None:
        """Add a lossy rule's measurement over the places of a round: "tv" or "drift"."""
        setattr(self, f"{name}_sum", getattr(self, f"{name}_sum") + total)
        setattr(self, f"{name}_max", max(getattr(self, f"{name}_max"), largest))
        setattr(self, f"{name}_places", getattr(self, f"{name}_places") + places)

    def joined(self, other: DecodingStats, counts: tuple[int, int]) -> DecodingStats:
        """Return these statistics merged with those of other rows; see `merge_stats`."""
        return merge_stats([self, other])

    def overwritten(
        self, slots: Sequence[int], other: DecodingStats, counts: tuple[int, int]
    ) -> DecodingStats:
        """Return these statistics merged with those of other rows, whose counts are in place of some."""
        rows: Keywords = {
            name: overwrite(getattr(self, name), slots, getattr(other, name), counts) for name in ROW_COUNTS
        }
        return replace(merge_stats([self, other]), **rows)

    def of_rows_alone(self) -> DecodingStats:
        """Return statistics with the per-row counts alone, without sums over other rows."""
        own: Keywords = {name: getattr(self, name) for name in ROW_COUNTS}
        own |= {"prompt_forwards": self.prompt_forwards, "target_forwards": self.nfe_max}
        return DecodingStats(self.accelerator, self.exactness, self.keeps, **own)

    def as_one_row(self) -> DecodingStats:
        """Return these statistics with the counts of all rows summed."""
        sums: Keywords = {name: [reduce(add, getattr(self, name))] for name in ROW_COUNTS}
        return replace(self, **sums)

    @property
    def promise(self) -> str:
        """Exactness, with its reference distribution if that is not next-token prediction."""
        return f"{self.exactness} ({self.keeps})" if self.keeps else self.exactness

    @property
    def accepted_histogram(self) -> dict[int, int]:
        """Number of rounds that accepted 0, 1, 2, ... draft tokens, summed over rows."""
        return dict(sum(self.accepted_histograms, Counter[int]()))

    @property
    def nfe(self) -> list[int]:
        """Forward passes of each row, the prefill included; a guided pair counts as one."""
        rows = zip(self.new_tokens, self.rounds, strict=True)
        return [self.prompt_forwards * bool(tokens) + rounds for tokens, rounds in rows]

    @property
    def nfe_mean(self) -> float:
        return sum(self.nfe) / len(self.nfe) if self.nfe else 0.0

    @property
    def nfe_max(self) -> int:
        return max(self.nfe, default=0)

    @property
    def step_compression(self) -> float:
        """Tokens per forward pass of a row, forced syntax tokens and the prefill included."""
        return sum(self.new_tokens) / sum(self.nfe) if any(self.nfe) else 1.0

    @property
    def acceptance_length(self) -> float:
        """Tokens committed per scoring forward pass, bonus included; the prefill's token is not counted."""
        rounds = sum(self.rounds)
        prefilled = self.prompt_forwards * sum(1 for count in self.new_tokens if count)
        committed = sum(self.new_tokens) - prefilled
        return committed / rounds if rounds else 1.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted draft tokens / draft tokens; 0 if nothing was drafted."""
        drafted = sum(self.drafted)
        return sum(self.accepted) / drafted if drafted else 0.0

    @property
    def tv_mean(self) -> float | None:
        """Mean total variation of a lossy rule at verified places; None if nothing was measured."""
        return self.tv_sum / self.tv_places if self.tv_places else None

    @property
    def drift_mean(self) -> float | None:
        """Mean distance of accepted candidates to the target's own vectors; None if nothing was measured."""
        return self.drift_sum / self.drift_places if self.drift_places else None

    @property
    def tokens_per_second(self) -> float:
        return sum(self.new_tokens) / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        return (
            f"{sum(self.new_tokens)} tokens, {self.target_forwards} forward passes, "
            f"{self.acceptance_length:.2f} tokens per forward pass, {self.tokens_per_second:.0f} tokens/s, "
            f"{self.accelerator}: {self.promise}"
        )


def merge_stats(parts: Sequence[DecodingStats]) -> DecodingStats:
    """Merge the statistics of several calls: rows are concatenated, counts and times added."""
    merged = DecodingStats()
    for part in parts:
        for name in (each.name for each in fields(part)):
            one, other = getattr(merged, name), getattr(part, name)
            together = other if name in LATEST else max(one, other) if name in LARGEST else one + other
            setattr(merged, name, together)
    return merged


@contextmanager
def timed_by_device() -> Iterator[None]:
    """Time loops that start in this context by events on their device, if it is a GPU.

    On a GPU the host's clock measures how long submitting the work takes, not running it.
    """
    token = _by_device.set(True)
    try:
        yield
    finally:
        _by_device.reset(token)


class Timer:
    """Adds the time of each part to the `<part>_seconds` of statistics.

    On exit, the times of GPU events are added, which synchronises with the device.

    Args:
        stats: to which the seconds are added.
        device: that the parts run on.
    """

    def __init__(self, stats: DecodingStats, device: torch.device) -> None:
        self._stats, self._device = stats, device
        self._by_events = _by_device.get() and device.type == "cuda"
        self._laps: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._last: float | torch.cuda.Event = 0.0

    def __enter__(self) -> Timer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._laps:
            torch.cuda.synchronize(self._device)
        for part, begin, end in self._laps:
            self._add(part, begin.elapsed_time(end) / 1000)
        self._laps.clear()

    def start(self) -> None:
        """Start a part; the time since the last one is not counted."""
        self._last = self._now()

    def end(self, part: str) -> None:
        """End a part, and start the next."""
        last, now = self._last, self._now()
        if isinstance(last, float) and isinstance(now, float):
            self._add(part, now - last)
        else:
            self._laps.append((part, cast(torch.cuda.Event, last), cast(torch.cuda.Event, now)))
        self._last = now

    def _now(self) -> float | torch.cuda.Event:
        if not self._by_events:
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _add(self, part: str, seconds: float) -> None:
        name = f"{part}_seconds"
        setattr(self._stats, name, getattr(self._stats, name) + seconds)
