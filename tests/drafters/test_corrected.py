"""Corrected Jacobi decoding: exact whatever its head computes, refused where it does not fit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mmspec.accelerators import build_accelerator
from mmspec.decoding.draft import Draft
from mmspec.decoding.image_grid import ImageGrid
from mmspec.decoding.interfaces import TargetOutput
from mmspec.decoding.sampling import Sampler
from mmspec.drafters.corrected import CorrectedDrafter, CorrectedSession
from mmspec.drafters.jacobi import JacobiDrafter
from mmspec.drafters.jacobi_session import Candidates, Window
from mmspec.drafters.none import NoDrafter
from mmspec.drafters.window import KIND_OF_COUPLING
from mmspec.drafters.window_states import codebook_sample
from mmspec.errors import InputError
from mmspec.models.cjd import CorrectorConfig
from mmspec.pipelines.image_prompts import image_requests
from mmspec.targets import image_target
from mmspec.targets.llamagen import LlamaGenTarget
from mmspec.training.losses.cjd import correct_window
from tests.drafters import corrected_checks as checks
from tests.drafters.corrected_checks import head_for
from tests.drafters.test_jacobi import SAMPLER, draw, images, plain
from tests.targets.image_loop import draw as draw_images
from tests.tiny_models import tiny_emu3, tiny_emu3_5
from tests.tiny_models.llamagen import tiny_llamagen


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
    "plain": (Sampler(1.0), {}),
    "cold, top-k": (Sampler(0.7, top_k=5), {}),
    "one place corrected": (Sampler(1.0), {"corrected": 1}),
    "one pass": (Sampler(1.0), {"passes": 1}),
    "a pass for each place": (Sampler(1.0), {"passes": 3}),
    "fresh draws": (Sampler(1.0), {"coupling": "fresh"}),
    "shared noise": (Sampler(1.0), {"coupling": "gumbel"}),
    "uniform beyond the window": (Sampler(1.0), {"init": "uniform"}),
    "a tree": (Sampler(1.0), {"front": "3x2"}),
    "a cold tree of top-k": (Sampler(0.7, top_k=5), {"front": (2, 2, 2)}),
    "a tree of one level, few places corrected": (Sampler(1.0), {"front": (4,), "corrected": 1}),
    "a tree of short chains": (Sampler(1.0), {"front": "2x2", "reach": 2, "corrected": 2}),
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
    checks.distribution_of_corrected_windows,
    checks.distribution_of_many_rows,
    checks.distribution_of_trees,
]


@pytest.mark.parametrize("check", CHECKS)
@torch.inference_mode()
def test_what_must_hold_holds(check: Callable[[], None]) -> None:
    check()


@pytest.mark.parametrize(("window", "corrected"), [(2, 1), (6, 2), (12, 11), (32, 8)])
def test_the_targets_own_noise_gives_the_images_of_plain_decoding(window: int, corrected: int) -> None:
    """Bitwise, with row ends, in batches of one and of three, guided or not."""
    for sampler in (SAMPLER, Sampler(0.9, guidance_scale=2.0)):
        expected = draw(NoDrafter(), sampler=sampler)[0]
        for front in ((), (3, 2)[: min(corrected, 2)]):
            made = drafter(window, corrected, "exact", front, strength=0.3)
            assert draw(made, sampler=sampler)[0] == expected
            assert draw(made, [window % 3], sampler=sampler)[0] == [expected[window % 3]]


TREES: list[dict[str, Any]] = [{}, {"front": (3, 2)}, {"front": (2, 2), "reach": 5}]


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("coupling", KIND_OF_COUPLING)
def test_greedy_images_are_those_of_plain_decoding(coupling: str, tree: dict[str, Any]) -> None:
    assert draw(drafter(8, 5, coupling, **tree), sampler=Sampler())[0] == plain(Sampler())


@pytest.mark.parametrize("tree", TREES)
def test_a_row_of_a_batch_is_drawn_as_it_is_alone(tree: dict[str, Any]) -> None:
    made = drafter(7, 4, **tree)
    together = draw(made, [2, 0, 1])[0]
    assert [draw(made, [row])[0][0] for row in (2, 0, 1)] == together


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


@pytest.mark.parametrize("family", ["llamagen", "emu3", "emu3_5"])
def test_families_draw_the_images_of_plain_decoding(family: str) -> None:
    if family == "llamagen":
        target: Any = LlamaGenTarget(tiny_llamagen("class"))
        requests = image_requests(target, class_labels=[0, 3], guided=True)
    else:
        model, tokenizer = (tiny_emu3 if family == "emu3" else tiny_emu3_5)()
        target = image_target(model)
        size = {"height": 4 * target.stride, "width": 3 * target.stride}
        requests = image_requests(target, ["a red circle", "blue"], guided=True, tokenizer=tokenizer, **size)
    for coupling in ("exact", "maximal"):
        temperature = 0.9 if coupling == "exact" else 0.0
        fast = build_accelerator("cjd", model=head_for(target), window=8, corrected=5, coupling=coupling)
        expected, _ = draw_images(target, build_accelerator("none"), requests, 3.0, temperature)
        assert draw_images(target, fast.fit(target), requests, 3.0, temperature)[0] == expected


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


@pytest.mark.parametrize("tree", [{}, {"front": (2, 2), "reach": 4}])
@pytest.mark.parametrize("settings", [(1.0, 0), (0.5, 0), (0.0, 0), (1.0, 9)])
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


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_values_outside_their_range_are_refused(options: dict[str, Any], message: str) -> None:
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
