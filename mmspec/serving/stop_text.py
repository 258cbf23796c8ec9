"""Stop strings as OpenAI has them: the answer ends before one, and no part of one is sent."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["StopText"]


class StopText:
    """Cuts streamed text at the first stop string; holds back what may be the beginning of one.

    Args:
        stops: none of them empty.
        keeps: whether the stop string is left standing at the end of the text.
    """

    def __init__(self, stops: Sequence[str], keeps: bool = False) -> None:
        self._stops, self._keeps = stops, keeps
        self._held = ""
        self.has_ended = False

    def add(self, text: str) -> str:
        """Add text; return what can be sent."""
        if self.has_ended:
            return ""
        self._held += text
        found = [(place, stop) for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if found:
            self.has_ended = True
            place, stop = min(found)
            return self._give(place + len(stop) * self._keeps)
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stops):
                return self._give(len(self._held) - length)
        return self._give(len(self._held))

    def finish(self) -> str:
        """Return what was held back and turned out to be no stop string."""
        return "" if self.has_ended else self._give(len(self._held))

    def _give(self, count: int) -> str:
        given, self._held = self._held[:count], self._held[count:]
        return given
