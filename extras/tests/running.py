"""Requests that enter a running batch one after another."""

from __future__ import annotations

from typing import Any

from tests.tiny_models import tiny_images

ASKED: list[tuple[str, dict[str, Any]]] = [
    ("what is there ?", {"images": tiny_images()[:1], "max_new_tokens": 20}),
    ("red", {"max_new_tokens": 6}),
    ("which colour ?", {"images": tiny_images()[1:2], "max_new_tokens": 14, "temperature": 0.9, "seed": 3}),
]


def outputs_of(pipe: Any, more_tokens: int = 0) -> list[Any]:
    """The outputs of `ASKED` in a running batch; a round is decoded before the next one enters."""
    found: dict[int, Any] = {}
    with pipe.running_batch(rows=len(ASKED)) as batch:
        for prompt, settings in longer(more_tokens):
            batch.enter(prompt, **settings)
            found |= {each.handle: each.output for each in batch.step()}
        while batch.handles:
            found |= {each.handle: each.output for each in batch.step() if each.output}
    return [found[index] for index in range(len(ASKED))]


def outputs_alone(pipe: Any, more_tokens: int = 0) -> list[Any]:
    """The outputs of `ASKED`, one call each."""
    return [pipe(prompt, **settings) for prompt, settings in longer(more_tokens)]


def longer(tokens: int) -> list[tuple[str, dict[str, Any]]]:
    """`ASKED` with so many more tokens each."""
    return [
        (prompt, {**settings, "max_new_tokens": settings["max_new_tokens"] + tokens})
        for prompt, settings in ASKED
    ]
