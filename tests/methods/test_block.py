"""Block verification: exact by enumeration, not worse than token by token, and equal to HSD."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mmspec.accelerators import build_accelerator
from mmspec.core.draft import DraftKind
from mmspec.core.interfaces import PromptOutput
from mmspec.core.random_stream import RandomStream
from mmspec.core.sampling import Sampler
from mmspec.errors import InputError
from mmspec.methods.block.rule import BlockVerification, weigh_prefixes
from mmspec.methods.draft_model.drafter import DraftModelDrafter
from mmspec.targets import CausalTarget
from mmspec.trees.siblings import SiblingDraws
from tests.contracts.checks import llama
from tests.contracts.distributions import ALARM, chi_square
from tests.contracts.running import as_request, canvas_of, decode
from tests.contracts.toy import TableTarget
from tests.methods.slow_rules import hierarchical
from tests.oracles import SampledTreeDrafter
from tests.tiny_models import tiny_lm
from tests.trees.chains import Chains, integrate, judge
from tests.trees.exact_distribution import EXACT

RULE = BlockVerification()


def expected_of(chains: Chains, kept: Tensor) -> float:
    """Mean tokens accepted, if each prefix is kept with a probability [R, K]."""
    return float((chains.weight[:, None] * kept * chains.drawn).sum())


@pytest.mark.parametrize("edges", [False, True])
def test_the_joint_distribution_is_the_targets(edges: bool) -> None:
    for seed in range(2):
        chains = Chains.random(seed, edges=edges)
        out, mean = integrate(chains, *judge(RULE, chains))
        torch.testing.assert_close(out, chains.joint(), rtol=0, atol=EXACT)
        weight = weigh_prefixes(chains.ratios, torch.ones_like(chains.ratios))[:, 1:]
        assert abs(mean - expected_of(chains, weight)) < 1e-9, "a prefix is kept with its weight"
        assert mean >= expected_of(chains, chains.ratios.clamp_max(1).cumprod(-1)) - 1e-12


@given(st.integers(0, 10_000), st.integers(1, 4), st.integers(2, 3))
@settings(deadline=None, max_examples=40)
def test_more_is_accepted_than_token_by_token_as_much_of_one_token_and_no_more_than_can_be(
    seed: int, places: int, vocabulary: int
) -> None:
    chains = Chains.random(seed, places, vocabulary)
    whole = expected_of(chains, weigh_prefixes(chains.ratios, torch.ones_like(chains.ratios))[:, 1:])
    alone = expected_of(chains, chains.ratios.clamp_max(1).cumprod(-1))
    most = expected_of(chains, chains.ratios.cumprod(-1).clamp_max(1))  # for each prefix separately
    assert alone - 1e-12 <= whole <= most + 1e-12
    assert places > 1 or abs(whole - alone) < 1e-12


def test_the_equations_of_hierarchical_speculative_decoding_are_these() -> None:
    chains = Chains.random(3)
    passes, finals = judge(RULE, chains)
    for row, tokens in enumerate(chains.tokens.tolist()):
        accept, resample = hierarchical(chains.p[row].tolist(), chains.q[row].tolist(), tokens)
        assert passes.new_tensor(accept).sub(passes[row, 1:]).abs().max() < 1e-9
        for place, expected in enumerate(resample):
            if expected:
                assert passes.new_tensor(expected).sub(finals[place][row]).abs().max() < 1e-9


def test_what_was_refused_does_not_come_again() -> None:
    """A round depends on all its draws, so reusing their noise in the next round is a bias (p < 1e-12)."""
    p, q = torch.tensor([0.5, 0.5]).double(), torch.tensor([0.9, 0.1]).double()
    target = TableTarget(p.log().expand(1, 2, 2, 2).contiguous())
    drafter = SampledTreeDrafter(q.expand(2, 2).contiguous(), (1, 1, 1), DraftKind.IID)
    run = decode(target, [(1, 0)] * 6_000, drafter, RULE, Sampler(1.0), max_new_tokens=5)
    words = (torch.tensor(run.outputs)[:, :5] * 2 ** torch.arange(5)).sum(-1)
    even = torch.full((32,), 1 / 32, dtype=torch.float64)
    assert chi_square(torch.bincount(words, minlength=32), even).p_value > ALARM


@torch.inference_mode()
def test_drafters_draw_anew_in_every_round() -> None:
    """With equal probabilities of all tokens, the candidates of two rounds differ only by the noise."""
    model = tiny_lm()
    model.get_output_embeddings().weight.zero_()
    small, rows = CausalTarget(model), 8
    drafter = DraftModelDrafter(small, 3, "sampled")
    prompts = [as_request([1, 2, 3])] * rows
    random, drafted = RandomStream.from_seed(0, rows), []
    for emitted in (1, 2):
        session = drafter.start(prompts, PromptOutput(torch.zeros(rows, 1, 64)), Sampler(1.0), random)
        drafted.append(session.propose(canvas_of([[1, 2, 3, 4, 5][: 3 + emitted]] * rows, emitted)).tokens)
    assert (drafted[0][:, 2:] != drafted[1][:, 1:-1]).any(), "two places of both rounds"
    for kind in (DraftKind.IID, DraftKind.WITHOUT_REPLACEMENT):
        draws = [SiblingDraws(kind, Sampler(1.0), random, torch.full((rows,), first), 64) for first in (1, 2)]
        even = torch.zeros(rows, 1, 64).log_softmax(-1)
        assert (draws[0](even, 1, 2)[0] != draws[1](even, 1, 1)[0]).any()


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("draft_model", {"sampling": "sampled", "tree": "2x2"}, "trees of candidates sampled independently"),
        ("draft_model", {"sampling": "coupled"}, "chains of candidates drawn with the target's noise"),
        ("sjd", {}, "kept across rounds"),
    ],
)
def test_trees_and_drafts_that_are_kept_are_refused(name: str, options: dict[str, Any], told: str) -> None:
    model = {"model": llama()} if name == "draft_model" else {}
    with pytest.raises(InputError, match=told):
        build_accelerator(name, acceptance="block", **model, **options)
    chain = build_accelerator("draft_model", model=llama(), sampling="sampled", acceptance="block")
    assert chain.exactness == "exact"
