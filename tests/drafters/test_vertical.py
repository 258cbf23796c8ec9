"""Vertical drafts: exact whatever the head predicts, refused where it does not fit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch

from mmspec.decoding.image_grid import ImageGrid
from mmspec.decoding.interfaces import Request
from mmspec.decoding.random_stream import RandomStream
from mmspec.decoding.sampling import Sampler
from mmspec.drafters.vertical import VerticalDrafter, VerticalSession
from mmspec.errors import InputError
from mmspec.models.ssd import VerticalConfig
from tests.contracts.checks import precise
from tests.drafters import vertical_checks as checks
from tests.drafters.test_jacobi import draw, images
from tests.drafters.vertical_checks import head_for


def drafter(
    window: int = 12, coupling: str = "maximal", front: tuple[int, ...] = (), **head: Any
) -> VerticalDrafter:
    target = images()
    return VerticalDrafter(head_for(target, **head), window, coupling, front).fit(target)


DISTRIBUTIONS: dict[str, tuple[Sampler, dict[str, Any]]] = {
    "cold, top-k": (Sampler(0.7, top_k=5), {}),
    "within a row": (Sampler(1.0), {"window": 2}),
    "shared noise": (Sampler(1.0), {"coupling": "gumbel"}),
    "a tree of short chains": (Sampler(1.0), {"window": 4, "front": "2x2", "reach": 2}),
}
QUICK = ("cold, top-k",)


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in DISTRIBUTIONS]
)
@torch.inference_mode()
def test_outputs_follow_the_targets_distribution(name: str) -> None:
    sampler, options = DISTRIBUTIONS[name]
    checks.check_distribution(sampler, **options)


CHECKS = [checks.distribution_of_images, checks.cells_are_drafted_from_the_states_above]


@pytest.mark.parametrize("check", CHECKS)
@torch.inference_mode()
def test_what_must_hold_holds(check: Callable[[], None]) -> None:
    check()


def test_rows_with_longer_rows_of_cells_join_a_batch() -> None:
    """The newest states stay last, whatever the row's own number of columns."""
    target, made = images(), drafter(6)
    inputs, sessions = {"input_ids": torch.tensor([[1, 2, 3]])}, []
    for grid in (ImageGrid(5, 3, 62, 62), ImageGrid(5, 6, 62, 62)):
        _, prefill = target.prefill([inputs], 64, made.taps)
        request, random = Request(inputs, grid=grid), RandomStream.from_seed(3, 1)
        session = cast(VerticalSession, made.start([request], prefill, Sampler(1.0), random))
        session._enter_committed()
        sessions.append(session)
    short, long = sessions
    both = copy.copy(short).joined(long, (1, 1))
    assert both.committed.shape[1] == 7
    assert torch.equal(both.committed[0, -4:], short.committed[0])
    assert torch.equal(both.committed[1], long.committed[0])
    assert torch.equal(both.part([1]).committed, long.committed)


def test_what_it_does_not_fit_is_refused() -> None:
    target = images()
    with pytest.raises(InputError, match="whose hidden size is"):
        VerticalDrafter(head_for(target, hidden_size=48)).fit(target)
    with pytest.raises(InputError, match="whose vocabulary is"):
        VerticalDrafter(head_for(target, vocabulary=12)).fit(target)
    with pytest.raises(InputError, match="window: got 30; 1 to 10"):
        draw(drafter(30), grid=ImageGrid(3, 2, 62, 62, (63,)))
    with pytest.raises(InputError, match="trained under guidance"):
        draw(drafter(guided=False), sampler=Sampler(guidance_scale=2.0))
    with pytest.raises(InputError, match="was fitted"):
        draw(VerticalDrafter(head_for(target)))
    with pytest.raises(InputError, match="target: got 'text'"):
        VerticalDrafter(head_for(precise())).fit(precise())
    with pytest.raises(InputError, match="image size: got '5 rows of 6 tokens'; rows of 16"):
        draw(drafter(columns=16))
    with pytest.raises(InputError, match="another codebook"):
        VerticalDrafter(head_for(target, codebook=[1.0] * 16)).fit(target)
    with pytest.raises(InputError, match="coupling"):
        VerticalDrafter(head_for(target), coupling="maximum")


def test_what_cannot_be_built_is_refused() -> None:
    for wrong in ({"width": 0}, {"window": 0}, {"taps": []}, {"taps": [4], "target_layers": 4}):
        with pytest.raises(Exception, match="width|taps"):
            VerticalConfig(vocabulary=8, **wrong)
