"""Timing of several accelerators on the same prompts in one run, with peak memory and energy.

Every repeat runs all accelerators on one batch before it goes to the next batch, in an order that rotates,
so that a machine that slows down slows all of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from mmspec.core.statistics import DecodingStats
from mmspec.errors import InputError
from mmspec.evaluation.examples import Example

__all__ = [
    "BASELINE",
    "Decode",
    "Decoded",
    "PEER",
    "TimedRun",
    "batches_of",
    "count_energy",
    "measure",
    "watch_memory",
]


CLEAR = Path("/proc/self/clear_refs")
STATUS = Path("/proc/self/status")
RESET_PEAK = "5"  # proc(5): resets the peak resident set size (VmHWM) of this process alone


def count_energy(device: torch.device) -> Callable[[], float | None]:
    """Start to count the energy of a GPU, everything that runs on it included.

    Returns:
        Function that reads the joules since now; it gives None where nothing counts them.
    """
    try:
        import pynvml
    except ImportError:
        return lambda: None
    library: Any = pynvml
    if device.type != "cuda":
        return lambda: None
    try:
        library.nvmlInit()
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        handle = library.nvmlDeviceGetHandleByUUID(uuid)
        start = library.nvmlDeviceGetTotalEnergyConsumption(handle)
    except library.NVMLError:  # no driver, or a card without the counter
        return lambda: None

    def read() -> float:
        torch.cuda.synchronize()
        return float(library.nvmlDeviceGetTotalEnergyConsumption(handle) - start) / 1000

    return read


def watch_memory(device: torch.device) -> tuple[str, Callable[[], int]]:
    """Start to watch the peak memory of a model on a device.

    Returns:
        "cuda allocated", "resident set" (of the process during the work, weights included), or "resident set
        since start" where the system cannot reset its peak; and a function that reads the peak in bytes.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return "cuda allocated", lambda: torch.cuda.max_memory_allocated(device)
    try:
        CLEAR.write_text(RESET_PEAK)
        STATUS.read_text()
    except OSError:
        return "resident set since start", _peak_since_start
    return "resident set", _resident_peak


def _resident_peak() -> int:
    lines = STATUS.read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def _peak_since_start() -> int:
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes there, kilobytes elsewhere


BASELINE = "none"
PEER = "generate"  # transformers' own plain decoding


@dataclass(frozen=True)
class Decoded:
    """Decoded tokens and statistics of one batch.

    Attributes:
        tokens: one list of output ids per conversation, all its turns in a row.
        stats: what happened, one entry per pipeline call (a call per turn).
        pixel_seconds: wall-clock from image tokens to pixels; 0 where there are none.
        images: that were drawn, in the form that the pipeline was asked for; () where none were.
    """

    tokens: list[list[int]]
    stats: list[DecodingStats]
    pixel_seconds: float = 0.0
    images: Sequence[Any] = ()


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

    A generator, so that a caller who is interrupted keeps what has been measured. Decoders, by name, hold
    "none"; `device` is where the model is, for its memory.
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
                (kind, peak), joules = watch_memory(device), count_energy(device)
                started = clock()
                decoded = decoders[name](batch)
                seconds = clock() - started
                yield TimedRun(
                    name, repeat, index, batch[0].category, seconds, decoded, peak(), kind, joules()
                )
