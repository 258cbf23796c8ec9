"""Accelerators decoding one prompt side by side, and the conversation as HTML, coloured by token origin."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from html import escape
from itertools import groupby
from typing import TYPE_CHECKING

from mmspec.demo.theme import figures, tags, title
from mmspec.open_types import Processor
from mmspec.pipelines.text_stream import TextDeltas

if TYPE_CHECKING:
    from mmspec.core.statistics import DecodingStats
    from mmspec.pipelines import TextOutput

__all__ = ["EMPTY", "Lane", "coloured_text", "comparison", "legend", "race", "transcript", "turn"]


@dataclass(eq=False)
class Lane:
    """One accelerator that decodes an answer.

    Attributes:
        name: the accelerator's name.
        rounds: the output after each round, as `VisionLanguagePipeline.watch` yields it.
        tokenizer: the model's tokenizer.
        output: the newest output.
        pieces: the text that each token of the output completed.
        finished: whether the newest output is the last.
    """

    name: str
    rounds: Generator[TextOutput, None, None]
    tokenizer: Processor
    output: TextOutput | None = None
    pieces: list[str] = field(default_factory=list)
    finished: bool = False

    def __post_init__(self) -> None:
        self._deltas = TextDeltas(self.tokenizer)

    @property
    def seconds(self) -> float:
        """Decoding time of this lane alone."""
        return 0.0 if self.output is None else self.output.stats.seconds

    def advance(self) -> None:
        """Decode one round."""
        output = next(self.rounds, None)
        if output is None:
            self.finished = True
            if self.pieces:
                self.pieces[-1] += self._deltas.finish()
            return
        self.output = output
        self.pieces += [self._deltas.add([token]) for token in output.tokens[0][len(self.pieces) :]]


def race(lanes: Sequence[Lane]) -> Generator[Lane, None, None]:
    """Advance lanes to their ends, always the lane with the least time; yield that lane.

    At any moment all lanes thus show what each would show alone after the same time. Closing the iterator
    closes all lanes.
    """
    with ExitStack() as stack:
        for lane in lanes:
            stack.enter_context(closing(lane.rounds))
        while running := [lane for lane in lanes if not lane.finished]:
            behind = min(running, key=lambda lane: lane.seconds)
            behind.advance()
            yield behind


NAMES = {True: "drafted", False: "own"}
TITLES = {True: "draft token, accepted by the model", False: "the model's own token"}


def coloured_text(pieces: Sequence[str], drafted: Sequence[bool]) -> str:
    """Mark up the text of each token by its origin; adjacent tokens of one origin share a mark.

    Raises:
        ValueError: the numbers of pieces and flags differ.
    """
    shown = [(piece, flag) for piece, flag in zip(pieces, drafted, strict=True) if piece]
    runs = groupby(shown, key=lambda one: one[1])
    return "".join(mark("".join(piece for piece, _ in run), flag) for flag, run in runs)


def mark(text: str, drafted: bool) -> str:
    """Mark text of one origin, except the space before it, where lines break."""
    words = text.lstrip()
    space = text[: len(text) - len(words)]
    return f'{space}<span class="mm-{NAMES[drafted]}">{escape(words)}</span>' if words else space


def legend() -> str:
    """Legend of the colours as HTML."""
    marks = (f'<span class="mm-{NAMES[flag]}">{TITLES[flag]}</span>' for flag in (True, False))
    return f'<p class="mm-legend">{" ".join(marks)}</p>'


EMPTY = (
    '<p class="mm-empty">Choose an image and ask a question. The answer appears here as it is decoded.</p>'
)
REASONS = {"interrupted": "stopped", "length": "cut at the limit", "error": "failed"}


def transcript(turns: Sequence[str]) -> str:
    """The turns of a conversation as HTML."""
    if not turns:
        return EMPTY
    return f'<div class="mm-talk" role="log">{legend()}{"".join(turns)}</div>'


def turn(question: str, lanes: Sequence[Lane]) -> str:
    """A question and the answers so far as HTML."""
    cards = "".join(map(card, lanes))
    return f'<p class="mm-question">{escape(question)}</p><div class="mm-cards">{cards}</div>{verdict(lanes)}'


def card(lane: Lane) -> str:
    """The answer of one lane so far as HTML."""
    output = lane.output
    if output is None:
        return f'<section class="mm-card"><header><b>{escape(lane.name)}</b></header></section>'
    stats, reason = output.stats, output.finish_reasons[0]
    words = [stats.exactness] if lane.name != "none" else []
    words += [REASONS.get(reason, "done")] if lane.finished else []
    shown = {
        "tokens per forward pass": f"{stats.acceptance_length:.2f}",
        "tokens": str(stats.new_tokens[0]),
        "forward passes": str(stats.target_forwards),
        "seconds": f"{stats.seconds:.2f}",
    }
    return (
        f'<section class="mm-card" data-lane="{escape(lane.name)}" '
        f'data-finished="{str(lane.finished).lower()}"><header><b>{escape(title(lane.name))}</b>'
        f'{tags(words)}</header><p class="mm-text">{coloured_text(lane.pieces, output.drafted[0])}</p>'
        f"{figures(shown)}</section>"
    )


def verdict(lanes: Sequence[Lane]) -> str:
    """Comparison of two lanes as HTML; "" unless both are complete."""
    outputs = [lane.output for lane in lanes if lane.finished and lane.output is not None]
    if len(outputs) < 2 or any(output.finish_reasons[0] == "interrupted" for output in outputs):
        return ""
    plain, fast = outputs
    compared = comparison("tokens", plain.tokens == fast.tokens, plain.stats, fast.stats)
    return (
        f"{compared}"
        '<p class="mm-note">The two take turns on one machine; the time of each excludes the other.</p>'
    )


def comparison(what: str, is_same: bool, plain: DecodingStats, fast: DecodingStats) -> str:
    """Comparison of two outputs as HTML: whether they are the same, forward passes, and times.

    Args:
        what: the compared part of the outputs, in words.
        is_same: whether it is equal.
        plain, fast: statistics of plain decoding and of the accelerator.
    """
    forwards = f"{fast.target_forwards} forward passes instead of {plain.target_forwards}"
    words = f"The same {what}" if is_same else f"Other {what}"
    times = plain.seconds / fast.seconds
    speed = (
        f"{times:.1f} times as fast as plain decoding"
        if times >= 1
        else f"slower than plain decoding: {times:.2f} times its speed"
    )
    colour = "" if times >= 1 else " mm-slow"
    return f'<p class="mm-verdict{colour}">{words} in {forwards}, {speed}.</p>'
