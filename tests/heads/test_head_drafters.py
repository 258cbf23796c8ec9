"""Drafters with heads: images that they draft, images of every family as inputs, and passes per round."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mmspec.accelerator import Accelerator
from mmspec.core.plain import NoDrafter
from mmspec.core.sampling import Sampler
from mmspec.families.images import image_target
from mmspec.heads.feature_session import GrownTreeDrafter
from mmspec.methods.flash.drafter import FlashDrafter
from mmspec.pipelines.image_prompts import image_requests
from mmspec.targets import VisionLanguageTarget
from mmspec.trees.growth import DynamicTree
from mmspec.trees.matching import SampleAndMatch
from tests.contracts.checks import llama
from tests.heads.visual_checks import KINDS as VISUAL
from tests.methods import flash_checks
from tests.methods.eagle_checks import head_for
from tests.methods.flash_checks import answer, inputs_of, target_of
from tests.methods.heads_checks import drafter_for
from tests.targets import loop
from tests.targets.image_loop import draw
from tests.tiny_models import (
    HAS_VIDEO,
    VISION_LANGUAGE_FAMILIES,
    encode,
    tiny_clip,
    tiny_emu3,
    tiny_images,
    tiny_janus,
    tiny_lumina,
    user_message,
)

PLAIN = Accelerator("none", NoDrafter(), SampleAndMatch())


@pytest.mark.parametrize("family", [tiny_janus, tiny_emu3, tiny_lumina])
@pytest.mark.every(3)
def test_images_with_syntax_are_those_of_plain_decoding(family: Callable[[], Any]) -> None:
    """Output layers for codes, ends of image rows, forced tokens, which are drafted without errors."""
    model, tokenizer, *_ = family()
    target = image_target(model)
    assert target is not None
    sizes = {tiny_lumina: (32, 64), tiny_emu3: (8, 6)}
    height, width = sizes.get(family, (None, None))
    requests = image_requests(
        target, ["a red circle", "blue"], height=height, width=width, guided=True, tokenizer=tokenizer
    )
    eagle = Accelerator("eagle", GrownTreeDrafter(head_for(target)), SampleAndMatch()).fit(target)
    for temperature in (0.0, 0.9):
        expected, _ = draw(target, PLAIN, requests, 3.0, temperature)
        got, stats = draw(target, eagle, requests, 3.0, temperature)
        assert got == expected
        forced = sum(token >= target.grid.codebook_size for token in expected[0])
        assert stats.target_forwards <= target.grid.length - forced // 2


@pytest.mark.parametrize("family", sorted(VISION_LANGUAGE_FAMILIES))
@pytest.mark.every(3)
def test_every_family_and_clips(family: str) -> None:
    """Images of every family are compressed, with tiles, newlines, frames and three axes of positions."""
    model, processor = VISION_LANGUAGE_FAMILIES[family]()
    target = VisionLanguageTarget(model)
    messages = [user_message("what is there ?", tiny_images(2))]
    if family in HAS_VIDEO:
        messages.append(user_message("and there ?", videos=[tiny_clip()]))
    inputs = [dict(encode(processor, each)) for each in messages]
    drafter = GrownTreeDrafter(head_for(target, **VISUAL["vispec"]), 8, depth=3, top_k=3).fit(target)
    expected = [loop.generate(model, each, 12) for each in inputs]
    assert answer(target, drafter, inputs, Sampler(), 12).outputs() == expected


def test_flash_is_one_pass_a_block() -> None:
    """Depth over block passes of the layer in a round, however wide the tree."""
    target, inputs = target_of("llava"), inputs_of("llava")
    for block, depth, passes in ((4, 4, 1), (4, 5, 2), (2, 6, 3), (1, 3, 3)):
        head = flash_checks.head_for(target)
        calls: list[int] = []
        head.decoder.register_forward_hook(lambda *_: calls.append(1))  # noqa: B023
        drafter = FlashDrafter(head, num_draft_tokens=8, depth=depth, top_k=3, block=block).fit(target)
        run = answer(target, drafter, [inputs["one image"]], Sampler(), 12)
        assert len(calls) == 1 + passes * run.stats.rounds[0]


def test_medusa_is_one_pass_a_round() -> None:
    """Heads deeper than the tree do not run."""
    target, inputs = target_of("llava"), inputs_of("llava")
    drafter, calls = drafter_for("medusa", target, depth=2, num_draft_tokens=6), []
    for blocks in drafter.model.blocks:  # type: ignore[union-attr]
        blocks.register_forward_hook(lambda *_: calls.append(1))
    run = answer(target, drafter, [inputs["one image"]], Sampler(), 12)
    assert len(calls) == 2 * run.stats.rounds[0] and run.stats.draft_passes == run.stats.rounds[0]


def test_the_config_of_a_head_names_its_tree() -> None:
    head = head_for(llama())
    assert GrownTreeDrafter(head).shape == DynamicTree(24, 5, 8)
    head.config.num_draft_tokens, head.config.depth, head.config.top_k = 60, 3, 40
    assert GrownTreeDrafter(head).shape == DynamicTree(60, 3, 40)
    assert GrownTreeDrafter(head, num_draft_tokens=2).shape == DynamicTree(2, 2, 2)
    assert GrownTreeDrafter(head, num_draft_tokens=30, top_k=6).shape == DynamicTree(30, 3, 6)
