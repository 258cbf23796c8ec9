"""Requests that enter a running batch one after another."""

from __future__ import annotations

from typing import Any


def outputs_of(pipe: Any, asked: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    """The output of each prompt with its settings; a round is decoded before the next one enters."""
    found: dict[int, Any] = {}
    with pipe.running_batch(rows=len(asked)) as batch:
        for prompt, settings in asked:
            batch.enter(prompt, **settings)
            found |= {each.handle: each.output for each in batch.step()}
        while batch.handles:
            found |= {each.handle: each.output for each in batch.step() if each.output}
    return [found[index] for index in range(len(asked))]
