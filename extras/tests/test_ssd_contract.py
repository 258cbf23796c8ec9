"""Vertical drafts in mmspec's tests of sampling drafters, of windows and of refused input."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from extras.tests.test_ssd import head_for
from mmspec.accelerators import build_accelerator
from mmspec.assets import find_assets
from mmspec.errors import InputError
from mmspec.families.images import image_target
from mmspec.families.llamagen.target import LlamaGenTarget
from mmspec.pipelines import MMSpecPipeline
from mmspec.pipelines.image_prompts import image_requests
from mmspec.trees.jacobi import JacobiDrafter
from mmspec.trees.jacobi_session import WindowDrafter
from mmspec_extras.methods.ssd.drafter import VerticalDrafter
from mmspec_extras.methods.ssd.head import VerticalConfig
from tests.contracts import test_honest_q
from tests.contracts.checks import precise
from tests.core import test_layouts
from tests.methods import test_refusals
from tests.reference import test_shipped_models, test_shipped_rounds
from tests.targets.image_loop import draw as draw_images
from tests.tiny_models import tiny_emu3
from tests.tiny_models.llamagen import tiny_llamagen
from tests.training import test_prompted_images
from tests.trees import test_windows
from tests.trees.jacobi_checks import draw, images


def ssd(window: int, coupling: str = "maximal", **tree: Any) -> WindowDrafter:
    return VerticalDrafter(head_for(images()), window, coupling, **tree).fit(images())


def sampled(**options: Any) -> VerticalDrafter:
    target = test_honest_q.target_of()
    return VerticalDrafter(head_for(target), **{"window": 5, **options}).fit(target)


@pytest.mark.parametrize("tree", [{}, test_honest_q.TREE])
def test_tokens_of_a_draft_come_as_often_as_its_q_says(
    tree: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(test_honest_q.DRAFTS, "ssd", lambda: sampled(**tree))
    test_honest_q.test_tokens_of_a_draft_come_as_often_as_its_q_says("ssd")
    if not tree:
        test_honest_q.test_equals_are_parted_in_a_batch_as_they_are_alone("ssd")


@torch.inference_mode()
def test_the_targets_own_noise_gives_the_tokens_of_plain_decoding_among_equals() -> None:
    sampler = test_honest_q.CoarseSampler(1.0, top_k=3)
    expected = test_honest_q.run(test_honest_q.NoDrafter(), sampler, 50)
    assert test_honest_q.run(sampled(coupling="exact"), sampler, 50) == expected


def test_images_are_those_of_plain_decoding_and_rows_independent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(test_windows.WINDOWS, "ssd", ssd)
    for window in (2, 7):
        test_windows.test_the_targets_own_noise_gives_the_images_of_plain_decoding("ssd", window)
    test_windows.test_greedy_images_are_those_of_plain_decoding("ssd")
    test_windows.test_a_row_of_a_batch_is_drawn_as_it_is_alone("ssd")


@pytest.mark.parametrize("family", ["llamagen", "emu3"])
def test_families_draw_the_images_of_plain_decoding(family: str) -> None:
    if family == "llamagen":
        target: Any = LlamaGenTarget(tiny_llamagen("class"))
        requests = image_requests(target, class_labels=[0, 3], guided=True)
    else:
        model, tokenizer = tiny_emu3()
        target = image_target(model)
        size = {"height": 4 * target.stride, "width": 3 * target.stride}
        requests = image_requests(target, ["a red circle", "blue"], guided=True, tokenizer=tokenizer, **size)
    head, window = head_for(target), min(8, requests[0].layout.length)
    fast = build_accelerator("ssd", model=head, window=window, coupling="exact").fit(target)
    expected, _ = draw_images(target, build_accelerator("none"), requests, 3.0, 0.9)
    assert draw_images(target, fast, requests, 3.0, 0.9)[0] == expected


def unfitted(**head: Any) -> VerticalDrafter:
    return VerticalDrafter(head_for(images(), **head), 12)


UNFIT: list[tuple[Callable[[], Any], str]] = [
    (lambda: unfitted(hidden_size=48).fit(images()), "whose hidden size is"),
    (lambda: draw(unfitted().fit(images()), grid=test_refusals.SMALL), "window must be from 1 to 6"),
    (lambda: VerticalDrafter(head_for(precise())).fit(precise()), "target must"),
    (lambda: draw(unfitted(columns=16).fit(images())), "image size must have rows of 16"),
    (lambda: unfitted(codebook=[1.0] * 16).fit(images()), "another codebook"),
]


def test_what_does_not_fit_is_refused() -> None:
    for call, message in UNFIT:
        with pytest.raises(InputError, match=message):
            call()
    for case in ({"width": 0}, {"window": 0}, {"taps": []}, {"taps": [4], "target_layers": 4}):
        with pytest.raises(Exception, match="width|sizes|taps"):
            VerticalConfig(vocabulary=8, **case)


def test_layouts_without_rows_are_refused_before_the_prompt_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: object) -> None:
        raise AssertionError("the prompt was read")

    accelerator = build_accelerator("ssd", model=head_for(test_layouts.images()))
    monkeypatch.setattr(test_layouts.images(), "prefill", read)
    message = (
        "image layout must be the grid of a single image, whose rows a vertical head reads; got '33 tokens'"
    )
    request = test_layouts.request(5, test_layouts.VIDEO)
    with pytest.raises(InputError, match=message):
        test_layouts.draw(test_layouts.images(), accelerator, [request], test_layouts.SAMPLED)


def test_a_head_learns_from_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    test_prompted_images.test_heads_of_every_family("emu3", "ssd", tmp_path, monkeypatch)


@pytest.mark.slow
def test_drafts_from_the_row_above_save_forwards() -> None:
    """In whole images, with windows of half a row, whose places are verified soon after they are new."""
    drafter = VerticalDrafter(test_shipped_models.head_of("ssd"), 8)
    assert test_shipped_models.accepted(drafter, 256) > test_shipped_models.accepted(JacobiDrafter(8), 256)


@pytest.mark.slow
def test_a_round_reads_the_device_once() -> None:
    assets = find_assets()
    assert assets is not None
    pipe: Any = MMSpecPipeline.from_pretrained(assets / "scenes-llamagen", accelerator="none")
    pipe.set_accelerator("ssd", drafter=str(assets / "scenes-llamagen-ssd"))
    call = pipe.prepare("a red ring", {"seed": 0, "output_type": "latent"})
    test_shipped_rounds.check(call, "ssd", 4)
