"""Siblings that are drawn: distributions under each exact rule, SpecTr's merged chains, stops, refusals."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from mmspec.accelerators import build_accelerator
from mmspec.core.draft import DraftKind, Tree
from mmspec.core.interfaces import AcceptanceRule, Drafter
from mmspec.core.random_stream import Purpose, RandomStream
from mmspec.core.sampling import Sampler
from mmspec.errors import InputError
from mmspec.methods.draft_model.drafter import DraftModelDrafter
from mmspec.targets import CausalTarget
from mmspec.trees.growth import TreeGrowth, static_tree
from mmspec.trees.matching import SampleAndMatch
from mmspec.trees.rejection import KSequential, RecursiveRejection
from mmspec.trees.siblings import SiblingDraws
from tests.contracts.checks import PROMPTS, check_words, llama, precise
from tests.contracts.running import FanOutTarget, decode
from tests.methods import eagle_checks
from tests.tiny_models import tiny_lm_v8

RECURSIVE, SEQUENTIAL = RecursiveRejection(), KSequential()
#: What is drawn, the tree, the rule, and the probability below which no level is added.
DRAWN: dict[str, tuple[str, str, AcceptanceRule, float]] = {
    "SpecTr": ("sampled", "3x1x1", SEQUENTIAL, 0.0),
    "MCSD, with replacement": ("sampled", "2x2", RECURSIVE, 0.0),
    "MCSD, stopping early": ("without_replacement", "2x2x1", RECURSIVE, 0.25),
}


@functools.cache
def words() -> FanOutTarget:
    return FanOutTarget(tiny_lm_v8())


def draft_model(sampling: str, tree: str, stop_below: float = 0.0) -> Drafter:
    drafter = DraftModelDrafter(FanOutTarget(tiny_lm_v8(seed=5)), sampling=sampling, tree=tree)
    return drafter.stopping_below(stop_below) if stop_below else drafter


@pytest.mark.parametrize("name", DRAWN)
@torch.inference_mode()
@pytest.mark.every(3)
def test_words_of_a_draft_models_siblings_are_the_targets(name: str) -> None:
    sampling, tree, rule, stop_below = DRAWN[name]
    check_words(words(), draft_model(sampling, tree, stop_below), rule, Sampler(1.0), 4_000, length=4)


def test_the_targets_noise_finds_what_both_agree_about() -> None:
    """A draft model that is the target itself is right in every round, whatever is drawn."""
    run = decode(
        precise(),
        PROMPTS,
        DraftModelDrafter(CausalTarget(precise().model), tree="3x2x1"),
        SampleAndMatch(),
        Sampler(1.0),
        max_new_tokens=17,
    )
    assert run.stats.acceptance_length == 4.0


def grown(sampling: str, tree: str, p: torch.Tensor, rows: int = 64) -> Tree:
    """A tree whose nodes all have the distribution p [V] after them."""
    kind = DraftModelDrafter(llama(), sampling=sampling, tree=tree).kind
    first, root = torch.ones(rows, dtype=torch.long), torch.zeros(rows, dtype=torch.long)
    draws = SiblingDraws(kind, Sampler(1.0), RandomStream.from_seed(3, rows), first, len(p))
    growth = TreeGrowth(static_tree(tree), root, draws)
    while not growth.is_grown:
        growth.grow(p.log().expand(rows, growth.tokens.shape[1], -1))
    return growth.draft()[0]


def test_the_targets_noise_tells_how_likely_each_candidate_is() -> None:
    """A target whose log-probabilities are off by Gumbel noise chooses each as often as its draft says."""
    rows, q = 20_000, torch.tensor([0.5, 0.25, 0.15, 0.07, 0.03], dtype=torch.float64)
    random, first = RandomStream.from_seed(5, rows), torch.ones(rows, dtype=torch.long)
    log_q = q.log().expand(rows, 1, -1)
    children, said = SiblingDraws(DraftKind.COUPLED, Sampler(1.0), random, first, len(q))(log_q, 3, 1)
    noise = random.at(first[:, None]).gumbel(first[:, None], Purpose.TARGET, len(q), torch.float64)
    error = -torch.empty_like(noise).exponential_(generator=torch.Generator().manual_seed(1)).log()
    chosen = (log_q + noise + error).argmax(-1, keepdim=True)
    for rank in range(3):
        due, found = said[..., rank].exp(), (children[..., rank] == chosen[..., 0]).double()
        assert abs(float((due - found).mean())) < 4 * (0.25 / rows) ** 0.5
        sure = due > due.median()
        assert found[sure].mean() > found[~sure].mean(), "it differs from row to row"


def test_chains_that_agree_share_their_continuations() -> None:
    """SpecTr: at a node, candidates are the tokens of all chains that have come there."""
    draft = grown("sampled", "4x1x1", torch.tensor([0.6, 0.3, 0.1]))
    tokens, parents = draft.tokens.tolist(), draft.parents.tolist()
    for row in range(64):
        chains = [[tokens[row][1 + 4 * level + chain] for level in range(3)] for chain in range(4)]
        for level in (1, 2):
            for chain, words in enumerate(chains):
                first = next(k for k in range(4) if chains[k][:level] == words[:level])
                assert parents[row][1 + 4 * level + chain] == 1 + 4 * (level - 1) + first
        most = max(sum(parent == node for parent in parents[row][1:]) for node in range(13))
        assert most <= draft.max_children == 4


def test_chains_with_different_tokens_draw_their_continuations_independently() -> None:
    draft = grown("sampled", "4x1", torch.full((1000,), 1e-3))
    continuations = draft.tokens[:, 5:9]
    assert (continuations[:, :1] != continuations[:, 1:]).float().mean() > 0.98


def test_siblings_without_replacement_differ_and_end_where_nothing_is_left() -> None:
    draft = grown("without_replacement", "3x2", torch.tensor([0.7, 0.3, 0.0, 0.0]))
    assert draft.kind is DraftKind.WITHOUT_REPLACEMENT
    assert draft.valid[:, 1:3].all() and not draft.valid[:, 3].any(), "two tokens have mass"
    assert (draft.tokens[:, 1] != draft.tokens[:, 2]).all()
    assert draft.valid[:, 4:8].all() and not draft.valid[:, 8:].any(), "nor have the children of a third"


CHOSEN = "trees of candidates chosen without sampling, .*; got 'recursive_rejection'"
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("draft_model", {"tree": "4x2", "num_draft_tokens": 8}, "^num_draft_tokens must be None beside tree"),
    ("draft_model", {"tree": "dynamic"}, "tree"),
    ("draft_model", {"tree": "4x0"}, "tree"),
    ("draft_model", {"tree": "9x9x9"}, "at most 512 nodes"),
    ("draft_model", {"tree": "eagle", "sampling": "sampled"}, "children per level"),
    (
        "draft_model",
        {"tree": "4x2", "acceptance": "k_sequential"},
        "its drafts are trees of candidates drawn with the target's noise, .*; got 'k_sequential'",
    ),
    ("draft_model", {"tree": "4x2", "sampling": "greedy", "acceptance": "recursive_rejection"}, CHOSEN),
    (
        "draft_model",
        {"tree": "4x2", "sampling": "without_replacement", "acceptance": "k_sequential"},
        "^acceptance must be one of .*recursive_rejection.* trees of candidates sampled without replacement",
    ),
    (
        "draft_model",
        {"tree": "4x2", "sampling": "sampled", "acceptance": "speculative_sampling"},
        "trees of candidates sampled independently, for which this one would bias the output",
    ),
    ("draft_model", {"tree": "4x2", "sampling": "sampled", "length": "cost"}, "one size"),
    ("eagle", {"sampling": "sampled"}, "must be static"),
    ("eagle", {"sampling": "without_replacement", "num_draft_tokens": 8}, "must be static"),
    ("eagle", {"sampling": "iid"}, "sampling"),
    ("eagle", {"tree": "4x2", "sampling": "sampled", "length": "cost"}, "one size"),
]


@pytest.mark.parametrize(("name", "options", "told"), REFUSED)
def test_what_does_not_go_together_is_refused(name: str, options: dict[str, Any], told: str) -> None:
    model = llama() if name == "draft_model" else eagle_checks.head_for(llama())
    with pytest.raises(InputError, match=told):
        build_accelerator(name, model=model, **options)


def test_the_default_rule_is_the_one_that_is_exact_for_what_is_drawn() -> None:
    for sampling, rule in (
        ("coupled", SampleAndMatch),
        ("greedy", SampleAndMatch),
        ("sampled", RecursiveRejection),
        ("without_replacement", RecursiveRejection),
    ):
        for name, model in (("draft_model", llama()), ("eagle", eagle_checks.head_for(llama()))):
            assert type(build_accelerator(name, model=model, tree="4x2", sampling=sampling).rule) is rule
