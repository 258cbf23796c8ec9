"""Corrected Jacobi decoding: exact whatever its head computes, refused where it does not fit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mmspec.decoding.draft import Draft
from mmspec.decoding.image_grid import ImageGrid
from mmspec.decoding.interfaces import TargetOutput
from mmspec.decoding.sampling import Sampler
from mmspec.drafters.corrected import CorrectedDrafter, CorrectedSession
from mmspec.drafters.jacobi import JacobiDrafter
from mmspec.drafters.jacobi_session import Candidates, Window
from mmspec.drafters.window_states import codebook_sample
from mmspec.errors import InputError
from mmspec.models.cjd import CorrectorConfig
from mmspec.training.losses.cjd import correct_window
from tests.drafters import corrected_checks as checks
from tests.drafters.corrected_checks import head_for
from tests.drafters.test_jacobi import SAMPLER, draw, images


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
    "cold, top-k": (Sampler(0.7, top_k=5), {}),
    "one pass": (Sampler(1.0), {"passes": 1}),
    "shared noise": (Sampler(1.0), {"coupling": "gumbel"}),
    "uniform beyond the window": (Sampler(1.0), {"init": "uniform"}),
    "a cold tree of top-k": (Sampler(0.7, top_k=5), {"front": (2, 2, 2)}),
    "a tree longer than what is corrected": (Sampler(1.0), {"front": "2x1x2", "corrected": 1}),
    "a tree with shared noise": (Sampler(1.0), {"front": (1, 3), "coupling": "gumbel"}),
}


QUICK = ("cold, top-k", "one pass", "a tree longer than what is corrected")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in DISTRIBUTIONS]
)
@torch.inference_mode()
def test_outputs_follow_the_targets_distribution(name: str) -> None:
    sampler, options = DISTRIBUTIONS[name]
    checks.check_distribution(sampler, **options)


CHECKS = [
    checks.corrections_read_no_draft_of_their_own_place,
    checks.distribution_of_many_rows,
    checks.distribution_of_trees,
]


@pytest.mark.parametrize("check", CHECKS)
@torch.inference_mode()
def test_what_must_hold_holds(check: Callable[[], None]) -> None:
    check()


def test_a_tree_takes_fewer_forwards_than_a_chain() -> None:
    chain, tree = (draw(drafter(8, 4, front=front))[1].target_forwards for front in ((), (4, 2)))
    assert tree < chain


def test_nothing_corrected_is_speculative_jacobi_decoding() -> None:
    assert draw(drafter(8, 0))[0] == draw(JacobiDrafter(8))[0]


def test_a_head_that_changes_nothing_is_speculative_jacobi_decoding() -> None:
    made = drafter(8, 5)
    with torch.no_grad():
        for part in (made.model.corrections, made.model.to_states, made.model.sharpness):
            for weight in part.parameters():
                weight.zero_()
    one, other = draw(made), draw(JacobiDrafter(8))
    assert one[0] == other[0] and one[1].target_forwards == other[1].target_forwards


def test_training_computes_what_decoding_drew_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a pass for each place, each was drawn given the final tokens before it."""
    made = drafter(8, 6, passes=6)
    fill, seen_slots = CorrectedSession._fill, 0

    def compare(self: CorrectedSession, window: Window, seen: Draft) -> Candidates:
        nonlocal seen_slots
        filled = fill(self, window, seen)
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
        ((1.0, 0), {"front": (2, 2), "reach": 4}),
        ((0.5, 0), {}),
        ((0.0, 0), {"front": (2, 2), "reach": 4}),
        ((1.0, 9), {}),
    ],
)
def test_it_corrects_guided_logits_before_they_are_warped(
    monkeypatch: pytest.MonkeyPatch, settings: tuple[float, int], tree: dict[str, Any]
) -> None:
    """Those of temperature 1 and no top-k are the ones that the rule asked for, the others are not."""
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


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"window": 8, "corrected": 8}, "corrected: got 8; 0 to 7"),
    ({"window": 8, "corrected": -1}, "corrected"),
    ({"window": 8, "corrected": 1.5}, "corrected"),
    ({"window": 0}, "window"),
    ({"front": "4x0"}, "front: got '4x0'; numbers of candidates as 4x2"),
    ({"passes": 0}, "passes: got 0; an integer from 1 to 128"),
    ({"passes": 129}, "passes"),
    ({"front": "4by2"}, "front"),
    ({"front": "2", "reach": 3, "corrected": 4}, "corrected: got 4; 0 to 3"),
    ({"front": (2, 2, 2), "window": 3, "corrected": 2}, "front"),
    ({"front": (8, 9)}, "front"),
    ({"front": (2, 2), "reach": 1}, "reach: got 1; 2 to 31"),
    ({"front": (2, 2), "reach": 32}, "reach"),
    ({"window": 100, "corrected": 70}, "corrected: got 70; at most 63"),
    ({"init": "above"}, "init"),
    ({"coupling": "maximum"}, "coupling"),
]


def test_values_outside_their_range_are_refused() -> None:
    for options, message in REFUSED:
        with pytest.raises(InputError, match=message):
            CorrectedDrafter(head_for(images()), **options)


def test_what_it_does_not_fit_is_refused() -> None:
    target = images()
    with pytest.raises(InputError, match="whose hidden size is"):
        CorrectedDrafter(head_for(target, hidden_size=48)).fit(target)
    with pytest.raises(InputError, match="whose vocabulary is"):
        CorrectedDrafter(head_for(target, vocabulary=12)).fit(target)
    with pytest.raises(InputError, match="window"):
        draw(drafter(40), grid=ImageGrid(2, 2, 62, 62))
    with pytest.raises(InputError, match="2 rows of 2 tokens'; rows of 7 tokens"):
        draw(drafter(4, 2, columns=7), grid=ImageGrid(2, 2, 62, 62))
    with pytest.raises(InputError, match="trained under guidance"):
        draw(drafter(guided=False), sampler=Sampler(guidance_scale=2.0))
    with pytest.raises(InputError, match="was fitted"):
        draw(CorrectedDrafter(head_for(target)))


def test_heads_for_another_codebook_are_refused() -> None:
    target = copy.copy(images())
    target.codebook = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    learnt = codebook_sample(target).tolist()
    CorrectedDrafter(head_for(target, codebook=learnt), 8, 4).check(target)
    target.codebook = target.codebook.bfloat16()  # the same
    CorrectedDrafter(head_for(target, codebook=learnt), 8, 4).check(target)
    target.codebook = target.codebook.roll(1)
    with pytest.raises(InputError, match="another codebook"):
        CorrectedDrafter(head_for(target, codebook=learnt), 8, 4).check(target)


def test_what_cannot_be_built_is_refused() -> None:
    for wrong in ({"width": 22, "num_heads": 4}, {"window": 8, "corrected": 8}, {"context": 0}):
        with pytest.raises(Exception, match="width|corrected|sizes"):
            CorrectorConfig(vocabulary=8, **wrong)
