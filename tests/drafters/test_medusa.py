"""Medusa and Hydra as drafters: what they propose, that no output changes, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from mmspec.decoding.sampling import Sampler
from mmspec.drafters.level_heads import MedusaDrafter
from mmspec.drafters.none import NoDrafter
from mmspec.errors import InputError
from mmspec.targets import CausalTarget
from tests.contracts.checks import PROMPTS, llama
from tests.contracts.mutation import PlantedBug
from tests.contracts.running import decode, generate
from tests.drafters import heads_checks
from tests.drafters.flash_checks import MESSAGES, answer, inputs_of, target_of
from tests.drafters.heads_checks import KINDS, drafter_for, hydra_for, medusa_for
from tests.targets import loop
from tests.tiny_models import tiny_llama, tiny_mistral_sliding

FAMILIES = ["llava", "qwen2_5_vl"]
SHAPES: list[dict[str, Any]] = [{}, {"top_k": 1}, {"tree": "medusa"}, {"num_draft_tokens": 5, "depth": 2}]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_those_of_the_slow_way(kind: str, family: str) -> None:
    heads_checks.drafts_are_those_of_the_slow_way(kind, family)


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_static_trees_are_those_of_the_slow_way(kind: str) -> None:
    heads_checks.drafts_are_those_of_the_slow_way(kind, tree="medusa")


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_under_guidance(kind: str) -> None:
    heads_checks.guided_drafts_are_those_of_the_slow_way(kind)


STATE = "mmspec.drafters.heads:StateSession"
MEDUSA, HYDRA = "mmspec.drafters.level_heads:MedusaSession", "mmspec.drafters.level_heads"
BUGS = {
    "the state of the first node": (
        "medusa",
        f"{STATE}.observe",
        "verdict.last",
        "verdict.path[:, 0]",
    ),
    "the state of the last node": (
        "medusa",
        f"{STATE}.observe",
        "verdict.last",
        "verdict.path[:, -1]",
    ),
    "one head for all levels": ("medusa", f"{MEDUSA}.propose", "growth.level, None", "0, None"),
    "heads are one level late": (
        "medusa",
        f"{MEDUSA}.propose",
        "growth.level, None",
        "growth.level - 1, None",
    ),
    "the path of another parent": (
        "hydra",
        f"{HYDRA}:HydraGrowth.grow",
        "self._copied(parent)",
        "0 * self._copied(parent)",
    ),
    "the path backwards": (
        "hydra",
        f"{HYDRA}:HydraGrowth.grow",
        "[before, self._embed(growth)]",
        "[self._embed(growth), before]",
    ),
    "the state without the prefix": (
        "hydra",
        f"{HYDRA}:PrefixSession.propose",
        "self._read_committed(canvas)",
        "self._read_committed(canvas) * 0 + self.features[:, 0]",
    ),
    "rows of the prefix are kept twice": (
        "hydra",
        "mmspec.drafters.feature_session:FeatureSession._read_committed",
        "accepted + 1)",
        "accepted + 2)",
    ),
}


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_seen(name: str) -> None:
    kind, where, old, new = BUGS[name]

    def check() -> None:
        heads_checks.drafts_are_those_of_the_slow_way(kind)

    with PlantedBug(where, ((old, new),), check).planted(), pytest.raises((AssertionError, RuntimeError)):
        check()


@pytest.mark.parametrize("kind", ["medusa", "hydra", "hydra, without prefix attention"])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_output_is_that_of_generate(family: str, kind: str) -> None:
    target, inputs = target_of(family), inputs_of(family)
    expected = {case: loop.generate(target.model, each, 16) for case, each in inputs.items()}
    for shape in SHAPES:
        drafter = drafter_for(kind, target, **shape)
        for cases in (["one image", "no image", "two images"], ["several turns"]):
            run = answer(target, drafter, [inputs[case] for case in cases], Sampler(), 16)
            assert run.outputs() == [expected[case] for case in cases], (shape, cases)


@pytest.mark.parametrize("kind", ["medusa", "hydra", "hydra, without prefix attention"])
@pytest.mark.parametrize("family", FAMILIES)
def test_sampled_output_is_bitwise_that_of_plain_decoding(family: str, kind: str) -> None:
    target, inputs = target_of(family, torch.float64), inputs_of(family, torch.float64)
    sampler, seeds = Sampler(0.8, top_p=0.95), [3, 4, 5, 6]
    for cases in (list(MESSAGES), ["two images"]):
        rows, keys = [inputs[case] for case in cases], seeds[: len(cases)]
        plain = answer(target, NoDrafter(), rows, sampler, 16, seed=keys).outputs()
        for shape in SHAPES:
            drafter = drafter_for(kind, target, **shape)
            assert answer(target, drafter, rows, sampler, 16, seed=keys).outputs() == plain, (shape, cases)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("build", [tiny_mistral_sliding, tiny_llama])
def test_targets_without_images(build: Callable[..., Any], kind: str) -> None:
    target = CausalTarget(build())
    expected = [generate(target.model, prompt, 16) for prompt in PROMPTS]
    assert decode(target, PROMPTS, drafter_for(kind, target), max_new_tokens=16).outputs == expected


def test_medusa_is_one_pass_a_round() -> None:
    """And the heads that are deeper than the tree do not run."""
    target, inputs = target_of("llava"), inputs_of("llava")
    drafter, calls = drafter_for("medusa", target, depth=2, num_draft_tokens=6), []
    for blocks in drafter.model.blocks:  # type: ignore[union-attr]
        blocks.register_forward_hook(lambda *_: calls.append(1))
    run = answer(target, drafter, [inputs["one image"]], Sampler(), 12)
    assert len(calls) == 2 * run.stats.rounds[0] and run.stats.draft_passes == run.stats.rounds[0]


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
@pytest.mark.parametrize(
    ("argument", "settings"),
    [
        ("num_draft_tokens", {"num_draft_tokens": 0}),
        ("depth", {"depth": 5}),
        ("depth", {"tree": "eagle"}),
        ("depth", {"tree": "medusa", "depth": 2}),
        ("top_k", {"top_k": 0}),
        ("tree", {"tree": "medussa"}),
    ],
)
def test_a_setting_out_of_range_is_named(kind: str, argument: str, settings: dict[str, Any]) -> None:
    with pytest.raises(InputError) as caught:
        drafter_for(kind, llama(), **settings)
    assert caught.value.argument == argument


@pytest.mark.parametrize("heads", [1, 2, 7])
def test_the_tree_is_as_deep_as_there_are_heads(heads: int) -> None:
    for head in (medusa_for(llama(), num_heads=heads), hydra_for(llama(), num_heads=heads)):
        shape = MedusaDrafter(head).shape  # type: ignore[arg-type]
        assert shape.depth == heads and shape.num_draft_tokens == (8 if heads == 1 else 24)


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
@pytest.mark.parametrize(
    ("other", "named"),
    [
        (lambda: CausalTarget(tiny_llama(layers=3)), "layers is 3"),
        (lambda: CausalTarget(tiny_llama(vocab=65)), "vocabulary is 65"),
        (lambda: CausalTarget(tiny_llama(hidden=16)), "hidden size is 16"),
        (lambda: CausalTarget(tiny_mistral_sliding()), "model type is mistral"),
    ],
)
def test_another_target_is_refused(kind: str, other: Callable[[], CausalTarget], named: str) -> None:
    with pytest.raises(InputError, match=named):
        drafter_for(kind, llama()).fit(other())


def test_heads_that_do_not_say_their_target_fit_by_width_and_vocabulary() -> None:
    nameless = medusa_for(llama(), target_type="", target_layers=0)
    MedusaDrafter(nameless).fit(CausalTarget(tiny_llama(layers=3)))
    with pytest.raises(InputError, match="hidden size is 16"):
        MedusaDrafter(nameless).fit(CausalTarget(tiny_llama(hidden=16)))


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_heads_of_nan_cost_their_drafts_and_no_word(kind: str) -> None:
    drafter = drafter_for(kind, llama())
    for parameter in drafter.model.parameters():
        parameter.fill_(torch.nan)
    run = decode(llama(), PROMPTS, drafter, max_new_tokens=12)
    assert run.outputs == [generate(llama().model, prompt, 12) for prompt in PROMPTS]
    assert run.stats.draft_faults > 0 and sum(run.stats.drafted) == 0
