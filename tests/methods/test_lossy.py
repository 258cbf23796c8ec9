"""Lossy rules with a single formula: bounds of `typical` and `top_beta`, runs of `suffix`."""

from __future__ import annotations

import pytest
import torch

from mmspec.core.distributions import Scores
from mmspec.core.draft import DraftKind, Tree
from mmspec.core.random_stream import RandomStream
from mmspec.core.sampling import Sampler
from mmspec.methods.suffix.rule import Suffix
from mmspec.methods.top_beta.rule import TopBeta
from mmspec.methods.typical.rule import Typical
from tests.contracts.checks import PROMPTS, llama
from tests.contracts.running import decode, generate
from tests.contracts.toy import dirichlet
from tests.methods import slow_rules
from tests.oracles import RandomTreeDrafter, next_token

RULES = [Typical(), Typical(epsilon=0.3, delta=0.3), Typical(epsilon=0.9, delta=0.9)]


@pytest.mark.parametrize(("rule", "temperature"), list(zip(RULES, (0.5, 1.0, 1.5), strict=True)))
def test_the_measured_distance_per_token_is_within_the_stated_bound(
    rule: Typical, temperature: float
) -> None:
    """For each token and distribution: an accepted token is a point mass, at distance 1 - p(x) from p."""
    p = (dirichlet(200, 6, seed=8).log() / temperature).softmax(-1).repeat_interleave(6, 0)
    offered = torch.arange(6).repeat(200)
    draft = Tree.chain(torch.stack([torch.zeros_like(offered), offered], 1), DraftKind.POINT)
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
    draft = Tree.chain(torch.tensor([[0, token] for token in range(len(p))]), DraftKind.POINT)
    scores = Scores(target.log().expand(len(p), 2, -1), greedy=False)
    random = RandomStream.from_seed(0, len(p))
    verdict = Typical().verify(draft, scores, random, torch.ones(len(p), dtype=torch.long))
    assert verdict.accepted.tolist() == [int(p_x > threshold) for p_x in p]


def test_a_refused_candidate_leaves_the_targets_distribution() -> None:
    p = torch.tensor([0.05, 0.5, 0.45], dtype=torch.float64)
    rows = 20_000
    draft = Tree.chain(torch.zeros(rows, 2, dtype=torch.long), DraftKind.POINT)
    scores = Scores(p.log().expand(rows, 2, 3), greedy=False)
    rule = Typical(epsilon=0.3, delta=1.0)
    verdict = rule.verify(draft, scores, RandomStream.from_seed(1, rows), torch.ones(rows, dtype=torch.long))
    assert not verdict.accepted.any()
    share = torch.bincount(next_token(verdict), minlength=3) / rows
    assert ((share - p).abs() < 4 * (p * (1 - p) / rows).sqrt()).all()


@pytest.mark.parametrize(("beta", "tau"), [(1, 3.0), (64, 0.0), (3, 3.0), (64, 0.4)])
def test_no_emitted_token_is_further_below_the_likeliest_than_tau_or_behind_beta_others(
    beta: int, tau: float
) -> None:
    """Checked by the model's forward pass over the output; the first two settings allow only one token."""
    target, expected = llama(), [generate(llama().model, prompt, 24) for prompt in PROMPTS]
    rule, gaps = TopBeta(beta, tau), []
    outputs = decode(target, PROMPTS, RandomTreeDrafter(6, 64), rule, Sampler(), max_new_tokens=24).outputs
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        logits = target.model(torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1]
        own = logits.gather(-1, torch.tensor(output)[:, None])
        assert ((logits > own + 1e-5).sum(-1) < beta).all()
        gaps.append((logits.amax(-1) - own[:, 0]).max().item())
    assert max(gaps) <= tau + 1e-5
    assert (outputs == expected) == (beta == 1 or not tau), "a gap of its own is taken, and nothing else"


def test_joint_runs_equal_the_loop() -> None:
    generator = torch.Generator().manual_seed(6)
    p_x, q_x, u = torch.rand(3, 400, 7, dtype=torch.float64, generator=generator)
    p_x[:40, 3] = 0.0
    accepted = Suffix(0.8).count_accepted(p_x, q_x, u)
    rows = zip(p_x.tolist(), q_x.tolist(), u.tolist(), strict=True)
    assert accepted.tolist() == [slow_rules.joint_runs(*row, 0.8) for row in rows]
    exact = ((u * q_x <= p_x) & (p_x > 0)).long().cumprod(-1).sum(-1)
    assert (accepted >= exact).all() and (accepted > exact).sum() > 20
