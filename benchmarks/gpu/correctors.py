"""Rounds of corrected Jacobi decoding on the shape of LlamaGen-XL: what a pass of the head costs there."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch

from benchmarks.gpu.steps import SHAPES
from benchmarks.rounds import RoundShape, measure_round
from mmspec.methods.cjd.drafter import CorrectedDrafter
from mmspec.methods.cjd.head import CorrectorConfig, CorrectorHead
from mmspec.trees.jacobi import JacobiDrafter

__all__ = ["time_correctors"]

SHAPE = "llamagen-xl"
WINDOW, PASSES = 32, (1, 2, 4)


def time_correctors(
    device: torch.device, dtype: torch.dtype, *, tiny: bool = False
) -> Iterator[dict[str, Any]]:
    """Time rounds of `sjd` and of `cjd` with several numbers of passes, also compiled, at batch 1 and 8.

    Weights are random: a round costs the same whatever it accepts.

    Yields:
        A row for each: ms of the target's forward, of the draft and of the round, and the draft's share of
        the forward; or `error`.
    """
    shape = SHAPES[SHAPE]
    with torch.device(device):
        target = shape.adapt(shape.build(tiny).to(dtype).eval())
        config = CorrectorConfig.for_target(target.config, target.vocabulary, num_heads=2 if tiny else 4)
        head: Any = CorrectorHead(config)
    head = head.to(dtype).eval()
    window = 6 if tiny else WINDOW
    drafters: dict[str, Any] = {"sjd": JacobiDrafter(window)}
    for passes in PASSES:
        drafters[f"cjd, passes={passes}"] = CorrectedDrafter(head, window, window - 1, passes=passes)
    if not tiny:  # compiling takes longer than all the rest of a rehearsal
        drafters["cjd, passes=2, compiled"] = CorrectedDrafter(head, window, window - 1, passes=2)
        drafters["cjd, passes=2, compiled"].compile()
    for batch, name in product((1, 2) if tiny else (1, 8), drafters):
        row: dict[str, Any] = {"shape": SHAPE, "method": name, "batch": batch, "nodes": window}
        size = RoundShape(batch, window, 12 if tiny else shape.context)
        try:
            how: dict[str, Any] = {"rounds": 3 if tiny else 16, "sampler": shape.sampler}
            time = measure_round(target, size, drafter=drafters[name], **how)
            row |= {"target": 1000 * time.target, "draft": 1000 * time.draft, "ms": 1000 * time.seconds}
            row["draft_over_target"] = time.draft / time.target
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {error}"[:500]
        yield row
