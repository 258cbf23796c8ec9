"""Stop buttons: a flag for each visitor, which the work at hand looks at after every round."""

from __future__ import annotations

import threading

__all__ = ["Stops"]


class Stops:
    """Flags by session. One is fresh from the click that begins, so that waiting work can be stopped too."""

    def __init__(self) -> None:
        self._flags: dict[str, threading.Event] = {}

    def begin(self, session: str | None) -> None:
        """Give a session a fresh flag."""
        self._flags[session or ""] = threading.Event()

    def flag(self, session: str | None) -> threading.Event:
        """The flag of what the session began last."""
        return self._flags.setdefault(session or "", threading.Event())

    def stop(self, session: str | None) -> None:
        """Stop what the session began last; nothing if there is none."""
        if flag := self._flags.get(session or ""):
            flag.set()

    def leave(self, session: str | None) -> None:
        """Stop what the session began last, and forget the session."""
        self.stop(session)
        self._flags.pop(session or "", None)
