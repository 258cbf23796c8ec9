"""Times of the parts of a decoding loop: reading the prompts, drafting, scoring, verifying.

By the host's clock; or, where a benchmark asks for it, by events on the GPU, which cost no synchronisation
until the loop has ended.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from time import perf_counter
from typing import Any

import torch

from mmspec.decoding.stats import DecodingStats

__all__ = ["Laps", "timed_by_device"]

_by_device = ContextVar("by_device", default=False)


@contextmanager
def timed_by_device() -> Iterator[None]:
    """Time the loops that begin in here by events on their device, where it is a GPU.

    The host's clock there says how long work took to submit, not to run.
    """
    token = _by_device.set(True)
    try:
        yield
    finally:
        _by_device.reset(token)


class Laps:
    """Adds the seconds of each part to the `<part>_seconds` of statistics.

    On leaving the block, what the GPU's events say is added; the host waits for them.

    Args:
        stats: where the seconds go.
        device: that the parts run on.
    """

    def __init__(self, stats: DecodingStats, device: torch.device) -> None:
        self._stats = stats
        self._by_events = _by_device.get() and device.type == "cuda"
        self._laps: list[tuple[str, Any, Any]] = []
        self._last: Any = None

    def __enter__(self) -> Laps:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._laps:
            torch.cuda.synchronize()
        for part, begin, end in self._laps:
            self._add(part, begin.elapsed_time(end) / 1000)
        self._laps.clear()

    def start(self) -> None:
        """Begin a part here; what came since the last one belongs to none."""
        self._last = self._now()

    def end(self, part: str) -> None:
        """End a part here, and begin the next."""
        now = self._now()
        if self._by_events:
            self._laps.append((part, self._last, now))
        else:
            self._add(part, now - self._last)
        self._last = now

    def _now(self) -> Any:
        if not self._by_events:
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _add(self, part: str, seconds: float) -> None:
        name = f"{part}_seconds"
        setattr(self._stats, name, getattr(self._stats, name) + seconds)
