"""MSD, SpecVLM, HiViS and ViSpec as drafters: what they propose, and that no output changes."""

from __future__ import annotations

import pytest
import torch

from mmspec.decoding.sampling import Sampler
from mmspec.drafters.eagle import EagleDrafter
from mmspec.drafters.none import NoDrafter
from mmspec.targets import VisionLanguageTarget
from tests.contracts.mutation import PlantedBug
from tests.drafters import visual_checks
from tests.drafters.eagle_checks import head_for
from tests.drafters.flash_checks import MESSAGES, answer, inputs_of, target_of
from tests.drafters.visual_checks import KINDS
from tests.targets import loop
from tests.tiny_models import (
    HAS_VIDEO,
    VISION_LANGUAGE_FAMILIES,
    encode,
    tiny_clip,
    tiny_images,
    user_message,
)

FAMILIES = ["llava", "qwen2_5_vl"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_those_of_the_slow_way(kind: str, family: str) -> None:
    visual_checks.drafts_are_those_of_the_slow_way(kind, family)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_output_is_that_of_generate(kind: str, family: str) -> None:
    target, inputs = target_of(family), inputs_of(family)
    drafter = EagleDrafter(head_for(target, **KINDS[kind]), 8, depth=3, top_k=3).fit(target)
    expected = {case: loop.generate(target.model, each, 16) for case, each in inputs.items()}
    for cases in (["one image", "no image", "two images"], ["two images"], ["several turns"]):
        run = answer(target, drafter, [inputs[case] for case in cases], Sampler(), 16)
        assert run.outputs() == [expected[case] for case in cases], cases


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
def test_sampled_output_is_bitwise_that_of_plain_decoding(kind: str, family: str) -> None:
    target, inputs = target_of(family, torch.float64), inputs_of(family, torch.float64)
    drafter = EagleDrafter(head_for(target, **KINDS[kind]), 8, depth=3, top_k=3).fit(target)
    sampler, seeds = Sampler(0.8, top_p=0.95), [3, 4, 5, 6]
    for cases in (list(MESSAGES), ["two images"]):
        rows, keys = [inputs[case] for case in cases], seeds[: len(cases)]
        plain = answer(target, NoDrafter(), rows, sampler, 16, seed=keys)
        assert answer(target, drafter, rows, sampler, 16, seed=keys).outputs() == plain.outputs(), cases


@pytest.mark.parametrize("family", sorted(VISION_LANGUAGE_FAMILIES))
def test_every_family_and_clips(family: str) -> None:
    """Tiles, newlines, frames, three axes of positions: every family's images are compressed."""
    model, processor = VISION_LANGUAGE_FAMILIES[family]()
    target = VisionLanguageTarget(model)
    messages = [user_message("what is there ?", tiny_images(2))]
    if family in HAS_VIDEO:
        messages.append(user_message("and there ?", videos=[tiny_clip()]))
    inputs = [dict(encode(processor, each)) for each in messages]
    drafter = EagleDrafter(head_for(target, **KINDS["vispec"]), 8, depth=3, top_k=3).fit(target)
    expected = [loop.generate(model, each, 12) for each in inputs]
    assert answer(target, drafter, inputs, Sampler(), 12).outputs() == expected


SESSION = "mmspec.drafters.feature_session:FeatureSession"
BUGS = {
    "later rows are told nothing": (f"{SESSION}._read", "features, self.summary)", "features)"),
    "every row is told of the first row's image": (
        f"{SESSION}._read",
        "features, self.summary)",
        "features, self.summary[:1].expand(len(features), -1))",
    ),
    "positions are counted in the compressed prompt": (
        f"{SESSION}._read_prompts",
        "places[..., made.slot[0] - lag], beyond + places.shape[-1] - count - lag",
        "places[..., 1 : count + 1], beyond + 1",
    ),
    "text stays where compression left it, and later rows do not": (
        f"{SESSION}._read_prompts",
        "beyond + places.shape[-1] - count",
        "beyond + 1",
    ),
    "the question is the first token": (f"{SESSION}._prompt_rows", "[length - 1]", "[0]"),
}


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_seen(name: str) -> None:
    where, old, new = BUGS[name]

    def check() -> None:
        visual_checks.drafts_are_those_of_the_slow_way("specvlm" if "question" in name else "vispec")

    with PlantedBug(where, ((old, new),), check).planted(), pytest.raises((AssertionError, RuntimeError)):
        check()
