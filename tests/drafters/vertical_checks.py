"""Checks of vertical drafts, as functions.

Heads are random and strong: what they predict is far from the target's distribution, so that nothing but the
rule makes the output right.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from mmspec.decoding import cache
from mmspec.decoding.canvas import Canvas
from mmspec.decoding.draft import Draft
from mmspec.decoding.image_grid import ImageGrid
from mmspec.decoding.sampling import Sampler
from mmspec.drafters.vertical import VerticalDrafter, VerticalSession, read_below
from mmspec.models.ssd import VerticalConfig, VerticalHead
from mmspec.targets import CausalTarget
from tests.contracts import distributions
from tests.contracts.checks import joint_of
from tests.contracts.running import FanOutTarget, decode
from tests.drafters.jacobi_checks import rule_for
from tests.tiny_models import tiny_lm_v8

PROMPT = (3, 1, 4)
GRID = ImageGrid(rows=3, columns=2, codebook_size=8)
LARGE = ImageGrid(rows=6, columns=4, codebook_size=8)
LENGTH = 5


def head_for(target: CausalTarget, seed: int = 0, strength: float = 3.0, **settings: Any) -> VerticalHead:
    """A random head in the target's precision."""
    config = VerticalConfig.for_target(target.config, target.vocabulary, width=16)
    for setting, value in settings.items():
        setattr(config, setting, value)
    with torch.random.fork_rng(devices=[]):
        head = VerticalHead(config).to(target.dtype).eval()
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in (head.of_states.weight, head.to_states.weight):
            weight.normal_(std=strength * weight.shape[-1] ** -0.5, generator=noise)
    return head


@functools.cache
def small(grid: ImageGrid = GRID) -> FanOutTarget:
    """A language model whose eight words are codes."""
    target = FanOutTarget(tiny_lm_v8())
    target.grid = grid
    return target


def check_distribution(sampler: Sampler, rows: int = 12_000, **options: Any) -> None:
    """All outputs come as often as the model says; rows of one batch are the sample."""
    target = small()
    drafter = VerticalDrafter(head_for(target), **{"window": 3, **options})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "CAPACITY_BLOCK", 16)  # thousands of rows of 256 places would be gigabytes
        run = decode(
            target,
            [PROMPT] * rows,
            drafter.fit(target),
            rule_for(drafter),
            sampler,
            max_new_tokens=LENGTH,
            seed=7,
            grid=GRID,
        )
    distributions.check_outputs(run, joint_of(target, PROMPT, LENGTH, sampler), options)


def distribution_of_images() -> None:
    check_distribution(Sampler(1.0))


def cells_are_drafted_from_the_states_above() -> None:
    """Below a committed cell, by the states that one reading of the image so far gives."""
    target, sampler, compared = small(LARGE), Sampler(1.0), 0
    initial, propose = VerticalSession._initial, VerticalSession.propose
    canvases: list[Canvas] = []

    def look(self: VerticalSession, canvas: Canvas) -> Draft:
        canvases.append(canvas)
        return propose(self, canvas)

    def compare(
        self: VerticalSession, p: Tensor, sound: Tensor, place: Tensor, covered: Tensor, stood: Tensor
    ) -> tuple[Tensor, Tensor]:
        nonlocal compared
        made = initial(self, p, sound, place, covered, stood)
        for row, tokens in enumerate(canvases[-1].ids):
            if place[row, 0] >= LARGE.length - 1:
                continue
            states = target.read([{"input_ids": torch.tensor([tokens[:-1]])}], (-1,))[-1]  # not of the root
            read = self.head.join({-1: states}, 1)[:, len(PROMPT) :]
            due = sampler.scores(read_below(self.head, target, read, self.layout.uniform[:1] > 0)).p[0]
            for slot, at in enumerate((place[row] - LARGE.columns).tolist()):
                if not covered[row, slot] and 0 <= at < len(due):
                    assert torch.allclose(made[0][row, slot], due[at], atol=1e-6)
                    compared += 1
        return made

    drafter = VerticalDrafter(head_for(target), window=4).fit(target)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(VerticalSession, "_initial", compare)
        patch.setattr(VerticalSession, "propose", look)
        decode(
            target,
            [PROMPT] * 6,
            drafter,
            rule_for(drafter),
            sampler,
            max_new_tokens=LARGE.length,
            seed=3,
            grid=LARGE,
        )
    assert compared > 50
