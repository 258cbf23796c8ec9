"""Warping compared with transformers' warpers, processors along drafts, and guidance."""

from __future__ import annotations

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import logits_process as lp

from mmspec.core.draft import DraftKind, Tree
from mmspec.core.processors import History
from mmspec.core.sampling import Sampler
from tests.contracts import edge_checks
from tests.contracts.distributions import reference_distribution

ROOT = Tree.chain(torch.zeros(1, 1, dtype=torch.long), DraftKind.POINT)
FIRST = torch.zeros(1, dtype=torch.long)  # output index that the root predicts
START = History.of_prompts([[0]], torch.device("cpu"))


def warp(sampler: Sampler, logits: Tensor) -> Tensor:
    """[V] logits -> [V] probabilities."""
    return sampler(logits[None, None], ROOT, START, FIRST).p[0, 0]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    size=st.integers(1, 40),
    seed=st.integers(0, 2**32),
    temperature=st.sampled_from([0.3, 0.5, 0.6, 1.0, 1.5, 7.0]),
    top_k=st.one_of(st.none(), st.integers(1, 50)),
    top_p=st.one_of(st.none(), st.floats(0.01, 1.0)),
    min_p=st.one_of(st.none(), st.floats(0.0, 1.0)),
)
def test_the_distribution_is_that_of_transformers_warpers(
    size: int, seed: int, temperature: float, top_k: int | None, top_p: float | None, min_p: float | None
) -> None:
    logits = 3 * torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    top_k = min(top_k, size) if top_k else None
    before = warp(Sampler(temperature, top_k), logits)
    mass = before.sort().values.cumsum(0)
    # a cut exactly at a token's edge is decided by rounding
    assume(top_p is None or (mass - (1 - top_p)).abs().min() > 1e-9)
    nucleus = warp(Sampler(temperature, top_k, top_p), logits)
    assume(not min_p or ((nucleus / nucleus.max() - min_p).abs() > 1e-9).all())
    sampler = Sampler(temperature, top_k, top_p, min_p)
    expected = reference_distribution(logits[None, None], sampler)[0]
    assert torch.allclose(warp(sampler, logits), expected, rtol=0, atol=1e-12)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32), scale=st.floats(0.0, 20.0))
def test_guidance_is_u_plus_s_times_c_minus_u(seed: int, scale: float) -> None:
    logits = torch.randn(2, 1, 9, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    logits = logits if scale != 1.0 else logits[:1]  # where guidance is off, one prompt is read
    sampler = Sampler(0.7, top_k=5, guidance_scale=scale)
    distribution = sampler(logits, ROOT, START, FIRST).p[0, 0]
    expected = reference_distribution(logits, sampler)[0]
    assert torch.allclose(distribution, expected, rtol=0, atol=1e-12)


def test_ties_go_to_the_lowest_id_and_greedy_is_one_hot() -> None:
    logits = torch.tensor([1.0, 4.0, 4.0, 2.0])
    assert warp(Sampler(), logits).tolist() == [0, 1, 0, 0]
    scores = Sampler()(logits[None, None], ROOT, START, FIRST)
    assert scores.choose(ROOT, None, FIRST).item() == 1  # type: ignore[arg-type]


def test_processors_come_before_temperature_and_after_guidance() -> None:
    """The order of transformers: a bias of 1 on a guided logit is divided by the temperature."""
    bias = lp.SequenceBiasLogitsProcessor({(1,): 1.0})
    logits = torch.randn(2, 1, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sampler = Sampler(0.5, guidance_scale=2.0, processors=[LogitsProcessorList([bias])])
    distribution = sampler(logits, ROOT, START, FIRST).p[0, 0]
    conditional, unconditional = logits.log_softmax(-1)[:, 0]
    guided = unconditional + 2.0 * (conditional - unconditional) + torch.tensor([0.0, 1.0, 0.0])
    assert torch.allclose(distribution, (guided / 0.5).softmax(-1))


def test_guidance_gives_what_generate_gives_with_a_longer_and_a_shorter_negative_prompt() -> None:
    edge_checks.guidance_with_a_longer_negative_prompt()
