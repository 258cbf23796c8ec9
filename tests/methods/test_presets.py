"""`gsd` and `lantern` over a Jacobi window: their defaults, and how to replace them."""

from __future__ import annotations

import pytest

from mmspec.accelerators import build_accelerator, promise_of
from mmspec.errors import UnknownArgumentError
from mmspec.methods.gsd.rule import Grouped
from mmspec.methods.lantern.rule import Lantern
from mmspec.plugins import METHODS
from mmspec.trees.budget import Budget
from mmspec.trees.rejection import SpeculativeSampling


def test_presets_have_rules_with_their_defaults_and_options_reach_them() -> None:
    gsd, lantern = (build_accelerator(name) for name in ("gsd", "lantern"))
    assert isinstance(gsd.rule, Budget) and gsd.rule.relaxation == "groups"
    assert isinstance(lantern.rule, Budget) and lantern.rule.relaxation == "neighbours"
    assert gsd.exactness == lantern.exactness == "tv<=0.1"
    assert [promise_of(METHODS[name])[0] for name in ("gsd", "lantern")] == ["bounded"] * 2
    smaller = build_accelerator("gsd", delta=0.02, group_size=5, window=8)
    assert smaller.rule == Budget(0.02, "groups", group_size=5) and smaller.drafter.max_nodes == 8
    assert build_accelerator("gsd", relaxation="omega").rule == Budget(relaxation="omega")
    assert build_accelerator("gsd", delta=0.0).exactness == "exact"


def test_another_rule_takes_the_place_of_the_presets_own() -> None:
    published = build_accelerator("lantern", acceptance="lantern", delta=0.2)
    assert published.rule == Lantern(0.2) and published.exactness == "lossy"
    assert build_accelerator("gsd", acceptance="grouped", group_size=5).rule == Grouped(5)
    assert build_accelerator("lantern", acceptance="lantern++", lam=10).rule.lam == 10  # type: ignore[attr-defined]
    assert isinstance(build_accelerator("gsd", acceptance="speculative_sampling").rule, SpeculativeSampling)
    with pytest.raises(UnknownArgumentError, match="relaxation"):
        build_accelerator("gsd", acceptance="speculative_sampling", relaxation="omega")
