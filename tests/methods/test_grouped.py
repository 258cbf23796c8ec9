"""GSD: partitions by rank."""

from __future__ import annotations

import torch

from mmspec.kernels import rank_ratio
from tests.methods import slow_rules
from tests.trees import relaxed_checks as checks


def test_groups_by_rank_equal_the_loop_and_are_a_partition() -> None:
    p, q = checks.random_distributions(40, 23)
    for size in (1, 4, 14, 40):
        ratios = rank_ratio(p, q, size)
        expected = [slow_rules.ranked_groups(*pq, size) for pq in zip(p.tolist(), q.tolist(), strict=True)]
        torch.testing.assert_close(ratios, torch.tensor(expected, dtype=p.dtype), rtol=0, atol=1e-12)
    exact = torch.minimum(p, q)
    torch.testing.assert_close(q * rank_ratio(p, q, 1), exact, rtol=0, atol=1e-15)
