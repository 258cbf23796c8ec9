"""The EAGLE-3 drafter: what it proposes, that no output changes, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from mmspec.accelerators.accelerator import Accelerator
from mmspec.acceptance.matching import SampleAndMatch
from mmspec.decoding.sampling import Sampler
from mmspec.drafters.eagle import Eagle3Drafter
from mmspec.drafters.none import NoDrafter
from mmspec.errors import InputError
from mmspec.pipelines.image_prompts import image_requests
from mmspec.targets import CausalTarget, image_target
from tests.contracts.checks import PROMPTS, llama
from tests.contracts.mutation import PlantedBug
from tests.contracts.running import decode, generate
from tests.drafters import eagle3_checks
from tests.drafters.eagle3_checks import head_for
from tests.drafters.eagle_checks import llamagen
from tests.drafters.flash_checks import MESSAGES, answer, inputs_of, target_of
from tests.targets import loop
from tests.targets.image_loop import draw
from tests.tiny_models import tiny_emu3, tiny_llama, tiny_mistral_sliding

FAMILIES = ["llava", "qwen2_5_vl"]
SHAPES: list[dict[str, Any]] = [{}, {"tree": "eagle"}, {"num_draft_tokens": 3, "top_k": 1}]


@pytest.mark.parametrize(("tree", "words"), [("dynamic", 0), ("eagle", 0), ("dynamic", 13)])
@pytest.mark.parametrize("family", [*FAMILIES, "qwen3_vl"])
def test_drafts_are_those_of_the_slow_way(family: str, tree: str, words: int) -> None:
    eagle3_checks.drafts_are_those_of_the_slow_way(family, tree, words)


def test_drafts_under_guidance() -> None:
    eagle3_checks.guided_drafts_are_those_of_the_slow_way()


@pytest.mark.parametrize(
    ("family", "tree", "window"),
    [("llava", "dynamic", 3), ("llava", "eagle", 1), ("qwen2_5_vl", "dynamic", 5)],
)
def test_a_head_with_a_window_sees_that_much_of_each_path(family: str, tree: str, window: int) -> None:
    """Shorter than a prompt, and than a path of the tree: rows are counted, not places in images."""
    eagle3_checks.drafts_are_those_of_the_slow_way(family, tree, window=window)


def test_a_window_under_guidance() -> None:
    eagle3_checks.guided_drafts_are_those_of_the_slow_way(window=3)


READING = "mmspec.drafters.feature_session:FeatureSession"
HEAD, ROWS = "mmspec.models.eagle3:Eagle3Head", "mmspec.models.feature_head:FeatureHead"
LAYER = "mmspec.models.eagle3:Eagle3Layer.forward"
BUGS = {
    "the state that is fed back has passed the norm": (
        "mmspec.models.feature_head:FeatureHead.forward",
        "hidden: Tensor = output.last_hidden_state",
        "hidden = self.norm(output.last_hidden_state)",
    ),
    "logits of states that have not passed it": (f"{HEAD}.logits", "self.norm(hidden)", "hidden"),
    "taps in another order": (f"{HEAD}.join", "[*states]", "[*states][::-1]"),
    "states of the prompt are not shifted": (f"{ROWS}.read_prompts", "features[:, :-1]", "features[:, 1:]"),
    "the residual stream is that of the embedding": (
        LAYER,
        "features = features + att",
        "features = embeddings + att",
    ),
    "the feature is not normed": (LAYER, "self.hidden_norm(features)", "features"),
    "positions are those of the tokens": (f"{READING}._read_prompts", "arange(count", "arange(1, count + 1"),
    "one of the taps is that of another node": (
        f"{READING}.observe",
        "pick(output.taps[tap], path)",
        "pick(output.taps[tap], path if tap else path.roll(1, 1))",
    ),
    "a prompt is read without the window": (
        f"{HEAD}.forward",
        "(distance < window)",
        "(distance >= 0)",
    ),
    "draft ids stand for the target's": (
        "mmspec.drafters.tree:TreeGrowth.grow",
        "self.names[candidates]",
        "candidates",
    ),
}


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_seen(name: str) -> None:
    where, old, new = BUGS[name]

    def check() -> None:
        eagle3_checks.drafts_are_those_of_the_slow_way(words=13, window=4 if "window" in name else None)

    with PlantedBug(where, ((old, new),), check).planted(), pytest.raises((AssertionError, RuntimeError)):
        check()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_output_is_that_of_generate(family: str, shape: dict[str, Any]) -> None:
    target, inputs = target_of(family), inputs_of(family)
    drafter = Eagle3Drafter(head_for(target), **shape).fit(target)
    expected = {case: loop.generate(target.model, each, 16) for case, each in inputs.items()}
    for cases in (["one image", "no image", "two images"], ["two images"], ["several turns"]):
        run = answer(target, drafter, [inputs[case] for case in cases], Sampler(), 16)
        assert run.outputs() == [expected[case] for case in cases], cases


@pytest.mark.parametrize("words", [None, 13])
@pytest.mark.parametrize("family", FAMILIES)
def test_sampled_output_is_bitwise_that_of_plain_decoding(family: str, words: int | None) -> None:
    target, inputs = target_of(family, torch.float64), inputs_of(family, torch.float64)
    settings = {} if words is None else {"draft_vocabulary": words}
    drafter = Eagle3Drafter(head_for(target, **settings)).fit(target)
    sampler, seeds = Sampler(0.8, top_p=0.95), [3, 4, 5, 6]
    for cases in (list(MESSAGES)[:3], ["two images"]):
        rows, keys = [inputs[case] for case in cases], seeds[: len(cases)]
        plain = answer(target, NoDrafter(), rows, sampler, 16, seed=keys)
        assert answer(target, drafter, rows, sampler, 16, seed=keys).outputs() == plain.outputs(), cases


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_long_output_is_that_of_plain_decoding(family: str) -> None:
    """Longer than what both caches begin with."""
    target, inputs = target_of(family, torch.float64), inputs_of(family, torch.float64)
    drafter = Eagle3Drafter(head_for(target), num_draft_tokens=3, top_k=1).fit(target)
    rows = [inputs[case] for case in ("two images", "no image")]
    plain = answer(target, NoDrafter(), rows, Sampler(0.8), 300)
    assert answer(target, drafter, rows, Sampler(0.8), 300).outputs() == plain.outputs()


@pytest.mark.parametrize("family", ["llamagen", "emu3"])
@pytest.mark.parametrize("words", [None, 13])
def test_images_are_those_of_plain_decoding(family: str, words: int | None) -> None:
    """Under guidance; syntax that the head does not know costs its drafts."""
    if family == "emu3":
        model, tokenizer, *_ = tiny_emu3()
        target: Any = image_target(model)
        prompts = {"prompt": ["a red circle", "blue"], "height": 8, "width": 6, "tokenizer": tokenizer}
    else:
        target, prompts = llamagen(), {"class_labels": [0, 3]}
    requests = image_requests(target, guided=True, **prompts)
    settings = {} if words is None else {"draft_vocabulary": words}
    drafter = Eagle3Drafter(head_for(target, **settings), num_draft_tokens=12, depth=2, top_k=6)
    eagle3 = Accelerator("eagle3", drafter, SampleAndMatch()).fit(target)
    plain = Accelerator("none", NoDrafter(), SampleAndMatch())
    for temperature in (0.0, 0.9):
        expected, _ = draw(target, plain, requests, 3.0, temperature)
        assert draw(target, eagle3, requests, 3.0, temperature)[0] == expected


def test_a_target_with_windows() -> None:
    target = CausalTarget(tiny_mistral_sliding())
    drafter = Eagle3Drafter(head_for(target)).fit(target)
    expected = [generate(target.model, prompt, 24) for prompt in PROMPTS]
    assert decode(target, PROMPTS, drafter, max_new_tokens=24).outputs == expected


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (lambda: CausalTarget(tiny_llama(layers=3)), "layers is 3"),
        (lambda: CausalTarget(tiny_llama(vocab=65)), "vocabulary is 65"),
        (lambda: CausalTarget(tiny_llama(hidden=16)), "hidden size is 16"),
        (lambda: CausalTarget(tiny_mistral_sliding()), "model type is mistral"),
    ],
)
def test_another_target_is_refused(other: Callable[[], CausalTarget], named: str) -> None:
    with pytest.raises(InputError, match=named):
        Eagle3Drafter(head_for(llama())).fit(other())


def test_more_children_than_the_head_knows_are_refused() -> None:
    with pytest.raises(InputError, match="at most 6"):
        Eagle3Drafter(head_for(llama(), draft_vocabulary=6)).fit(llama())


def test_a_head_of_nan_costs_its_drafts_and_no_word() -> None:
    head = head_for(llama())
    head.fc.weight[0, 0] = torch.nan
    run = decode(llama(), PROMPTS, Eagle3Drafter(head).fit(llama()), max_new_tokens=12)
    assert run.outputs == [generate(llama().model, prompt, 12) for prompt in PROMPTS]
    assert run.stats.draft_faults > 0 and sum(run.stats.drafted) == 0
