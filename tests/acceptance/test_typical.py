"""The lossy rule: its bound holds, and it is labelled."""

from __future__ import annotations

import pytest
import torch

from mmspec.acceptance.typical import Typical
from mmspec.decoding.distribution import Scores
from mmspec.decoding.draft import Draft, DraftKind
from mmspec.decoding.random_stream import RandomStream
from mmspec.decoding.sampling import Sampler
from mmspec.errors import InputError
from tests.contracts.checks import PROMPTS, llama
from tests.contracts.running import decode, generate
from tests.contracts.toy import dirichlet
from tests.oracles import RandomTreeDrafter

RULES = [Typical(), Typical(epsilon=0.3, delta=0.3), Typical(epsilon=0.9, delta=0.9)]


@pytest.mark.parametrize(("rule", "temperature"), list(zip(RULES, (0.5, 1.0, 1.5), strict=True)))
def test_the_measured_distance_per_token_is_within_the_stated_bound(
    rule: Typical, temperature: float
) -> None:
    """Every token offered to every distribution: an accepted one is a point mass, at 1 - p(x) from p."""
    p = (dirichlet(200, 6, seed=8).log() / temperature).softmax(-1).repeat_interleave(6, 0)
    offered = torch.arange(6).repeat(200)
    draft = Draft.chain(torch.stack([torch.zeros_like(offered), offered], 1), DraftKind.POINT)
    scores = Scores(p.log()[:, None].expand(-1, 2, -1), greedy=False)
    random = RandomStream.from_seed(0, len(p))
    verdict = rule.verify(draft, scores, random, torch.ones(len(p), dtype=torch.long))
    accepted = verdict.accepted == 1
    output = torch.where(accepted[:, None], torch.nn.functional.one_hot(offered, 6).double(), p)
    distance = (output - p).abs().sum(-1) / 2
    entropy = -(p * p.clamp_min(1e-300).log()).sum(-1)
    bound = 1 - torch.minimum(torch.tensor(rule.epsilon), rule.delta * torch.exp(-entropy))
    assert accepted.any() and (~accepted).any()
    assert (distance <= bound + 1e-12).all()
    p_x = p.gather(1, offered[:, None])[:, 0]
    assert torch.equal(accepted, p_x > 1 - bound), "and it accepts just what it says"


@pytest.mark.parametrize(
    ("p", "threshold"),
    [([0.80, 0.12, 0.08], 0.09), ([0.01] * 100, 0.3 / 100)],
    ids=["sure", "torn between a hundred"],
)
def test_by_default_the_hard_threshold_caps_where_the_target_is_sure_and_entropy_lowers_it_elsewhere(
    p: list[float], threshold: float
) -> None:
    target = torch.tensor(p, dtype=torch.float64)
    torch.testing.assert_close(Typical().threshold(target).item(), threshold)
    draft = Draft.chain(torch.tensor([[0, token] for token in range(len(p))]), DraftKind.POINT)
    scores = Scores(target.log().expand(len(p), 2, -1), greedy=False)
    random = RandomStream.from_seed(0, len(p))
    verdict = Typical().verify(draft, scores, random, torch.ones(len(p), dtype=torch.long))
    assert verdict.accepted.tolist() == [int(p_x > threshold) for p_x in p]


def test_a_refused_candidate_leaves_the_targets_distribution() -> None:
    p = torch.tensor([0.05, 0.5, 0.45], dtype=torch.float64)
    rows = 20_000
    draft = Draft.chain(torch.zeros(rows, 2, dtype=torch.long), DraftKind.POINT)
    scores = Scores(p.log().expand(rows, 2, 3), greedy=False)
    rule = Typical(epsilon=0.3, delta=1.0)
    verdict = rule.verify(draft, scores, RandomStream.from_seed(1, rows), torch.ones(rows, dtype=torch.long))
    assert not verdict.accepted.any()
    share = torch.bincount(verdict.next_token, minlength=3) / rows
    assert ((share - p).abs() < 4 * (p * (1 - p) / rows).sqrt()).all()


def test_at_temperature_zero_it_is_greedy_decoding() -> None:
    expected = [generate(llama().model, prompt, 24) for prompt in PROMPTS]
    drafter = RandomTreeDrafter(6, 64, hints={tuple(p): e for p, e in zip(PROMPTS, expected, strict=True)})
    drafter.kind = DraftKind.POINT
    assert decode(llama(), PROMPTS, drafter, Typical(), Sampler(), max_new_tokens=24).outputs == expected


def test_a_threshold_out_of_range_is_named() -> None:
    for name in ("epsilon", "delta"):
        for value in (-0.1, 1.1, float("nan"), "0.3", True):
            with pytest.raises(InputError) as caught:
                Typical(**{name: value})  # type: ignore[arg-type]
            assert caught.value.argument == name
