"""Vertical drafts: exact whatever the head predicts, refused where it does not fit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch

from mmspec.accelerators import build_accelerator
from mmspec.decoding.image_grid import ImageGrid
from mmspec.decoding.interfaces import Request
from mmspec.decoding.random_stream import RandomStream
from mmspec.decoding.sampling import Sampler
from mmspec.drafters.none import NoDrafter
from mmspec.drafters.vertical import VerticalDrafter, VerticalSession
from mmspec.drafters.window import KIND_OF_COUPLING
from mmspec.errors import InputError
from mmspec.models.ssd import VerticalConfig
from mmspec.pipelines.image_prompts import image_requests
from mmspec.targets import image_target
from mmspec.targets.llamagen import LlamaGenTarget
from tests.contracts.checks import precise
from tests.drafters import vertical_checks as checks
from tests.drafters.test_jacobi import SAMPLER, draw, images, plain
from tests.drafters.vertical_checks import head_for
from tests.targets.image_loop import draw as draw_images
from tests.tiny_models import tiny_emu3, tiny_emu3_5
from tests.tiny_models.llamagen import tiny_llamagen


def drafter(
    window: int = 12, coupling: str = "maximal", front: tuple[int, ...] = (), **head: Any
) -> VerticalDrafter:
    target = images()
    return VerticalDrafter(head_for(target, **head), window, coupling, front).fit(target)


DISTRIBUTIONS: dict[str, tuple[Sampler, dict[str, Any]]] = {
    "plain": (Sampler(1.0), {}),
    "cold, top-k": (Sampler(0.7, top_k=5), {}),
    "within a row": (Sampler(1.0), {"window": 2}),
    "two rows": (Sampler(1.0), {"window": 4}),
    "fresh draws": (Sampler(1.0), {"coupling": "fresh"}),
    "shared noise": (Sampler(1.0), {"coupling": "gumbel"}),
    "a tree": (Sampler(1.0), {"front": "3x2"}),
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


@pytest.mark.parametrize("window", [2, 7, 12, 32])
def test_the_targets_own_noise_gives_the_images_of_plain_decoding(window: int) -> None:
    """Bitwise, with row ends, in batches of one and of three, guided or not, as chains and trees."""
    for sampler in (SAMPLER, Sampler(0.9, guidance_scale=2.0)):
        expected = draw(NoDrafter(), sampler=sampler)[0]
        for front in ((), (3, 2)[: window - 1]):
            made = drafter(window, "exact", front)
            assert draw(made, sampler=sampler)[0] == expected
            assert draw(made, [window % 3], sampler=sampler)[0] == [expected[window % 3]]


@pytest.mark.parametrize("coupling", KIND_OF_COUPLING)
def test_greedy_images_are_those_of_plain_decoding(coupling: str) -> None:
    assert draw(drafter(10, coupling), sampler=Sampler())[0] == plain(Sampler())


@pytest.mark.parametrize("front", [(), (3, 2)])
def test_a_row_of_a_batch_is_drawn_as_it_is_alone(front: tuple[int, ...]) -> None:
    made = drafter(11, front=front)
    together = draw(made, [2, 0, 1])[0]
    assert [draw(made, [row])[0][0] for row in (2, 0, 1)] == together


@pytest.mark.parametrize("family", ["llamagen", "emu3", "emu3_5"])
def test_families_draw_the_images_of_plain_decoding(family: str) -> None:
    if family == "llamagen":
        target: Any = LlamaGenTarget(tiny_llamagen("class"))
        requests = image_requests(target, class_labels=[0, 3], guided=True)
    else:
        model, tokenizer = (tiny_emu3 if family == "emu3" else tiny_emu3_5)()
        target = image_target(model)
        size = {"height": 4 * target.stride, "width": 3 * target.stride}
        requests = image_requests(target, ["a red circle", "blue"], guided=True, tokenizer=tokenizer, **size)
    expected, _ = draw_images(target, build_accelerator("none"), requests, 3.0, 0.9)
    window = min(8, requests[0].grid.length)
    fast = build_accelerator("ssd", model=head_for(target), window=window, coupling="exact")
    assert draw_images(target, fast.fit(target), requests, 3.0, 0.9)[0] == expected


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
