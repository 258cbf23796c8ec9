"""A small ParallelBench (2510.04767): accuracy of rules that decide several places at once.

    python -m benchmarks.parallel_bench                    # every rule, every task
    python -m benchmarks.parallel_bench --words 6 --samples 4000

The tasks are those of ParallelBench's waiting line: copy a list, replace one random word of it, shuffle it.
Tables of the exact conditional distributions replace the model. A perfect model is always right if it decides
one place at a time. If it decides all n places at once, it is right in 1, (1 - 1/n)^(n - 1) and n!/n^n of the
cases.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from mmspec.places.policies import PlaceRule, Places
from mmspec.plugins import RULES

__all__ = ["TASKS", "conditionals", "decode", "is_right"]

TASKS = ("copy", "replace", "shuffle")
OPEN = -1
#: The compared rules, with the settings of their curves.
CURVES: dict[str, list[dict[str, float]]] = {
    "low_confidence": [{"places_per_step": count} for count in (1, 2, 5, 10)],
    "threshold": [{"threshold": bar} for bar in (0.9, 0.5, 0.2, 0.0)],
    "entropy_bound": [{"entropy_bound": bound} for bound in (0.1, 1.0, 4.0)],
}


def conditionals(task: str, canvas: Tensor) -> Tensor:
    """Return the probabilities [B, n, n + 1] of words at all places, given the decided words.

    Args:
        task: one of `TASKS`. The list is 0, 1, ... n - 1. The task "replace" replaces one word by the word n.
        canvas: [B, n] words; `OPEN` at undecided places.
    """
    rows, count = canvas.shape
    own = torch.eye(count, count + 1).expand(rows, -1, -1)
    if task == "copy":
        return own
    if task == "replace":
        is_done = (canvas == count).any(-1, keepdim=True)
        share = (~is_done / (canvas == OPEN).sum(-1, keepdim=True).clamp_min(1))[:, :, None]
        new = torch.zeros(count + 1).index_fill(0, torch.tensor(count), 1.0)
        return (1 - share) * own + share * new
    used = torch.zeros(rows, count + 2).scatter(1, canvas.where(canvas >= 0, count + 1), 1.0)[:, :count]
    left = torch.cat([1 - used, torch.zeros(rows, 1)], 1)
    return (left / left.sum(-1, keepdim=True).clamp_min(1))[:, None].expand(-1, count, -1)


def is_right(task: str, canvas: Tensor) -> Tensor:
    """Return whether the task allows each of the outputs [B, n]: bool [B]."""
    count = canvas.shape[1]
    changed = (canvas != torch.arange(count)).sum(-1)
    if task == "copy":
        return changed == 0
    if task == "replace":
        return (changed == 1) & ((canvas == count).sum(-1) == 1)
    return (canvas.sort(-1).values == torch.arange(count)).all(-1)


def decode(task: str, rule: PlaceRule, words: int, samples: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Decode a task `samples` times with a rule, sampling at temperature 1.

    Returns:
        Outputs [B, n], and the forward passes of each [B].
    """
    noise = torch.Generator().manual_seed(seed)
    canvas = torch.full((samples, words), OPEN)
    forwards = torch.zeros(samples, dtype=torch.long)
    while (is_open := canvas == OPEN).any():
        logits = conditionals(task, canvas).log()
        gumbel = -torch.empty(logits.shape).exponential_(generator=noise).log()
        token = (logits + gumbel).argmax(-1)
        nothing = torch.zeros(samples, dtype=torch.long)
        places = Places(token, logits, logits, is_open, torch.ones_like(is_open), nothing, words)
        chosen = rule.chosen(places)
        forwards += is_open.any(-1)
        canvas = torch.where(chosen, token, canvas)
    return canvas, forwards


def main(
    words: Annotated[int, typer.Option(min=2, help="Words of the list.")] = 10,
    samples: Annotated[int, typer.Option(min=1, help="Lists per task and setting.")] = 2000,
) -> None:
    """Print tokens per forward pass and the share of correct lists for every rule and task."""
    table = Table("rule", *(f"{task}: tokens per forward pass, right" for task in TASKS))
    for name, settings in CURVES.items():
        rule: Callable[..., PlaceRule] = RULES[name]  # type: ignore[assignment]
        for given in settings:
            cells = []
            for task in TASKS:
                outputs, forwards = decode(task, rule(**given), words, samples)
                speed = words / forwards.double().mean().item()
                cells.append(f"{speed:.2f}, {is_right(task, outputs).double().mean().item():.1%}")
            shown = ":".join([name, *(f"{key}={value:g}" for key, value in given.items())])
            table.add_row(shown, *cells)
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
