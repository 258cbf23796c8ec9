"""Times of rounds: by the host's clock on a CPU, by events on a GPU.

A GPU computes a round while the host reads the one before, so that the host's clock measures neither. Events
are recorded in its stream at both ends of a round. They are read after the round's report has arrived, which
was sent later than both, so that the host waits for nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable

import torch

__all__ = ["DeviceTimes", "HostTimes", "RoundTimes"]


class RoundTimes(ABC):
    """Times of rounds, which are read in the order in which the rounds began."""

    @abstractmethod
    def begin(self) -> None:
        """Mark the beginning of a round; a further call before its end replaces the mark."""

    def end(self) -> None:
        """Mark the end of the work that the host submits for a round."""
        return None

    @abstractmethod
    def read(self) -> float:
        """Return the seconds of the oldest round that was not read; its report must have arrived."""


class HostTimes(RoundTimes):
    """Times by the host's clock, from the beginning of a round to `read`; one round at a time.

    Args:
        clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._begun = clock, 0.0

    def begin(self) -> None:
        self._begun = self._clock()

    def read(self) -> float:
        return self._clock() - self._begun


class DeviceTimes(RoundTimes):
    """Times by the events of a GPU, for rounds that may be submitted before earlier ones are read."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rounds: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    def begin(self) -> None:
        self._begun = self._now()

    def end(self) -> None:
        self._rounds.append((self._begun, self._now()))

    def read(self) -> float:
        begun, ended = self._rounds.popleft()
        milliseconds: float = begun.elapsed_time(ended)
        return milliseconds / 1000

    def _now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event
