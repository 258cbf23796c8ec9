"""Total variation between the distribution that each cell was drawn from and the target's.

A cell that is decoded before its whole context is known is drawn from another distribution than in raster
order. The round that decides the cell records one distribution, and one forward pass over the finished image
returns the other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmspec.accelerator import Call
from mmspec.core.image_grid import FREE
from mmspec.core.indexing import pick
from mmspec.core.interfaces import Round
from mmspec.core.statistics import DecodingStats
from mmspec.core.verdict import Path
from mmspec.evaluation.identity.distribution import read_distributions

__all__ = ["drawn_in", "measure_variation"]


def measure_variation(prepared: Any) -> DecodingStats:
    """Decode a prepared batch of images (`prepare_images`), and measure the total variation of its tokens.

    Returns:
        The statistics of the batch, with `tv_mean` and `tv_max`.
    """
    drawn_from: dict[tuple[int, int], Tensor] = {}  # (row, output index) -> [V]
    for step in prepared.rounds(is_watched=True):
        drawn_from |= drawn_in(step)
    call: Call = prepared.calls[-1]
    for row, (request, output) in enumerate(zip(call.requests, call.canvas.outputs(), strict=True)):
        distribution = read_distributions(call.target, call.sampler.part([row]), request, output)
        for place in range(1, len(output)):  # prefill returns the distribution of the first token
            drawn, layout = drawn_from.get((row, place)), request.layout
            if drawn is None or (layout is not None and layout.forced[place] != FREE):
                continue
            distance = float((drawn - distribution[place]).abs().sum() / 2)
            call.stats.count_measured("tv", distance, distance, 1)
    return call.stats


def drawn_in(step: Round) -> dict[tuple[int, int], Tensor]:
    """Distributions [V] of the tokens that a round decided, by row and output index."""
    verdict, p = step.verdict, step.scores.p
    if isinstance(verdict, Path):
        p = pick(p, verdict.nodes)  # a value is drawn from the distribution of the node before it
        steps = torch.arange(p.shape[1], device=p.device)
        places, decided = step.first[:, None] + steps, steps < verdict.decided[:, None]
    else:
        places, decided = verdict.places, verdict.decided
    p = p.reshape(len(places), -1, p.shape[-1])
    return {
        (row, int(places[row, index])): p[row, index].clone() for row, index in decided.nonzero().tolist()
    }
