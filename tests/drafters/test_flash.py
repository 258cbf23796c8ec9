"""The FLASH drafter: what it proposes, that no output changes, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from mmspec.decoding.sampling import Sampler
from mmspec.drafters.flash import FlashDrafter
from mmspec.drafters.none import NoDrafter
from mmspec.errors import InputError
from mmspec.targets import CausalTarget
from tests.contracts.checks import PROMPTS, llama
from tests.contracts.mutation import PlantedBug
from tests.contracts.running import decode, generate
from tests.drafters import flash_checks
from tests.drafters.flash_checks import MESSAGES, answer, head_for, inputs_of, target_of
from tests.targets import loop
from tests.tiny_models import tiny_llama, tiny_mistral_sliding

SHAPES: list[dict[str, Any]] = [
    {},
    {"block": 1},
    {"num_draft_tokens": 9, "top_k": 2, "depth": 6, "block": 3},
    {"top_k": 1, "depth": 7, "block": 3},
]
FAMILIES = ["llava", "qwen2_5_vl"]
SESSION = "mmspec.drafters.flash:FlashSession"
READING = "mmspec.drafters.feature_session:FeatureSession"


@pytest.mark.parametrize("block", [1, 2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_are_those_of_the_slow_way(family: str, block: int) -> None:
    flash_checks.drafts_are_those_of_the_slow_way(family, block)


@pytest.mark.parametrize("compressor", ["none", "identity", "attention_pruning"])
def test_drafts_with_another_compressor(compressor: str) -> None:
    options = {"tokens": 2} if compressor == "attention_pruning" else {}
    flash_checks.drafts_are_those_of_the_slow_way(compressor=compressor, compressor_options=options)


@pytest.mark.parametrize("block", [1, 2, 4])
def test_chains_are_those_of_the_slow_way(block: int) -> None:
    flash_checks.drafts_are_those_of_the_slow_way(block=block, top_k=1)


@pytest.mark.parametrize(("nodes", "top_k"), [(8, 3), (3, 1)])
def test_drafts_under_guidance(nodes: int, top_k: int) -> None:
    flash_checks.guided_drafts_are_those_of_the_slow_way(nodes, top_k)


PATH = "_copied(verdict.path)"
GROWTH, TREE = "mmspec.drafters.tree", f"{SESSION}._tree"
BUGS = {
    "states of the accepted path are shifted": (f"{READING}.observe", PATH, f"{PATH}.roll(1, 1)"),
    "tokens of the accepted path are not shifted": (f"{READING}.observe", ".roll(-1, 1)", ""),
    "the last node's state stands for the root's": (
        f"{READING}._read_committed",
        "take(hidden, accepted)",
        "hidden[:, -1]",
    ),
    "rows of candidates are kept": (f"{READING}._read_committed", "accepted + 1)", "accepted + 2)"),
    "the root is read and forgotten": (f"{READING}._read_committed", "accepted + 1)", "accepted)"),
    "levels are written over each other": (
        f"{GROWTH}:TreeGrowth.nodes",
        "parents.shape[1] - count, parents.shape[1]",
        "0, count",
    ),
    "positions in the array": (
        f"{READING}._read",
        "[:, None] + nodes.depth",
        "[:, None] + torch.arange(nodes.slots.shape[1])",
    ),
    "the question is the first token": (f"{READING}._prompt_rows", "[length - 1]", "[0]"),
    "every offset of a block is the first": (TREE, "logits[:, :, offset]", "logits[:, :, 0]"),
    "features of another offset": (TREE, "predicted[:, :, offset]", "predicted[:, :, 0]"),
    "all nodes descend from the first": (TREE, "base = base.gather(1, parent)", "base = 0 * parent"),
    "the bias of one token for all": (
        f"{SESSION}._biased",
        "self._copied(tokens)",
        "0 * self._copied(tokens)",
    ),
    "candidates see their siblings": (
        f"{GROWTH}:TreeGrowth.nodes",
        "[:, -count:]",
        "[:, -count:] | True",
    ),
    "children of another parent": (f"{GROWTH}:TreeGrowth.grow", "append(parent + ", "append(0 * parent + "),
    "only parents are seen": (
        f"{GROWTH}:TreeGrowth.nodes",
        "tree_paths(parents, len(self._parents))",
        "tree_paths(parents, 1)",
    ),
    "confidence of the last step alone": (
        f"{GROWTH}:TreeGrowth.grow",
        "(self.scores[..., None] +",
        "(0 * self.scores[..., None] +",
    ),
}


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_seen(name: str) -> None:
    where, old, new = BUGS[name]

    def check() -> None:
        options = {"tokens": 2}
        flash_checks.drafts_are_those_of_the_slow_way(
            compressor="attention_pruning", compressor_options=options
        )

    with PlantedBug(where, ((old, new),), check).planted(), pytest.raises((AssertionError, RuntimeError)):
        check()


CHAIN = f"{SESSION}._chain"
CHAIN_BUGS = {
    "tokens of another block": ("tokens[start + 1 :]", "tokens[1 : block + 1]"),
    "candidates see themselves alone": ("(nodes <= ", "(nodes == "),
    "the state at the start of the block": (")[:, -1:]", ")[:, :1]"),
    "the bias of the root for all": ("tokens[-1][:, None]", "root[:, None]"),
}


@pytest.mark.parametrize("name", CHAIN_BUGS)
def test_a_bug_planted_in_chains_is_seen(name: str) -> None:
    def check() -> None:
        flash_checks.drafts_are_those_of_the_slow_way(top_k=1)

    with PlantedBug(CHAIN, (CHAIN_BUGS[name],), check).planted(), pytest.raises(AssertionError):
        check()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_output_is_that_of_generate(family: str, shape: dict[str, Any]) -> None:
    target, inputs = target_of(family), inputs_of(family)
    drafter = FlashDrafter(head_for(target), **shape).fit(target)
    expected = {case: loop.generate(target.model, each, 16) for case, each in inputs.items()}
    batch = ["one image", "no image", "two images"]
    for cases in (batch, ["two images"], ["several turns"]):
        run = answer(target, drafter, [inputs[case] for case in cases], Sampler(), 16)
        assert run.outputs() == [expected[case] for case in cases], cases


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_sampled_output_is_bitwise_that_of_plain_decoding(family: str, shape: dict[str, Any]) -> None:
    target, inputs = target_of(family, torch.float64), inputs_of(family, torch.float64)
    drafter = FlashDrafter(head_for(target), **shape).fit(target)
    sampler, seeds = Sampler(0.8, top_p=0.95), [3, 4, 5, 6]
    for cases in (list(MESSAGES), ["two images"]):
        rows, keys = [inputs[case] for case in cases], seeds[: len(cases)]
        plain = answer(target, NoDrafter(), rows, sampler, 16, seed=keys)
        assert answer(target, drafter, rows, sampler, 16, seed=keys).outputs() == plain.outputs(), cases


@pytest.mark.parametrize("build", [tiny_mistral_sliding, tiny_llama])
def test_targets_without_images(build: Callable[..., Any]) -> None:
    target = CausalTarget(build())
    drafter = FlashDrafter(head_for(target)).fit(target)
    expected = [generate(target.model, prompt, 24) for prompt in PROMPTS]
    assert decode(target, PROMPTS, drafter, max_new_tokens=24).outputs == expected


def test_additive_masks() -> None:
    target, inputs = target_of("llava", torch.float64), inputs_of("llava", torch.float64)
    head = head_for(target)
    drafts = []
    for backend in ("sdpa", "eager"):
        head.set_attn_implementation(backend)
        head.decoder.set_attn_implementation(backend)
        examined = flash_checks.Examined(FlashDrafter(head, depth=6).fit(target), 8)
        answer(target, examined, [inputs["two images"]], Sampler(), 8)
        drafts.append(examined.drafts)
    assert drafts[0] == drafts[1] > 0


def test_one_pass_a_block() -> None:
    """Depth over block passes of the layer in a round, however wide the tree."""
    target, inputs = target_of("llava"), inputs_of("llava")
    for block, depth, passes in ((4, 4, 1), (4, 5, 2), (2, 6, 3), (1, 3, 3)):
        head = head_for(target)
        calls = []
        head.decoder.register_forward_hook(lambda *_: calls.append(1))  # noqa: B023
        drafter = FlashDrafter(head, num_draft_tokens=8, depth=depth, top_k=3, block=block).fit(target)
        run = answer(target, drafter, [inputs["one image"]], Sampler(), 12)
        assert len(calls) == 1 + passes * run.stats.rounds[0]


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
        FlashDrafter(head_for(llama())).fit(other())


@pytest.mark.parametrize(
    ("argument", "settings"),
    [
        ("num_draft_tokens", {"num_draft_tokens": 0}),
        ("num_draft_tokens", {"num_draft_tokens": 9999}),
        ("depth", {"depth": 0}),
        ("depth", {"depth": 7, "num_draft_tokens": 6}),
        ("top_k", {"top_k": 1.5}),
        ("top_k", {"top_k": 0}),
        ("block", {"block": 0}),
        ("block", {"block": 5}),
    ],
)
def test_a_setting_out_of_range_is_named(argument: str, settings: dict[str, Any]) -> None:
    with pytest.raises(InputError) as caught:
        FlashDrafter(head_for(llama()), **settings)
    assert caught.value.argument == argument


@pytest.mark.parametrize(
    ("settings", "nodes"),
    [({}, 16), ({"num_draft_tokens": 1}, 1), ({"top_k": 1}, 4), ({"depth": 40}, 40), ({"top_k": 20}, 20)],
)
def test_defaults_give_way_to_what_was_asked_for(settings: dict[str, Any], nodes: int) -> None:
    assert FlashDrafter(head_for(llama()), **settings).shape.num_draft_tokens == nodes


def test_more_children_than_tokens_are_refused_with_the_target() -> None:
    target = CausalTarget(tiny_llama(vocab=3))
    with pytest.raises(InputError, match="at most 3"):
        FlashDrafter(head_for(target)).fit(target)


def test_a_drafter_that_was_not_fitted_is_named() -> None:
    with pytest.raises(InputError, match="fit"):
        decode(llama(), PROMPTS, FlashDrafter(head_for(llama())))


@pytest.mark.parametrize("top_k", [4, 1])
def test_a_head_of_nan_costs_its_drafts_and_no_word(top_k: int) -> None:
    head = head_for(llama())
    head.fc.weight[0, 0] = torch.nan
    run = decode(llama(), PROMPTS, FlashDrafter(head, top_k=top_k).fit(llama()), max_new_tokens=12)
    assert run.outputs == [generate(llama().model, prompt, 12) for prompt in PROMPTS]
    assert run.stats.draft_faults > 0 and sum(run.stats.drafted) == 0
