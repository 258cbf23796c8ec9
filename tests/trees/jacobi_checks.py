"""Toy models of images, for tests of windows.

`ImageTable` is an image of 2 x 2 cells over five codes with forced row ends, whose distribution is a table:
625 outputs, all of whose probabilities are known. `images()` is a small transformer.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from mmspec.accelerator import default_rule
from mmspec.core.canvas import Canvas
from mmspec.core.draft import Draft
from mmspec.core.image_grid import FREE, ImageGrid
from mmspec.core.interfaces import Drafter, PromptOutput, TargetOutput
from mmspec.core.plain import NoDrafter
from mmspec.core.sampling import Sampler
from mmspec.core.statistics import DecodingStats
from mmspec.targets import ImageTokenTarget
from mmspec.targets.image_tokens import PromptPair
from tests.contracts import checks
from tests.contracts.running import Run, decode
from tests.contracts.toy import TableState, TableTarget, dirichlet
from tests.tiny_models import tiny_lm

PROMPTS = ((1, 2), (0, 4))  # conditional, unconditional; the first token says which table
CELLS = ImageGrid(rows=2, columns=2, codebook_size=5, row_end=5)

GRID = ImageGrid(rows=5, columns=6, codebook_size=62, row_end=62, ending=(63,))
SAMPLER = Sampler(0.9, top_k=40, top_p=0.95)
SEEDS = [7, 8, 9]


class ImageTable(TableTarget):
    """A table of the last two tokens whose outputs are images: syntax where forced, codes elsewhere."""

    def __init__(self, logits: Tensor, grid: ImageGrid = CELLS) -> None:
        super().__init__(logits)
        self.grid = grid

    def constrain(self, logits: Tensor, index: Tensor) -> Tensor:
        """Exclude what the grammar excludes."""
        forced = torch.tensor([*self.grid.forced, FREE])[index.clamp_max(self.grid.length)][..., None]
        token = torch.arange(self.vocabulary)
        allowed = torch.where(forced == FREE, token < self.grid.codebook_size, token == forced)
        return logits.masked_fill(~allowed, float("-inf"))

    def prefill(
        self, prompts: Sequence[Mapping[str, Tensor]], capacity: int, taps: Sequence[int] = ()
    ) -> tuple[TableState, PromptOutput]:
        state, output = super().prefill(prompts, capacity, taps)
        return state, PromptOutput(
            self.constrain(output.logits, torch.zeros(len(prompts), 1, dtype=torch.long))
        )

    def score(self, state: TableState, draft: Draft) -> TargetOutput:
        output = super().score(state, draft)
        depth = draft.depth.repeat(len(state.lengths) // len(draft.tokens), 1)
        return TargetOutput(
            self.constrain(output.logits, state.lengths[:, None] - len(PROMPTS[0]) + depth + 1)
        )


def image(tables: int = 1) -> ImageTable:
    """Distributions that lean on what stands before: 0.4 of total variation between two of them."""
    return ImageTable(dirichlet(tables, 6, 6, 6, seed=0, concentration=1.0).log())


class ToyImages(ImageTokenTarget):
    """Images of 62 codes from a small language model in float64: row ends are 62, the end is 63."""

    def __init__(self, model: PreTrainedModel, grid: ImageGrid) -> None:
        super().__init__(model, grid, syntax=2)

    def grid_for(self, height: int, width: int) -> ImageGrid:
        return replace(self.grid, rows=height // self.stride, columns=width // self.stride)

    def encode_prompt(self, *_: object) -> PromptPair:
        raise AssertionError("not asked here")

    def decode(self, cells: Tensor) -> Tensor:
        raise AssertionError("not asked here")


def sample(target: ImageTable, drafter: Drafter, sampler: Sampler, rows: int, seed: int = 11) -> Run:
    """Draw many images of one prompt; rows of one batch are the sample."""
    how = {"max_new_tokens": target.grid.length, "seed": seed, "grid": target.grid}
    negatives = [PROMPTS[1]] * rows if sampler.is_guided else None
    rule = default_rule(drafter)
    return decode(target, [PROMPTS[0]] * rows, drafter, rule, sampler, negatives=negatives, **how)  # type: ignore[arg-type]


@functools.cache
def images() -> ToyImages:
    return ToyImages(tiny_lm(), GRID)


def draw(
    drafter: Drafter,
    rows: Sequence[int] = (0, 1, 2),
    sampler: Sampler = SAMPLER,
    target: ToyImages | None = None,
    grid: ImageGrid = GRID,
    end: Sequence[int] = (),
) -> tuple[list[list[int]], DecodingStats, Canvas]:
    """Images of some of the prompts, each with its own seed."""
    prompts, seeds = [checks.PROMPTS[row] for row in rows], [SEEDS[row] for row in rows]
    how = {"max_new_tokens": grid.length, "seed": seeds, "end": end, "grid": grid}
    negatives = [checks.PROMPTS[0]] * len(rows)
    rule = default_rule(drafter)
    run = decode(target or images(), prompts, drafter, rule, sampler, negatives=negatives, **how)  # type: ignore[arg-type]
    return run.outputs, run.stats, run.canvas


@functools.cache
def plain(sampler: Sampler = SAMPLER) -> list[list[int]]:
    return draw(NoDrafter(), sampler=sampler)[0]
