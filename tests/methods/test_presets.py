"""`gsd` and `lantern` over a Jacobi window: their defaults, how to replace them, what they save."""

from __future__ import annotations

import pytest
import torch

from mmspec.accelerator import Accelerator
from mmspec.accelerators import build_accelerator, promise_of
from mmspec.core.sampling import Sampler
from mmspec.errors import UnknownArgumentError
from mmspec.methods.gsd.rule import Grouped
from mmspec.methods.lantern.rule import Lantern
from mmspec.plugins import METHODS
from mmspec.trees.budget import Budget
from mmspec.trees.rejection import SpeculativeSampling
from mmspec.trees.relaxed_sampling import total_variation
from tests.contracts.distributions import reference_distribution
from tests.contracts.running import Run, decode
from tests.contracts.toy import TableTarget, dirichlet
from tests.trees.codes import random_codes

VOCABULARY = 48
SAMPLER = Sampler(temperature=1.0)


def image_like_target(vocabulary: int = VOCABULARY) -> TableTarget:
    """Make a target with a codebook and flat distributions that depend weakly on earlier tokens."""
    flat = dirichlet(vocabulary, seed=3, concentration=2.0)
    target = TableTarget((0.5 * dirichlet(1, *[vocabulary] * 3, seed=0) + 0.5 * flat).log())
    target.codebook = random_codes(vocabulary).codebook  # type: ignore[attr-defined]
    return target


def draw(accelerator: Accelerator, rows: int = 8, length: int = 64, vocabulary: int = VOCABULARY) -> Run:
    target = image_like_target(vocabulary)
    fitted = accelerator.fit(target)
    prompts = [(1, 2)] * rows
    return decode(target, prompts, fitted.drafter, fitted.rule, SAMPLER, max_new_tokens=length, seed=6)


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


def test_the_distribution_of_a_relaxed_window_is_within_the_budget() -> None:
    """Relaxed commits, exact redraws: each token's distribution, given those before it, is within delta."""
    size, rows, delta = 6, 10_000, 0.15
    target = image_like_target(size)
    for name, options in (("gsd", {"group_size": 2}), ("lantern", {"neighbours": 2})):
        accelerator = build_accelerator(name, delta=delta, window=3, **options)
        outputs = torch.tensor(draw(accelerator, rows, 4, size).outputs)
        for place in (1, 2, 3):
            before = torch.tensor(2) if place == 1 else outputs[:, place - 2]
            pair = before * size + outputs[:, place - 1]
            for context in pair.unique().tolist():
                seen = outputs[pair == context, place]
                p = reference_distribution(
                    target.logits[0, context // size, context % size][None, None], SAMPLER
                )[0]
                share = torch.bincount(seen, minlength=size) / len(seen)
                # as in `loops_stay_within_the_budget`; 3 / sqrt(n) is exceeded with probability e^-18
                noise = (p / len(seen)).sqrt().sum() / 2 + 3 / len(seen) ** 0.5
                distance = total_variation(share, p)
                assert distance <= delta + noise, f"{name}, place {place}, after {context}: {distance}"
