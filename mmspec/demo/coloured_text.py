"""Text as HTML in which every token is coloured by who proposed it."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import groupby

__all__ = ["coloured_text", "legend"]

NAMES = {True: "drafted", False: "own"}
TITLES = {True: "proposed by the draft, accepted by the model", False: "the model's own, one per forward"}


def coloured_text(pieces: Sequence[str], drafted: Sequence[bool]) -> str:
    """Mark up text by the origin of its tokens; neighbours of one origin share a mark.

    Args:
        pieces: the text of each token, joining to the whole; tokens that complete no text are empty.
        drafted: for each token, True if it came from the draft.

    Raises:
        ValueError: not one flag for each piece.
    """
    shown = [(piece, flag) for piece, flag in zip(pieces, drafted, strict=True) if piece]
    runs = [
        (flag, "".join(piece for piece, _ in run)) for flag, run in groupby(shown, key=lambda one: one[1])
    ]
    return "".join(mark(text, flag) for flag, text in runs)


def mark(text: str, drafted: bool) -> str:
    """Mark text of one origin, but not the space before it, at which lines break."""
    words = text.lstrip()
    space = text[: len(text) - len(words)]
    return f'{space}<span class="mm-{NAMES[drafted]}">{escape(words)}</span>' if words else space


def legend() -> str:
    """Legend of the colours, as HTML."""
    marks = (f'<span class="mm-{NAMES[flag]}">{TITLES[flag]}</span>' for flag in (True, False))
    return f'<p class="mm-legend">{" ".join(marks)}</p>'
