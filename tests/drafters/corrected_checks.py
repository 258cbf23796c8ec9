"""Checks of corrected Jacobi decoding, as functions.

Heads are random and strong: what they propose is far from the target's distribution, and depends on all that
they read, so that nothing but the rule makes the output right.
"""

from __future__ import annotations

import copy
import functools
from dataclasses import replace

import pytest
import torch

from mmspec.decoding import cache
from mmspec.decoding.draft import Draft
from mmspec.decoding.sampling import Sampler
from mmspec.drafters.corrected import CorrectedDrafter, CorrectedSession
from mmspec.drafters.jacobi_session import Candidates, Window
from mmspec.models.cjd import CorrectorConfig, CorrectorHead
from mmspec.targets import CausalTarget
from tests.contracts import distributions
from tests.contracts.checks import joint_of
from tests.contracts.running import FanOutTarget, decode
from tests.drafters.jacobi_checks import rule_for
from tests.tiny_models import tiny_lm_v8

PROMPT = (3, 1, 4)
LENGTH = 5
SIZES = {"width": 16, "num_heads": 2, "context": 4}


def head_for(target: CausalTarget, seed: int = 0, strength: float = 1.0, **settings: object) -> CorrectorHead:
    """A random head in the target's precision, whose corrections change distributions much."""
    config = CorrectorConfig.for_target(target.config, target.vocabulary, **SIZES)
    for setting, value in settings.items():
        setattr(config, setting, value)
    with torch.random.fork_rng(devices=[]):
        head = CorrectorHead(config).to(target.dtype).eval()
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in head.named_parameters():
            if weight.dim() > 1:
                scale = strength if name.startswith("corrections") else 2.0
                weight.normal_(std=scale * weight.shape[-1] ** -0.5, generator=noise)
    return head


@functools.cache
def small() -> FanOutTarget:
    return FanOutTarget(tiny_lm_v8())


def check_distribution(sampler: Sampler, rows: int = 12_000, **options: object) -> None:
    """All outputs come as often as the model says; rows of one batch are the sample."""
    target = small()
    drafter = CorrectedDrafter(
        head_for(target),
        **{"window": 4, "corrected": 3, **options},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "CAPACITY_BLOCK", 16)  # thousands of rows of 256 places would be gigabytes
        run = decode(
            target,
            [PROMPT] * rows,
            drafter.fit(target),
            rule_for(drafter),
            sampler,
            max_new_tokens=LENGTH,
            seed=7,
        )
    assert run.stats.target_forwards < LENGTH + 1
    distributions.check_outputs(run, joint_of(target, PROMPT, LENGTH, sampler), options)


def distribution_of_many_rows() -> None:
    check_distribution(Sampler(1.0), rows=40_000)


def distribution_of_trees() -> None:
    check_distribution(Sampler(1.0), front=(3, 2), reach=2, corrected=2)


def corrections_read_no_draft_of_their_own_place() -> None:
    """What stood in a place and behind it may be anything: what the place is drawn from stays as it is."""
    target, fill, changed = small(), CorrectedSession._fill, []
    drafter = CorrectedDrafter(head_for(target), window=6, corrected=4)

    def compare(self: CorrectedSession, window: Window, seen: Draft) -> Candidates:
        kept, accepted = copy.copy(self), self.observed.accepted
        filled = fill(self, window, seen)
        for slot in range(1, 5):
            other, read = copy.copy(kept), kept.read
            node = torch.arange(read.tokens.shape[1])
            own = (node > accepted[:, None] + slot) & (read.tokens >= 0)
            words = torch.where(own, (read.tokens + 1) % target.vocabulary, read.tokens)
            other.read = replace(read, tokens=words, states=torch.where(own[..., None], 9.0, read.states))
            again = fill(other, window, seen).p
            assert torch.equal(again[:, slot], filled.p[:, slot]), slot
            changed.append(not torch.equal(again[:, slot + 1 :], filled.p[:, slot + 1 :]))
        return filled

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CorrectedSession, "_fill", compare)
        fitted = drafter.fit(target)
        decode(target, [PROMPT] * 8, fitted, rule_for(drafter), Sampler(1.0), max_new_tokens=24, seed=3)
    assert any(changed)
