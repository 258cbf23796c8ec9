"""Conversation as HTML: questions, and for each the answers of one or two lanes with their figures."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from mmspec.demo.coloured_text import coloured_text, legend
from mmspec.demo.race import Lane
from mmspec.demo.theme import figures

__all__ = ["EMPTY", "transcript", "turn"]

EMPTY = '<p class="mm-empty">Choose a picture, ask something, and watch the words arrive.</p>'
REASONS = {"interrupted": "stopped", "length": "cut at the limit", "error": "failed"}


def transcript(turns: Sequence[str]) -> str:
    """Show the turns of a conversation."""
    if not turns:
        return EMPTY
    return f'<div class="mm-talk" role="log">{legend()}{"".join(turns)}</div>'


def turn(question: str, lanes: Sequence[Lane]) -> str:
    """Show a question and the answers so far."""
    cards = "".join(map(card, lanes))
    return f'<p class="mm-question">{escape(question)}</p><div class="mm-cards">{cards}</div>{verdict(lanes)}'


def card(lane: Lane) -> str:
    """Show the answer of one lane so far."""
    output = lane.output
    if output is None:
        return f'<section class="mm-card"><header><b>{escape(lane.name)}</b></header></section>'
    stats, reason = output.stats, output.finish_reasons[0]
    tags = [stats.exactness] if lane.name != "none" else []
    if lane.finished:
        tags.append(REASONS.get(reason, "done"))
    shown = {
        "per forward": f"{stats.acceptance_length:.2f}",
        "tokens": str(stats.new_tokens[0]),
        "forwards": str(stats.target_forwards),
        "seconds": f"{stats.seconds:.2f}",
    }
    marks = "".join(f'<span class="mm-tag">{escape(tag)}</span>' for tag in tags)
    return (
        f'<section class="mm-card" data-lane="{escape(lane.name)}" '
        f'data-finished="{str(lane.finished).lower()}"><header><b>{escape(title(lane.name))}</b>{marks}'
        f'</header><p class="mm-text">{coloured_text(lane.pieces, output.drafted[0])}</p>'
        f"{figures(shown)}</section>"
    )


def title(name: str) -> str:
    """Name of a lane for people."""
    return "plain decoding" if name == "none" else name


def verdict(lanes: Sequence[Lane]) -> str:
    """Compare two lanes that have both come to their own ends; "" for others."""
    outputs = [lane.output for lane in lanes if lane.finished and lane.output is not None]
    if len(outputs) < 2 or any(output.finish_reasons[0] == "interrupted" for output in outputs):
        return ""
    plain, fast = outputs
    same = plain.tokens == fast.tokens
    forwards = f"{fast.stats.target_forwards} forwards instead of {plain.stats.target_forwards}"
    words = "The same tokens" if same else "Other tokens"
    times = plain.stats.seconds / fast.stats.seconds
    speed = f"{times:.1f} times as fast" if times >= 1 else f"at {times:.2f} of the speed"
    return (
        f'<p class="mm-verdict">{words} in {forwards}, {speed}.</p>'
        '<p class="mm-note">The two take turns on one machine; each is timed by its own work alone.</p>'
    )
