"""Drawings as HTML: the figures of one, or several of the same prompt and seed beside each other."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from mmspec.demo.drawing import Drawing, heat_map
from mmspec.demo.theme import figures, tags
from mmspec.media.images import data_url

__all__ = ["NOTHING", "gallery", "report"]

NOTHING = '<p class="mm-empty">Choose methods and compare: the same seed, drawn by each in turn.</p>'
NOTE = (
    "One prompt, one seed. Heat: cells committed by the forward that committed each. Seconds are those of "
    "the model, one method after another on this machine, without the decoder to pixels."
)


def gallery(drawings: Sequence[Drawing], *, whole: bool) -> str:
    """Show drawings beside each other, their heat maps on one scale.

    Args:
        drawings: the first is what the others are compared with, where it is plain decoding.
        whole: whether there are no more to come.
    """
    if not drawings:
        return NOTHING
    most = max(int(one.commits.counts.max(initial=1)) for one in drawings)
    plain = drawings[0] if drawings[0].method == "none" and drawings[0].state == "done" else None
    cards = "".join(card(one, plain, most) for one in drawings)
    done = ' data-done=""' if whole else ""
    return f'<div{done}><div class="mm-cards mm-small">{cards}</div><p class="mm-note">{NOTE}</p></div>'


def card(drawing: Drawing, plain: Drawing | None, most: int) -> str:
    """Show one drawing with its heat map and its figures."""
    compared = ""
    if plain is not None and plain is not drawing and drawing.state == "done":
        share, times = drawing.forwards / plain.forwards, plain.seconds / max(drawing.seconds, 1e-9)
        won = " mm-won" if times >= 1 else ""
        compared = f'<span class="mm-tag{won}">{share:.0%} of the forwards, {times:.2g}x the speed</span>'
    alt = escape(f"drawn by {drawing.title}")
    url = data_url(drawing.picture(), "WEBP", quality=92)  # small: it is sent many times
    picture = f'<img class="mm-picture" alt="{alt}" src="{url}">'
    return report(
        drawing, compared, f'<div class="mm-pair">{picture}{heat_map(drawing.commits.counts, most)}</div>'
    )


def report(drawing: Drawing, compared: str = "", picture: str = "") -> str:
    """Show the figures of a drawing, with a tag and a picture above them."""
    marks = tags([drawing.promise, *(["stopped"] if drawing.state == "stopped" else [])]) + compared
    bar = f'<div class="mm-bar"><i style="width: {drawing.share:.0%}"></i></div>'
    shown = picture + (bar if drawing.state != "done" or not picture else "") + figures(drawing.figures())
    return (
        f'<section class="mm-card" data-method="{escape(drawing.title)}" data-state="{drawing.state}">'
        f"<header><b>{escape(drawing.title)}</b>{marks}</header>{shown}</section>"
    )
