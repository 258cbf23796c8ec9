"""COOL-SD: its factors fall from place to place, and its acceptance is the closed form."""

from __future__ import annotations

import torch

from mmspec.acceptance.cool import Cool
from mmspec.decoding.draft import DraftKind
from tests.acceptance import relaxed_checks as checks
from tests.acceptance.exact_distribution import exact_distribution

IID = DraftKind.IID


def test_the_factors_fall_and_never_below_the_exact_rule() -> None:
    depth = torch.arange(4, dtype=torch.float64)
    assert torch.allclose(Cool(3.0, nu=0.7).allowance(depth), (3 * torch.exp(-0.7 * depth)).clamp_min(1))
    assert Cool(3.0, nu=0.7).allowance(depth).tolist()[2:] == [1.0, 1.0]
    assert torch.allclose(
        Cool(2.0, nu=0.0, mu=0.1).allowance(depth), torch.full((4,), 2.0).double() * 0.904837418
    )
    p, q = checks.random_distributions(50)
    torch.testing.assert_close(exact_distribution(Cool(1.0), p, q, 1, IID).output, p, rtol=0, atol=1e-11)
    gained = exact_distribution(Cool(2.0), p, q, 1, IID)
    assert (gained.acceptance >= torch.minimum(p, q).sum(-1) - 1e-11).all()
    assert torch.allclose(gained.acceptance, torch.minimum(q, 2 * p).sum(-1), rtol=0, atol=1e-11)
