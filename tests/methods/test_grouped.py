"""GSD: partitions by rank and by code vector, and the windows of the released code."""

from __future__ import annotations

import torch

from mmspec.kernels import rank_ratio
from mmspec.methods.gsd.rule import cluster_codes, cluster_ratio
from mmspec.plugins import RULES
from mmspec.trees.relaxed_sampling import RelaxedSampling
from tests.methods import slow_rules
from tests.trees import relaxed_checks as checks
from tests.trees.codes import random_codes


def test_groups_by_rank_equal_the_loop_and_are_a_partition() -> None:
    p, q = checks.random_distributions(40, 23)
    for size in (1, 4, 14, 40):
        ratios = rank_ratio(p, q, size)
        expected = [slow_rules.ranked_groups(*pq, size) for pq in zip(p.tolist(), q.tolist(), strict=True)]
        torch.testing.assert_close(ratios, torch.tensor(expected, dtype=p.dtype), rtol=0, atol=1e-12)
    exact = torch.minimum(p, q)
    torch.testing.assert_close(q * rank_ratio(p, q, 1), exact, rtol=0, atol=1e-15)


def test_released_groups_equal_the_loop() -> None:
    """Ranks r - 7 to r + 6 with both filters; the lowest seven ranks by the exact rule; p(x) = 0 may pass."""
    vocabulary, syntax = 24, 2
    codes = random_codes(vocabulary, syntax)
    rule = RULES["grouped"](reference=True).fit(codes)
    assert isinstance(rule, RelaxedSampling)
    p, q = checks.random_distributions(30, vocabulary)
    p = p.masked_fill(p < 0.02, 0.0)
    p, q = p / p.sum(-1, keepdim=True), q.clamp_min(1e-4) / q.clamp_min(1e-4).sum(-1, keepdim=True)
    accepted = rule.mass(p, q, p[:, :1]) / q
    assert codes.codebook is not None
    vectors = codes.codebook.double().tolist()
    expected = [slow_rules.released_groups(*pq, vectors) for pq in zip(p.tolist(), q.tolist(), strict=True)]
    torch.testing.assert_close(accepted, torch.tensor(expected, dtype=p.dtype), rtol=0, atol=1e-9)
    x = torch.tensor([[0, 11, 23]]).expand(30, -1)
    torch.testing.assert_close(rule.mass_at(p, q, x, p[:, :1]), (accepted * q).gather(-1, x))
    assert (accepted[p == 0] > 0).any(), "as released, a token of probability zero may be accepted"
    assert (accepted * q).sum(-1).mean() > torch.minimum(p, q).sum(-1).mean()


def test_clusters_of_codes_hold_near_codes_and_judge_syntax_alone() -> None:
    centres = torch.tensor([[0.0, 0], [9, 0], [0, 9], [9, 9]])
    noise = torch.randn(4, 10, 2, generator=torch.Generator().manual_seed(0))
    cluster = cluster_codes((centres[:, None] + 0.1 * noise).flatten(0, 1), 4)
    assert [len(set(part.tolist())) for part in cluster.split(10)] == [1] * 4 and len(
        set(cluster.tolist())
    ) == 4
    p, q = checks.random_distributions(200, 43)
    accepted = q * cluster_ratio(p, q, cluster)
    assert (accepted.sum(-1) >= torch.minimum(p, q).sum(-1) - 1e-12).all()
    torch.testing.assert_close(accepted[:, 40:], torch.minimum(p, q)[:, 40:], rtol=0, atol=1e-15)
