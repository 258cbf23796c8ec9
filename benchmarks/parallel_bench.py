"""ParallelBench in small: what it costs to decide several places at once, where it can be computed by hand.

    python -m benchmarks.parallel_bench                    # every rule, every task
    python -m benchmarks.parallel_bench --words 6 --samples 4000

Tasks of ParallelBench's waiting line (2510.04767) as tables of exact conditionals, in place of a model: copy
a list, replace one word of it at random, shuffle it. A perfect model that decides all n places at once is
right in 1, (1 - 1/n)^(n - 1) and n!/n^n of the cases; one place at a time it always is.
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
#: Rules that are compared, with the settings of their curves.
CURVES: dict[str, list[dict[str, float]]] = {
    "low_confidence": [{"places_per_step": count} for count in (1, 2, 5, 10)],
    "threshold": [{"threshold": bar} for bar in (0.9, 0.5, 0.2, 0.0)],
    "entropy_bound": [{"entropy_bound": bound} for bound in (0.1, 1.0, 4.0)],
}


def conditionals(task: str, canvas: Tensor) -> Tensor:
    """Probabilities [B, n, n + 1] of words at all places, given those that are decided.

    Args:
        task: of `TASKS`. The list is 0, 1, ... n - 1; the word n replaces one of them.
        canvas: [B, n] words, `OPEN` where none is decided.
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
    """[B] whether outputs [B, n] are among those that the task allows."""
    count = canvas.shape[1]
    changed = (canvas != torch.arange(count)).sum(-1)
    if task == "copy":
        return changed == 0
    if task == "replace":
        return (changed == 1) & ((canvas == count).sum(-1) == 1)
    return (canvas.sort(-1).values == torch.arange(count)).all(-1)


def decode(task: str, rule: PlaceRule, words: int, samples: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Decode a task many times by a rule, sampling at temperature 1.

    Returns:
        [B, n] outputs, and [B] forward passes that each took.
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
    words: Annotated[int, typer.Option(min=2, help="Places of the list.")] = 10,
    samples: Annotated[int, typer.Option(min=1, help="Lists of each task and setting.")] = 2000,
) -> None:
    """Print tokens per forward pass and the share of right lists, for every rule and task."""
    table = Table("rule", *(f"{task}: tokens a forward, right" for task in TASKS))
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
