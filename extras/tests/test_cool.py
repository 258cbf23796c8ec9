"""`cool`: its factors, and mmspec's tests of relaxed rules."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from mmspec.accelerators import build_accelerator, promise_of
from mmspec.core.draft import DraftKind
from mmspec.errors import InputError
from mmspec.plugins import METHODS
from mmspec_extras.methods.cool.rule import Cool
from tests.trees import relaxed_checks as checks
from tests.trees import test_relaxation
from tests.trees.exact_distribution import exact_distribution

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


def test_its_promise_and_its_options() -> None:
    made = build_accelerator("cool")
    assert isinstance(made.rule, Cool) and made.exactness == "lossy"
    assert promise_of(METHODS["cool"])[0] == "lossy"
    for argument, value in (("omega", 0.9), ("nu", -1.0)):
        with pytest.raises(InputError) as caught:
            build_accelerator("cool", **{argument: value})
        assert caught.value.argument == argument
    test_relaxation.test_single_precision_and_a_draft_of_nothing_are_no_exception("cool", 4)


@pytest.mark.parametrize(
    "check",
    [
        test_relaxation.test_excluded_tokens_stay_excluded,
        test_relaxation.test_acceptance_is_paid_for,
        test_relaxation.test_no_rule_makes_the_host_wait_for_the_device,
    ],
)
def test_it_is_a_relaxed_rule(check: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "MORE", [("cool", checks.rule_of("cool"))])
    check()
