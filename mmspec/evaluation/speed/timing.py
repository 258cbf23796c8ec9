"""Timing of several accelerators on the same prompts in one run.

Every repeat runs all accelerators on one batch before it goes to the next batch, in an order that rotates,
so that a machine that slows down slows all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch

from mmspec.decoding.stats import DecodingStats
from mmspec.errors import InputError
from mmspec.evaluation.examples import Example
from mmspec.evaluation.speed.energy import EnergyMeter
from mmspec.evaluation.speed.memory import PeakMemory

__all__ = ["BASELINE", "PEER", "Decode", "Decoded", "TimedRun", "batches_of", "measure"]

BASELINE = "none"
PEER = "generate"  # transformers' own plain decoding


@dataclass(frozen=True)
class Decoded:
    """Decoded tokens and statistics of one batch.

    Attributes:
        tokens: one list of output ids per conversation, all its turns in a row.
        stats: what happened, one entry per pipeline call (a call per turn).
        pixel_seconds: wall-clock from image tokens to pixels; 0 where there are none.
    """

    tokens: list[list[int]]
    stats: list[DecodingStats]
    pixel_seconds: float = 0.0


Decode = Callable[[Sequence[Example]], Decoded]


@dataclass(frozen=True)
class TimedRun:
    """Time and memory of one accelerator on one batch in one repeat.

    Attributes:
        seconds: wall-clock, from the prompts to the last token on the host, reading the images included, or
            to the last pixel of those that were drawn.
        joules: of the device meanwhile; None where its driver does not tell.
        peak_bytes: the most memory held meanwhile; `memory_kind` says what that measures.
    """

    accelerator: str
    repeat: int
    batch: int
    category: str
    seconds: float
    decoded: Decoded
    peak_bytes: int = 0
    memory_kind: str = ""
    joules: float | None = None


def batches_of(examples: Sequence[Example], size: int) -> list[list[Example]]:
    """Split examples into batches of at most `size` of one category, so that categories are told apart."""
    if size < 1:
        raise InputError("batch_size", size, "an integer of at least 1")
    groups: dict[str, list[Example]] = {}
    for example in examples:
        groups.setdefault(example.category, []).append(example)
    return [group[i : i + size] for group in groups.values() for i in range(0, len(group), size)]


def measure(
    decoders: Mapping[str, Decode],
    batches: Sequence[Sequence[Example]],
    repeats: int,
    device: torch.device,
    *,
    clock: Callable[[], float] = perf_counter,
) -> Iterator[TimedRun]:
    """Time every decoder on every batch, `repeats` times, after one round of warm-up that is not reported.

    A generator, so that a caller who is interrupted keeps what has been measured.

    Args:
        decoders: what to time, by name; it must hold "none".
        batches: of `batches_of`.
        repeats: how often.
        device: where the model is, for its memory.
        clock: seconds; another one for tests.
    """
    if BASELINE not in decoders:
        raise InputError("accelerators", list(decoders), f"a list with {BASELINE!r}, which ratios are to")
    if repeats < 1:
        raise InputError("repeats", repeats, "an integer of at least 1")
    for decode in decoders.values():
        decode(batches[0])
    names = list(decoders)
    for repeat in range(repeats):
        for index, batch in enumerate(batches):
            first = (repeat + index) % len(names)
            for name in names[first:] + names[:first]:
                memory, energy = PeakMemory.start(device), EnergyMeter.start(device)
                started = clock()
                decoded = decoders[name](batch)
                seconds = clock() - started
                figures = seconds, decoded, memory.read(), memory.kind, energy.read()
                yield TimedRun(name, repeat, index, batch[0].category, *figures)
