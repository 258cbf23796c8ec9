"""Heads that draft: images that they draw, passes that they take, sizes that they have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from mmspec.accelerator import Accelerator
from mmspec.core.plain import NoDrafter
from mmspec.core.sampling import Sampler
from mmspec.errors import InputError, UnsupportedModelError
from mmspec.families.images import image_target
from mmspec.methods.eagle.drafter import EagleDrafter
from mmspec.methods.eagle.head import EagleConfig, EagleHead
from mmspec.methods.eagle3.drafter import Eagle3Drafter
from mmspec.methods.flash.drafter import FlashDrafter
from mmspec.methods.medusa.drafter import MedusaDrafter
from mmspec.pipelines.image_prompts import image_requests
from mmspec.targets import CausalTarget, VisionLanguageTarget
from mmspec.trees.growth import DynamicTree
from mmspec.trees.matching import SampleAndMatch
from tests.contracts.checks import PROMPTS, llama
from tests.contracts.running import decode, generate
from tests.heads.visual_checks import KINDS as VISUAL
from tests.methods import eagle3_checks, flash_checks
from tests.methods.eagle_checks import Examined, head_for, llamagen
from tests.methods.flash_checks import answer, inputs_of, target_of
from tests.methods.heads_checks import drafter_for, hydra_for, medusa_for
from tests.methods.naive_heads import NaiveFlash
from tests.targets import loop
from tests.targets.image_loop import draw
from tests.tiny_models import (
    HAS_VIDEO,
    VISION_LANGUAGE_FAMILIES,
    encode,
    tiny_clip,
    tiny_emu3,
    tiny_gemma2,
    tiny_gpt2,
    tiny_images,
    tiny_janus,
    tiny_llama,
    tiny_lumina,
    user_message,
)

PLAIN = Accelerator("none", NoDrafter(), SampleAndMatch())


@pytest.mark.parametrize(
    ("shape", "scale"),
    [
        ({"num_draft_tokens": 3, "top_k": 1}, 3.0),
        ({"tree": [0, 0, 0, 1, 2]}, 1.0),
    ],
)
@pytest.mark.every(2)
def test_images_are_those_of_plain_decoding(shape: dict[str, Any], scale: float) -> None:
    """Bitwise, greedy and sampled, alone and in a batch."""
    target = llamagen()
    requests = image_requests(target, class_labels=[0, 3, 4], guided=scale != 1)
    few = {"num_draft_tokens": 12, "depth": 2, "top_k": 6}
    words = eagle3_checks.head_for(target, draft_vocabulary=13)
    for drafter in (EagleDrafter(head_for(target), **shape), Eagle3Drafter(words, **few)):
        fast = Accelerator("eagle", drafter, SampleAndMatch()).fit(target)
        for temperature in (0.0, 0.9):
            expected, _ = draw(target, PLAIN, requests, scale, temperature)
            assert draw(target, fast, requests, scale, temperature)[0] == expected
            assert draw(target, fast, requests[:1], scale, temperature)[0] == expected[:1]


@pytest.mark.parametrize("family", [tiny_janus, tiny_emu3, tiny_lumina])
@pytest.mark.every(3)
def test_images_with_syntax_are_those_of_plain_decoding(family: Callable[[], Any]) -> None:
    """Heads of their own for codes, rows that end, forced tokens: drafted for free, and never missed."""
    model, tokenizer, *_ = family()
    target = image_target(model, family="lumina_mgpt" if family is tiny_lumina else None)
    assert target is not None
    sizes = {tiny_lumina: (32, 64), tiny_emu3: (8, 6)}
    height, width = sizes.get(family, (None, None))
    requests = image_requests(
        target, ["a red circle", "blue"], height=height, width=width, guided=True, tokenizer=tokenizer
    )
    eagle = Accelerator("eagle", EagleDrafter(head_for(target)), SampleAndMatch()).fit(target)
    for temperature in (0.0, 0.9):
        expected, _ = draw(target, PLAIN, requests, 3.0, temperature)
        got, stats = draw(target, eagle, requests, 3.0, temperature)
        assert got == expected
        forced = sum(token >= target.grid.codebook_size for token in expected[0])
        assert stats.target_forwards <= target.grid.length - forced // 2


def test_syntax_that_a_head_does_not_know_costs_its_drafts() -> None:
    model, tokenizer, *_ = tiny_emu3()
    target: Any = image_target(model)
    requests = image_requests(target, ["a red circle"], height=8, width=6, guided=True, tokenizer=tokenizer)
    drafter = Eagle3Drafter(eagle3_checks.head_for(target, draft_vocabulary=13), 12, depth=2, top_k=6)
    eagle3 = Accelerator("eagle3", drafter, SampleAndMatch()).fit(target)
    assert draw(target, eagle3, requests, 3.0, 0.9)[0] == draw(target, PLAIN, requests, 3.0, 0.9)[0]


@pytest.mark.parametrize("family", sorted(VISION_LANGUAGE_FAMILIES))
@pytest.mark.every(3)
def test_every_family_and_clips(family: str) -> None:
    """Tiles, newlines, frames, three axes of positions: every family's images are compressed."""
    model, processor = VISION_LANGUAGE_FAMILIES[family]()
    target = VisionLanguageTarget(model)
    messages = [user_message("what is there ?", tiny_images(2))]
    if family in HAS_VIDEO:
        messages.append(user_message("and there ?", videos=[tiny_clip()]))
    inputs = [dict(encode(processor, each)) for each in messages]
    drafter = EagleDrafter(head_for(target, **VISUAL["vispec"]), 8, depth=3, top_k=3).fit(target)
    expected = [loop.generate(model, each, 12) for each in inputs]
    assert answer(target, drafter, inputs, Sampler(), 12).outputs() == expected


@pytest.mark.slow
def test_long_output_is_that_of_plain_decoding() -> None:
    """Longer than what both caches begin with."""
    target, inputs = target_of("qwen2_5_vl", torch.float64), inputs_of("qwen2_5_vl", torch.float64)
    drafter = Eagle3Drafter(eagle3_checks.head_for(target), num_draft_tokens=3, top_k=1).fit(target)
    rows = [inputs[case] for case in ("two images", "no image")]
    plain = answer(target, NoDrafter(), rows, Sampler(0.8), 300)
    assert answer(target, drafter, rows, Sampler(0.8), 300).outputs() == plain.outputs()


def test_a_target_with_additive_masks() -> None:
    target = CausalTarget(tiny_gemma2())
    drafter = EagleDrafter(head_for(target)).fit(target)
    expected = [generate(target.model, prompt, 24) for prompt in PROMPTS]
    assert decode(target, PROMPTS, drafter, max_new_tokens=24).outputs == expected


def test_a_head_with_additive_masks() -> None:
    target, inputs = target_of("llava", torch.float64), inputs_of("llava", torch.float64)
    head = flash_checks.head_for(target)
    drafts = []
    for backend in ("sdpa", "eager"):
        head.set_attn_implementation(backend)
        head.decoder.set_attn_implementation(backend)
        drafter = FlashDrafter(head, depth=6).fit(target)
        examined = Examined(drafter, 8, lambda *given: NaiveFlash(*given, block=4))
        answer(target, examined, [inputs["two images"]], Sampler(), 8)
        drafts.append(examined.drafts)
    assert drafts[0] == drafts[1] > 0


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
    """And the heads that are deeper than the tree do not run."""
    target, inputs = target_of("llava"), inputs_of("llava")
    drafter, calls = drafter_for("medusa", target, depth=2, num_draft_tokens=6), []
    for blocks in drafter.model.blocks:  # type: ignore[union-attr]
        blocks.register_forward_hook(lambda *_: calls.append(1))
    run = answer(target, drafter, [inputs["one image"]], Sampler(), 12)
    assert len(calls) == 2 * run.stats.rounds[0] and run.stats.draft_passes == run.stats.rounds[0]


@pytest.mark.parametrize("heads", [1, 7])
def test_the_tree_is_as_deep_as_there_are_heads(heads: int) -> None:
    for head in (medusa_for(llama(), num_heads=heads), hydra_for(llama(), num_heads=heads)):
        shape = MedusaDrafter(head).shape  # type: ignore[arg-type]
        assert shape.depth == heads and shape.num_draft_tokens == (8 if heads == 1 else 24)


def test_heads_that_do_not_say_their_target_fit_by_width_and_vocabulary() -> None:
    nameless = medusa_for(llama(), target_type="", target_layers=0)
    MedusaDrafter(nameless).fit(CausalTarget(tiny_llama(layers=3)))
    with pytest.raises(InputError, match="hidden size is 16"):
        MedusaDrafter(nameless).fit(CausalTarget(tiny_llama(hidden=16)))


def test_a_family_without_a_stack_of_layers_is_refused() -> None:
    config = EagleConfig.for_target(tiny_gpt2().config, 64)
    with pytest.raises(UnsupportedModelError, match="GPT2Model"):
        EagleHead(config)


def test_the_config_of_a_head_names_its_tree() -> None:
    head = head_for(llama())
    assert EagleDrafter(head).shape == DynamicTree(24, 5, 8)
    head.config.num_draft_tokens, head.config.depth, head.config.top_k = 60, 3, 40
    assert EagleDrafter(head).shape == DynamicTree(60, 3, 40)
    assert EagleDrafter(head, num_draft_tokens=2).shape == DynamicTree(2, 2, 2)
    assert EagleDrafter(head, num_draft_tokens=30, top_k=6).shape == DynamicTree(30, 3, 6)


@pytest.mark.parametrize(
    ("settings", "nodes"),
    [({}, 16), ({"num_draft_tokens": 1}, 1), ({"top_k": 1}, 4), ({"depth": 40}, 40), ({"top_k": 20}, 20)],
)
def test_defaults_of_flash_give_way_to_what_was_asked_for(settings: dict[str, Any], nodes: int) -> None:
    assert FlashDrafter(flash_checks.head_for(llama()), **settings).shape.num_draft_tokens == nodes
