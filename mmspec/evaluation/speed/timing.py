"""Timing of several accelerators on the same prompts in one run, with peak memory and energy.

Every repeat runs all accelerators on one batch before the next batch, in rotating order, so that a slower
machine affects all of them.
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
    """Start to count the energy of a GPU, including all other work on it.

    Returns:
        Function that returns the joules since this call; or None on a device without a counter.
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
    """Start to measure the peak memory of a model on a device.

    Returns:
        The name of the counter: "cuda allocated", "resident set" (of the process during the work, weights
        included), or "resident set since start" if the system cannot reset the peak; and a function that
        returns the peak in bytes.
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
        tokens: one list of output ids per conversation, with the tokens of all turns.
        stats: statistics of each pipeline call (one call per turn).
        pixel_seconds: wall-clock from image tokens to pixels; 0 without images.
        images: the generated images, in the requested output form; () without images.
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
        seconds: wall-clock from the prompts to the last token on the host, image preprocessing included, or
            to the last pixel of generated images.
        joules: energy of the device in that time; None if its driver does not report energy.
        peak_bytes: peak memory in that time; `memory_kind` names the counter.
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
    """Split examples into batches of at most `size` examples of one category."""
    if size < 1:
        raise InputError("batch_size", size, "must be an integer of at least 1")
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
    """Time every decoder on every batch, `repeats` times, after a warm-up that is not reported.

    This is a generator, so that an interrupted caller keeps the finished runs. `decoders` must contain
    "none"; `device` is the model's device, for memory and energy.
    """
    if BASELINE not in decoders:
        raise InputError("accelerators", list(decoders), f"must contain {BASELINE!r}, the base of all ratios")
    if repeats < 1:
        raise InputError("repeats", repeats, "must be an integer of at least 1")
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
