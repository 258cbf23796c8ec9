"""Gallery as HTML: the same prompt and seed under several methods, with what each took and promises."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
from PIL import Image

from mmspec.demo.drawing import Drawing, heat_map
from mmspec.demo.theme import figures
from mmspec.media.images import data_url

__all__ = ["NOTHING", "Shown", "gallery"]

NOTHING = '<p class="mm-empty">Choose methods and compare: the same seed, drawn by each in turn.</p>'
NOTE = (
    "One prompt, one seed. Heat: cells committed by the forward that committed each. Seconds are those of "
    "the model, one method after another on this machine, without the decoder to pixels."
)


@dataclass(frozen=True)
class Shown:
    """A drawing as it stood at one moment.

    Attributes:
        title: of its method.
        promise: of its method.
        picture: what there was of it.
        counts: [rows, columns] as of a `CommitMap`.
        figures: by their names.
        share: part of the image that was there.
        state: "running", "done" or "stopped".
        forwards, seconds: that it took.
    """

    title: str
    promise: str
    picture: Image.Image
    counts: np.ndarray
    figures: dict[str, str]
    share: float
    state: str
    forwards: int
    seconds: float

    @classmethod
    def of(cls, drawing: Drawing) -> Shown:
        """A drawing as it stands."""
        return cls(
            "plain decoding" if drawing.method == "none" else drawing.method,
            drawing.promise,
            drawing.picture(),
            drawing.commits.counts,
            drawing.figures(),
            drawing.share,
            drawing.state,
            drawing.forwards,
            drawing.seconds,
        )


def gallery(shown: Sequence[Shown], *, whole: bool) -> str:
    """Show drawings beside each other, their heat maps on one scale.

    Args:
        shown: the first is what the others are compared with, where it is plain decoding.
        whole: whether there are no more to come.
    """
    if not shown:
        return NOTHING
    most = max(int(one.counts.max(initial=1)) for one in shown)
    plain = shown[0] if shown[0].title == "plain decoding" and shown[0].state == "done" else None
    cards = "".join(card(one, plain, most) for one in shown)
    done = ' data-done=""' if whole else ""
    return f'<div{done}><div class="mm-cards mm-small">{cards}</div><p class="mm-note">{NOTE}</p></div>'


def card(one: Shown, plain: Shown | None, most: int) -> str:
    """Show one drawing."""
    tags = [f'<span class="mm-tag">{escape(one.promise)}</span>']
    if plain is not None and plain is not one and one.state == "done":
        share, times = one.forwards / plain.forwards, plain.seconds / max(one.seconds, 1e-9)
        won = " mm-won" if times >= 1 else ""
        tags.append(f'<span class="mm-tag{won}">{share:.0%} of the forwards, {times:.2g}x the speed</span>')
    elif one.state == "stopped":
        tags.append('<span class="mm-tag">stopped</span>')
    bar = f'<div class="mm-bar"><i style="width: {one.share:.0%}"></i></div>' if one.state != "done" else ""
    alt = escape(f"drawn by {one.title}")
    header = f"<header><b>{escape(one.title)}</b>{''.join(tags)}</header>"
    url = data_url(one.picture, "WEBP", quality=92)  # small: it is sent many times
    picture = f'<img class="mm-picture" alt="{alt}" src="{url}">'
    return (
        f'<section class="mm-card" data-method="{escape(one.title)}">{header}<div class="mm-pair">{picture}'
        f"{heat_map(one.counts, most)}</div>{bar}{figures(one.figures)}</section>"
    )
