"""Milliseconds of the scoring forward passes of a language model on a CPU, by number of nodes.

Each size is measured with torch's linear layers, and with the fastest implementation on the machine
(mmspec/models/linear_layers.py), in turns. The prefill of the prompt is measured too.

    python -m benchmarks.forward_costs runs/smollm2 --threads 1
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from statistics import median
from time import perf_counter
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from tqdm import tqdm

from mmspec import MMSpecPipeline
from mmspec.core.draft import DraftKind, Tree
from mmspec.evaluation.tables import figures

SIZES = (1, 2, 3, 4, 6, 9, 13, 17, 25, 33)
PROMPT = 300  # tokens
WIDTH = 140  # of the table


def main(
    model: Annotated[str, typer.Argument(help="Folder of a language model.")],
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.")] = None,
    passes: Annotated[int, typer.Option(min=1, help="Forward passes per size, for the median.")] = 15,
) -> None:
    """Print the median times of both implementations."""
    if threads is not None:
        torch.set_num_threads(threads)
    pipe: Any = MMSpecPipeline.from_pretrained(model, accelerator="none")
    ways = {"as torch does": nullcontext, "fastest": pipe.target.computing()}
    print_costs(pipe.target, ways, passes)


@torch.inference_mode()
def print_costs(
    target: Any, ways: dict[str, Callable[[], AbstractContextManager[None]]], passes: int
) -> None:
    """Measure scoring forward passes and the prefill of a prompt, with all sizes and ways in turns.

    Args:
        target: a target of a language model.
        ways: names of the implementations, with functions that return their context managers.
        passes: measured forward passes of each size and way.
    """
    prompt = {"input_ids": torch.arange(PROMPT)[None] % target.vocabulary}
    found: dict[tuple[str, int], list[float]] = {(way, size): [] for way in ways for size in (0, *SIZES)}
    state, _ = target.prefill([prompt], PROMPT + max(SIZES) + 1)
    for _ in tqdm(range(passes + 1), unit="pass"):  # the first packs weights and is not counted
        for (way, size), seconds in found.items():
            draft = Tree.chain(prompt["input_ids"][:, -1:].expand(1, size), DraftKind.POINT)
            begun = perf_counter()
            with ways[way]():
                if size:
                    target.score(state, draft)
                else:
                    target.prefill([prompt], PROMPT)[0].close()
            seconds.append(perf_counter() - begun)
    state.close()
    rows = []
    for way in ways:
        taken = {size: median(found[way, size][1:]) * 1e3 for size in (0, *SIZES)}
        rows.append((way, *(f"{taken[size]:.1f}" for size in (*SIZES, 0)), f"{taken[9] / taken[1]:.2f}"))
    Console(width=WIDTH).print(figures(("ms", *map(str, SIZES), f"prompt of {PROMPT}", "9 / 1"), rows))


if __name__ == "__main__":
    typer.run(main)
