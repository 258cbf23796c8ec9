"""An image while it is drawn: its preview, the forward pass that committed each cell, and figures as HTML."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from mmspec.accelerators import options_of
from mmspec.core.image_grid import FREE, Layout
from mmspec.demo.theme import figures, tags, title
from mmspec.errors import MMSpecError
from mmspec.evaluation.contenders import describe_accelerator
from mmspec.media.images import data_url
from mmspec.open_types import Json, Keywords
from mmspec.pipelines import ContinuousImagePipeline, ImageGenerationPipeline
from mmspec.plugins import METHODS

if TYPE_CHECKING:
    from mmspec.accelerator import Accelerator
    from mmspec.pipelines.image_generation import ImageCall

__all__ = [
    "CommitMap",
    "Drawing",
    "Methods",
    "NOTHING",
    "draw",
    "gallery",
    "heat_image",
    "heat_map",
    "report",
]

OPEN = -1
#: Methods with other options, which draw other images from the same seed.
ORDERS: dict[str, tuple[str, Json]] = {
    "lpd:order=diagonal": ("lpd", {"order": "diagonal"}),
    "lpd:order=raster": ("lpd", {"order": "raster"}),
    "maskgit:iterations=16": ("maskgit", {"iterations": 16}),
}
#: Evenly spaced from dark to bright, distinguishable with colour-blindness: one cell to the most cells.
COLOURS = np.array([(49, 46, 129), (37, 99, 165), (16, 152, 151), (92, 200, 99), (250, 204, 21)], float)


class CommitMap:
    """The forward pass that committed each cell of an image, or of its last grid if it has several."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._forward = np.full(layout.length, OPEN)
        self._forwards = 0

    def add(self, decided: Sequence[bool] | np.ndarray) -> None:
        """Record a forward pass: whether each output index is decided; missing indices are undecided."""
        known = np.zeros(self._layout.length, bool)
        known[: len(decided)] = np.asarray(decided, bool)[: self._layout.length]
        self._forward[known & (self._forward == OPEN)] = self._forwards
        self._forwards += 1

    @property
    def counts(self) -> np.ndarray:
        """[rows, columns] number of cells that each cell's forward pass committed; 0 for an open cell."""
        grid = self._layout.image
        cells = self._forward[np.array(self._layout.forced) == FREE][-grid.cells :]
        committed = np.bincount(cells[cells != OPEN], minlength=1)
        counts = np.where(cells == OPEN, 0, committed[cells])
        return counts.reshape(grid.rows, grid.columns)


def heat_image(counts: np.ndarray, most: int) -> Image.Image:
    """Counts [rows, columns] as an image with a pixel each; `most` is the brightest, 0 is transparent."""
    place = np.clip((counts - 1) / max(most - 1, 1), 0, 1) * (len(COLOURS) - 1)
    colours = np.stack([np.interp(place, range(len(COLOURS)), COLOURS[:, k]) for k in range(3)], -1)
    opaque = np.where(counts > 0, 255, 0)[..., None]
    return Image.fromarray(np.concatenate([colours.round(), opaque], -1).astype(np.uint8))


def heat_map(counts: np.ndarray, most: int | None = None) -> str:
    """Counts [rows, columns] as HTML, with a scale up to `most`, or to the largest count."""
    largest, (rows, columns) = int(counts.max(initial=0)), counts.shape
    most = max(largest if most is None else most, 1)
    said = f"{rows} by {columns} cells; one forward pass committed up to {largest} of them"
    return (
        f'<figure class="mm-heat"><img alt="{said}" src="{data_url(heat_image(counts, most))}" '
        f'style="aspect-ratio: {columns} / {rows}"><figcaption><span>1</span><i></i><span>{most}</span>'
        "</figcaption></figure>"
    )


@dataclass(eq=False)
class Drawing:
    """An image while it is drawn.

    Attributes:
        method: name of the accelerator.
        promise: "exact", "tv<=x", "approximate", or "lossy" with its bound in words.
        call: the pipeline's call.
        commits: the forward pass that committed each cell.
        state: "running", "done" or "stopped".
    """

    method: str
    promise: str
    call: ImageCall
    commits: CommitMap
    state: str = "running"
    _last: Image.Image | None = None

    @property
    def share(self) -> float:
        """Share of the image that is committed."""
        return min(self.call.committed / self.call.layout.length, 1.0)

    def picture(self) -> Image.Image:
        """The image so far, grey where it is open; a finished drawing is decoded once."""
        if self._last is not None:
            return self._last
        preview: Image.Image = self.call.progress()["preview"]()[0]
        if self.state != "running":
            self._last = preview
        return preview

    def figures(self) -> dict[str, str]:
        """Figures by name."""
        mean = self.call.calls[-1].stats.tv_mean
        return {
            "tokens per forward pass": f"{self.call.committed / max(self.forwards, 1):.2f}",
            "forward passes": str(self.forwards),
            "seconds": f"{self.seconds:.2f}",
            **({} if mean is None else {"mean TV": f"{mean:.3f}"}),
        }

    @property
    def forwards(self) -> int:
        """Forward passes of the target so far."""
        return self.call.calls[-1].stats.target_forwards

    @property
    def seconds(self) -> float:
        """Decoding time so far, without the conversion of tokens to pixels."""
        return self.call.calls[-1].stats.seconds


class Methods:
    """The accelerators that fit a pipeline, with the user's own drafters; each is loaded once."""

    def __init__(
        self, pipe: ImageGenerationPipeline, drafters: Mapping[str, Mapping[str, object]] | None = None
    ) -> None:
        self._pipe, self._drafters = pipe, dict(drafters or {})
        self._made: dict[str, tuple[Json, Accelerator]] = {}
        self.names = [name for name in METHODS if self._fits(name)]
        self.names += [label for label, (name, _) in ORDERS.items() if name in self.names]

    def takes(self, name: str, option: str) -> bool:
        """Whether a method has an option of the page: "window" (Jacobi windows only) or "delta"."""
        options = options_of(METHODS[preset_of(name)[0]])
        return option in options and "zipar_window" not in options

    def taking(self, option: str) -> list[str]:
        """Names of the methods that have an option of the page."""
        return [name for name in self.names if self.takes(name, option)]

    def enter(self, name: str, **options: Any) -> Accelerator:
        """Set the pipeline to a method with its share of the options; None leaves a method's default.

        Raises:
            InputError: the method does not fit the pipeline, or a value is out of range.
        """
        own = {key: value for key, value in options.items() if value is not None and self.takes(name, key)}
        preset, more = preset_of(name)
        own |= more | dict(self._drafters.get(name, {}))
        made = self._made.get(name)
        if made is not None and made[0] == own:
            self._pipe.set_accelerator(made[1])
        else:
            self._pipe.set_accelerator(preset, **own)
            self._made[name] = own, self._pipe.accelerator
        return self._pipe.accelerator

    def _fits(self, name: str) -> bool:
        try:
            self.enter(name)
        except MMSpecError:
            return False
        return True


def preset_of(method: str) -> tuple[str, Keywords]:
    """The preset of a method, and its options."""
    return ORDERS.get(method, (method, {}))


def draw(
    pipe: ImageGenerationPipeline,
    methods: Methods,
    method: str,
    options: Mapping[str, object],
    what: Mapping[str, object],
    flag: threading.Event,
) -> Iterator[Drawing]:
    """Draw one image, yielding it after every forward pass and once at the end.

    Decoding stops within a round once the flag is set. Options that the method lacks are ignored.

    Raises:
        InputError: the method or the pipeline rejects an argument.
    """
    promise = describe_accelerator(methods.enter(method, **options))["promise"]
    settings = dict(what)
    if isinstance(pipe, ContinuousImagePipeline):  # exact speculation needs it; set it for all methods
        settings["last_step_noise"] = True
    drawing = None
    with closing(pipe.watch(**settings)) as rounds:
        for call in rounds:
            if drawing is None:
                drawing = Drawing(method, promise, call, CommitMap(call.layout))
            drawing.commits.add(call.calls[-1].canvas.decided[0].tolist())
            if flag.is_set():
                drawing.state = "stopped"
                break
            yield drawing
    if drawing is not None:
        drawing.state = "done" if drawing.state == "running" else drawing.state
        yield drawing


NOTHING = '<p class="mm-empty">Choose methods and press Compare: each draws the same prompt and seed.</p>'
NOTE = (
    "All methods have the same prompt and seed. The colour of a cell shows how many cells its forward pass "
    "committed. Seconds exclude the conversion to pixels; the methods run one after another."
)


def gallery(drawings: Sequence[Drawing], *, whole: bool) -> str:
    """Drawings side by side as HTML, with heat maps on one scale.

    Args:
        drawings: drawings, which are compared with the first if that is plain decoding.
        whole: whether the comparison is complete.
    """
    if not drawings:
        return NOTHING
    most = max(int(one.commits.counts.max(initial=1)) for one in drawings)
    plain = drawings[0] if drawings[0].method == "none" and drawings[0].state == "done" else None
    cards = "".join(card(one, plain, most) for one in drawings)
    done = ' data-done=""' if whole else ""
    return f'<div{done}><div class="mm-cards mm-small">{cards}</div><p class="mm-note">{NOTE}</p></div>'


def card(drawing: Drawing, plain: Drawing | None, most: int) -> str:
    """One drawing with its heat map and its figures as HTML."""
    compared = ""
    if plain is not None and plain is not drawing and drawing.state == "done":
        share, times = drawing.forwards / plain.forwards, plain.seconds / max(drawing.seconds, 1e-9)
        won, speed = (" mm-won", "the speed") if times >= 1 else (" mm-slow", "the speed: slower")
        compared = f'<span class="mm-tag{won}">{share:.0%} of the forward passes, {times:.2g}x {speed}</span>'
    alt = escape(f"drawn by {title(drawing.method)}")
    url = data_url(drawing.picture(), "WEBP", quality=92)  # compact, since it is sent many times
    picture = f'<img class="mm-picture" alt="{alt}" src="{url}">'
    return report(
        drawing, compared, f'<div class="mm-pair">{picture}{heat_map(drawing.commits.counts, most)}</div>'
    )


def report(drawing: Drawing, compared: str = "", picture: str = "") -> str:
    """The figures of a drawing as HTML, below a tag and an image."""
    marks = tags([drawing.promise, *(["stopped"] if drawing.state == "stopped" else [])]) + compared
    name = escape(title(drawing.method))
    bar = f'<div class="mm-bar"><i style="width: {drawing.share:.0%}"></i></div>'
    shown = picture + (bar if drawing.state != "done" or not picture else "") + figures(drawing.figures())
    return (
        f'<section class="mm-card" data-method="{name}" data-state="{drawing.state}">'
        f"<header><b>{name}</b>{marks}</header>{shown}</section>"
    )
