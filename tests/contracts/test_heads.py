"""The contract of every head that drafts: answers about images, windows, folders, refusals, faults."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from mmspec import plugins
from mmspec.core.plain import NoDrafter
from mmspec.core.sampling import Sampler
from mmspec.errors import InputError
from mmspec.heads.checkpoint import load_head
from mmspec.heads.drafter import HeadDrafter
from mmspec.targets import CausalTarget
from tests.contracts.checks import PROMPTS, VOCABULARY, llama
from tests.contracts.running import decode, generate
from tests.contracts.test_drafters import HEADS
from tests.heads.visual_checks import KINDS as VISUAL
from tests.methods.flash_checks import MESSAGES, answer, inputs_of, target_of
from tests.targets import loop
from tests.tiny_models import tiny_llama, tiny_mistral_sliding

FAMILIES = ("llava", "qwen2_5_vl")
SAMPLER, SEEDS = Sampler(0.8, top_p=0.95), [3, 4, 5, 6]
SMALL = {"num_draft_tokens": 8, "depth": 3, "top_k": 3}
IN_A_ROW = {"num_draft_tokens": 9, "top_k": 2, "depth": 6, "block": 3}
#: Kind, settings of its head of random weights, and the shape of its drafts.
HEAD: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    **{kind: (kind, {}, {}) for kind in HEADS},
    "dspark": ("dspark", {}, SMALL),
    "dflash, two": ("dflash", {"kind": "dflash, two"}, SMALL),
    "dflash, lilicorr": ("dflash", {"kind": "dflash, lilicorr"}, SMALL),
    "eagle, static": ("eagle", {}, {"tree": "eagle"}),
    "eagle, chain": ("eagle", {}, {"num_draft_tokens": 3, "top_k": 1}),
    **{name: ("eagle", settings, SMALL) for name, settings in VISUAL.items() if settings},
    "eagle3, some words": ("eagle3", {"draft_vocabulary": 13}, {"num_draft_tokens": 9, "top_k": 3}),
    "flash, a token a pass": ("flash", {}, {"block": 1}),
    "flash, blocks in a row": ("flash", {}, IN_A_ROW),
    "flash, chain": ("flash", {}, {"top_k": 1, "depth": 7, "block": 3}),
    "medusa, static": ("medusa", {}, {"tree": "medusa"}),
    "hydra, without prefix attention": (
        "hydra",
        {"prefix_attention": False},
        {"num_draft_tokens": 5, "depth": 2},
    ),
}
KINDS = list(HEADS)
PAIRS = [(name, FAMILIES[index % 2]) for index, name in enumerate(HEAD)]


def drafter_for(name: str, target: CausalTarget) -> HeadDrafter:
    """A drafter with a head of random weights, not fitted yet."""
    kind, head, shape = HEAD[name]
    drafter, build = HEADS[kind]
    return drafter(build(target, **head), **shape)


@functools.cache
def generated(family: str) -> dict[str, list[int]]:
    """Greedy answers of transformers by the messages."""
    target = target_of(family)
    return {case: loop.generate(target.model, each, 16) for case, each in inputs_of(family).items()}


@functools.cache
def sampled(family: str) -> list[list[int]]:
    """Sampled answers without a draft to all messages."""
    target, inputs = target_of(family, torch.float64), inputs_of(family, torch.float64)
    return answer(target, NoDrafter(), list(inputs.values()), SAMPLER, 16, seed=SEEDS).outputs()


def test_every_head_is_tested_here() -> None:
    others = {"assistant", "cjd", "ppd"}  # of one family of targets; heads of windows; probes
    assert set(KINDS) == set(plugins.HEADS) - others


@pytest.mark.parametrize(("name", "family"), PAIRS)
@pytest.mark.every(4)
def test_greedy_answers_about_images_are_those_of_generate(name: str, family: str) -> None:
    target, inputs, expected = target_of(family), inputs_of(family), generated(family)
    drafter = drafter_for(name, target).fit(target)
    for cases in (["one image", "no image", "two images"], ["several turns"]):
        run = answer(target, drafter, [inputs[case] for case in cases], Sampler(), 16)
        assert run.outputs() == [expected[case] for case in cases], cases


@pytest.mark.parametrize(("name", "other"), PAIRS)
@pytest.mark.every(6)
def test_sampled_answers_about_images_are_bitwise_those_of_plain_decoding(name: str, other: str) -> None:
    (family,) = set(FAMILIES) - {other}
    target, inputs = target_of(family, torch.float64), inputs_of(family, torch.float64)
    drafter, expected = drafter_for(name, target).fit(target), sampled(family)
    assert answer(target, drafter, list(inputs.values()), SAMPLER, 16, seed=SEEDS).outputs() == expected
    alone = [inputs[list(MESSAGES)[1]]]
    assert answer(target, drafter, alone, SAMPLER, 16, seed=SEEDS[1:2]).outputs() == expected[1:2]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.every(2)
def test_a_target_with_windows_says_what_generate_says(name: str) -> None:
    target = CausalTarget(tiny_mistral_sliding())
    expected = [generate(target.model, prompt, 20) for prompt in PROMPTS]
    drafter = drafter_for(name, target).fit(target)
    assert decode(target, PROMPTS, drafter, max_new_tokens=20).outputs == expected


@pytest.mark.parametrize("name", KINDS)
def test_another_target_is_refused_and_so_is_none(name: str) -> None:
    drafter = drafter_for(name, llama())
    for other, named in (
        (tiny_llama(layers=3), "layers is 3"),
        (tiny_llama(vocab=65), "vocabulary is 65"),
        (tiny_llama(hidden=16), "hidden size is 16"),
        (tiny_mistral_sliding(), "model type is mistral"),
    ):
        with pytest.raises(InputError, match=named):
            drafter.fit(CausalTarget(other))
    with pytest.raises(InputError, match="fitted to a target first"):
        decode(llama(), PROMPTS, drafter)


@pytest.mark.parametrize("name", HEAD)
@torch.no_grad()
def test_a_head_comes_back_from_its_folder(name: str, tmp_path: Path) -> None:
    """A saved head has all of its weights and no others, and the vocabulary of the tokens that it drafts."""
    kind, settings, _ = HEAD[name]
    vocabularies: list[dict[str, int]] = [{}] if kind == "eagle3" else [{}, {"frequent_tokens": 20}]
    for few in vocabularies:
        head: Any = HEADS[kind][1](llama(), **settings, **few)
        if few:
            head.learn_vocabulary(VOCABULARY - 1 - 3 * torch.arange(20))
        head.save_pretrained(tmp_path)
        again: Any = load_head(kind, tmp_path, llama().config)
        assert type(again) is type(head) and again.taps == head.taps
        own, read = head.state_dict(), again.state_dict()
        assert own.keys() == read.keys() and all(torch.equal(read[key], own[key]) for key in own)


@pytest.mark.parametrize("name", [*KINDS, "flash, chain"])
@pytest.mark.every(3)
def test_a_head_of_nan_costs_its_drafts_and_no_word(name: str) -> None:
    drafter = drafter_for(name, llama()).fit(llama())
    for parameter in drafter.model.parameters():
        parameter.fill_(torch.nan)
    run = decode(llama(), PROMPTS, drafter, max_new_tokens=12)
    assert run.outputs == [generate(llama().model, prompt, 12) for prompt in PROMPTS]
    assert run.stats.draft_faults > 0 and sum(run.stats.drafted) == 0


@pytest.mark.parametrize("name", KINDS)
def test_a_size_out_of_range_is_named(name: str) -> None:
    drafter, build = HEADS[name]
    head = build(llama())
    for argument, value in (
        ("num_draft_tokens", 0),
        ("num_draft_tokens", 9999),
        ("depth", 0),
        ("top_k", 0),
        ("top_k", 1.5),
    ):
        with pytest.raises(InputError) as caught:
            drafter(head, **{argument: value})
        assert caught.value.argument == argument


@pytest.mark.parametrize("name", KINDS)
def test_more_children_than_tokens_are_refused_with_the_target(name: str) -> None:
    target = CausalTarget(tiny_llama(vocab=3))
    drafter, build = HEADS[name]
    with pytest.raises(InputError, match="at most 3"):
        drafter(build(target), num_draft_tokens=4, depth=1, top_k=4).fit(target)
