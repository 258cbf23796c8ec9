"""Corrected Jacobi decoding is exact for any output of its head."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from mmspec.accelerator import default_rule
from mmspec.core.draft import Draft
from mmspec.core.interfaces import TargetOutput
from mmspec.core.sampling import Sampler
from mmspec.methods.cjd.drafter import CorrectedDrafter, CorrectedSession
from mmspec.methods.cjd.loss import correct_window
from mmspec.trees.jacobi import JacobiDrafter
from mmspec.trees.jacobi_session import Candidates, Window
from mmspec.trees.window import LastDraft
from tests.contracts.checks import check_words
from tests.contracts.running import FanOutTarget
from tests.methods.corrected_checks import head_for
from tests.tiny_models import tiny_lm_v8
from tests.trees.jacobi_checks import SAMPLER, draw, images


def drafter(
    window: int = 8,
    corrected: int = 4,
    coupling: str = "maximal",
    front: tuple[int, ...] = (),
    reach: int | None = None,
    passes: int | None = 2,
    **head: Any,
) -> CorrectedDrafter:
    target = images()
    tree: dict[str, Any] = {"front": front, "reach": reach, "passes": passes}
    return CorrectedDrafter(head_for(target, **head), window, corrected, coupling, **tree).fit(target)


DISTRIBUTIONS: dict[str, tuple[Sampler, dict[str, Any]]] = {
    "a chain": (Sampler(1.0), {}),
    "a cold tree of top-k": (Sampler(0.7, top_k=5), {"front": (2, 2), "reach": 2, "corrected": 2}),
    "a tree longer than what is corrected": (Sampler(1.0), {"front": "2x1x2", "corrected": 1}),
    "a tree with shared noise": (Sampler(1.0), {"front": (1, 3), "coupling": "gumbel"}),
}
QUICK = ("a chain", "a cold tree of top-k")


@functools.cache
def small() -> FanOutTarget:
    return FanOutTarget(tiny_lm_v8())


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in DISTRIBUTIONS]
)
@torch.inference_mode()
@pytest.mark.every(2)
def test_outputs_follow_the_targets_distribution(name: str) -> None:
    sampler, options = DISTRIBUTIONS[name]
    made = CorrectedDrafter(head_for(small()), **{"window": 4, "corrected": 3, **options}).fit(small())
    run = check_words(small(), made, default_rule(made), sampler, 6_000)  # finds deviations of 0.08
    assert run.stats.target_forwards < 6


def test_a_head_that_changes_nothing_is_speculative_jacobi_decoding() -> None:
    made = drafter(8, 5)
    with torch.no_grad():
        for part in (made.model.corrections, made.model.to_states, made.model.sharpness):
            for weight in part.parameters():
                weight.zero_()
    one, other = draw(made), draw(JacobiDrafter(8))
    assert one[0] == other[0] and one[1].target_forwards == other[1].target_forwards


def test_training_computes_what_decoding_drew_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one pass per place, each place is drawn given the final tokens before it."""
    made = drafter(8, 6, passes=6)
    fill, seen_slots = CorrectedSession._fill, 0

    def compare(self: CorrectedSession, window: Window, last: LastDraft) -> Candidates:
        nonlocal seen_slots
        filled = fill(self, window, last)
        logits = correct_window(self.head, self.target, self.stale, filled.tokens[:, :6])
        free = window.known[:, 1:7] == -1
        due = SAMPLER.scores(logits).p
        assert torch.allclose(filled.p[:, 1:7][free].float(), due[free].float(), atol=1e-5)
        seen_slots += int(free.sum())
        return filled

    monkeypatch.setattr(CorrectedSession, "_fill", compare)
    draw(made)
    assert seen_slots > 100


@pytest.mark.parametrize(
    ("settings", "tree"),
    [
        ((1.0, 0), {}),
        ((0.5, 0), {}),
        ((0.0, 0), {"front": (2, 2), "reach": 4}),
        ((1.0, 9), {}),
    ],
)
@pytest.mark.every(2)
def test_it_corrects_guided_logits_before_they_are_warped(
    monkeypatch: pytest.MonkeyPatch, settings: tuple[float, int], tree: dict[str, Any]
) -> None:
    """Logits with temperature 1 and no top-k are those that the rule requested; others are not."""
    temperature, top_k = settings
    observe, rounds = CorrectedSession.observe, 0

    def compare(self: CorrectedSession, draft: Draft, output: TargetOutput, *judged: Any) -> None:
        nonlocal rounds
        observe(self, draft, output, *judged)
        conditional, unconditional = output.logits.log_softmax(-1).chunk(2)
        due = unconditional + 3.0 * (conditional - unconditional)
        due = due.masked_fill(conditional == -torch.inf, -torch.inf)
        path = self._path(judged[-1]) if tree else torch.arange(self.drafter.window).expand(len(due), -1)
        due = torch.stack([row[nodes] for row, nodes in zip(due, path, strict=True)])
        torch.testing.assert_close(self.read.logits, due.to(self.read.logits.dtype))
        rounds += 1

    monkeypatch.setattr(CorrectedSession, "observe", compare)
    draw(drafter(6, 4, **tree), sampler=Sampler(temperature, top_k=top_k, guidance_scale=3.0))
    assert rounds > 3
