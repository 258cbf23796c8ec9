"""Vertical drafts: exact whatever the head predicts, from the states of the cells above."""

from __future__ import annotations

import copy
import functools
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from mmspec.accelerator import default_rule
from mmspec.core.canvas import Canvas
from mmspec.core.draft import Draft
from mmspec.core.image_grid import ImageGrid
from mmspec.core.interfaces import Request
from mmspec.core.random_stream import RandomStream
from mmspec.core.sampling import Sampler
from mmspec.targets import CausalTarget
from mmspec_extras.methods.ssd.drafter import VerticalDrafter, VerticalSession, read_below
from mmspec_extras.methods.ssd.head import VerticalConfig, VerticalHead
from tests.contracts.checks import check_words
from tests.contracts.running import FanOutTarget, decode
from tests.tiny_models import tiny_lm_v8
from tests.trees.jacobi_checks import images

PROMPT = (3, 1, 4)
GRID = ImageGrid(rows=3, columns=2, codebook_size=8)
LARGE = ImageGrid(rows=6, columns=4, codebook_size=8)


def head_for(target: CausalTarget, seed: int = 0, strength: float = 3.0, **settings: Any) -> VerticalHead:
    """Return a random head in the target's precision."""
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
    """A language model whose eight tokens are codes."""
    target = FanOutTarget(tiny_lm_v8())
    target.grid = grid
    return target


@pytest.mark.parametrize(
    ("sampler", "options"),
    [
        (Sampler(0.7, top_k=5), {}),
        (Sampler(1.0), {"window": 4, "front": "2x2", "reach": 2}),
        pytest.param(Sampler(1.0), {"coupling": "gumbel"}, marks=pytest.mark.slow),
    ],
    ids=["cold, top-k", "a tree of short chains", "shared noise"],
)
@torch.inference_mode()
@pytest.mark.every(2)
def test_outputs_follow_the_targets_distribution(sampler: Sampler, options: dict[str, Any]) -> None:
    drafter = VerticalDrafter(head_for(small()), **{"window": 3, **options}).fit(small())
    check_words(small(), drafter, default_rule(drafter), sampler, grid=GRID)


@torch.inference_mode()
def test_cells_are_drafted_from_the_states_above(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compared, below a committed cell, with the states of one forward pass over the image so far."""
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
            states = target.read([{"input_ids": torch.tensor([tokens[:-1]])}], (-1,))[-1]  # without the root
            read = self.head.join({-1: states}, 1)[:, len(PROMPT) :]
            due = sampler.scores(read_below(self.head, target, read, self.layout.uniform[:1] > 0)).p[0]
            for slot, at in enumerate((place[row] - LARGE.columns).tolist()):
                if not covered[row, slot] and 0 <= at < len(due):
                    assert torch.allclose(made[0][row, slot], due[at], atol=1e-6)
                    compared += 1
        return made

    drafter = VerticalDrafter(head_for(target), window=4).fit(target)
    monkeypatch.setattr(VerticalSession, "_initial", compare)
    monkeypatch.setattr(VerticalSession, "propose", look)
    how: dict[str, Any] = {"max_new_tokens": LARGE.length, "seed": 3, "grid": LARGE}
    decode(target, [PROMPT] * 6, drafter, default_rule(drafter), sampler, **how)
    assert compared > 50


def test_rows_with_longer_rows_of_cells_join_a_batch() -> None:
    """The newest states stay last, for any number of columns of the row."""
    target = images()
    made = VerticalDrafter(head_for(target), 6).fit(target)
    inputs, sessions = {"input_ids": torch.tensor([[1, 2, 3]])}, []
    for grid in (ImageGrid(5, 3, 62, 62), ImageGrid(5, 6, 62, 62)):
        _, prefill = target.prefill([inputs], 64, made.taps)
        request, random = Request(inputs, layout=grid), RandomStream.from_seed(3, 1)
        session = cast(VerticalSession, made.start([request], prefill, Sampler(1.0), random))
        session._enter_committed()
        sessions.append(session)
    short, long = sessions
    both = copy.copy(short).joined(long, (1, 1))
    assert both.committed.shape[1] == 7
    assert torch.equal(both.committed[0, -4:], short.committed[0])
    assert torch.equal(both.committed[1], long.committed[0])
    assert torch.equal(both.part([1]).committed, long.committed)
