"""Bugs planted in the Jacobi drafter, those of published code among them: SJD, SCD, Lumina-mGPT 2.0."""

from __future__ import annotations

import pytest
import torch

from tests.contracts.mutation import PlantedBug
from tests.drafters import jacobi_checks as checks

SESSION, LAYOUT = "mmspec.drafters.jacobi_session:JacobiSession", "mmspec.drafters.window:WindowLayout"
REDRAW = "mmspec.kernels.redraw:_redraw"
LAST = "tokens[:, 0] = canvas.root"
OLD = "torch.where(drafted, node + 1, 0)"
KEPT = f"(drafted & (tokens == seen.tokens.gather(1, {OLD})))[:, :, None]"

BUGS = {
    "a kept draft labelled with its old distribution (SCD)": PlantedBug(
        f"{SESSION}.propose",
        ((LAST, f"p = torch.where({KEPT}, pick(seen.q.p, {OLD}), p); {LAST}"),),
        checks.maximal_distribution,
    ),
    "rows advance by the least that any accepted (SJD)": PlantedBug(
        f"{SESSION}.propose",
        (("node = accepted[:, None] +", "node = accepted.amin() + torch.zeros_like(place) +"),),
        checks.maximal_distribution,
    ),
    "what is rejected is drawn from p, not the residual (Lumina-mGPT 2.0)": PlantedBug(
        REDRAW, (("left, p)", "p, p)"),), checks.maximal_distribution
    ),
    "the residual warped a second time (SJD)": PlantedBug(
        REDRAW,
        (("x, invert(final,", "x, invert(final ** (1 / 0.6),"),),
        checks.maximal_distribution_at_low_temperature,
    ),
    "noise not keyed by round": PlantedBug(
        f"{SESSION}._redraw_noise", ((".at(self.round)", ""),), checks.maximal_distribution
    ),
    "one uniform keeps and draws": PlantedBug(
        REDRAW, (("u[..., 0] *", "u[..., 1] *"),), checks.maximal_distribution
    ),
    "candidates drawn with the noise of the redraw": PlantedBug(
        f"{SESSION}._noise", (("Purpose.DRAFT", "Purpose.REDRAW"),), checks.distribution_of_a_tree
    ),
    "a copied cell scored as if it were drawn": PlantedBug(
        f"{SESSION}.propose",
        (("torch.where((known == FREE)[:, :, None], p, one_hot)", "p"),),
        checks.repeated_cells_are_scored_as_they_are,
    ),
    "every place drawn independently": PlantedBug(
        "mmspec.drafters.window:LastDraft.of",
        (('coupling == "maximal"', "False"),),
        checks.coupled_drafts_save_forwards,
    ),
    "shared noise changes with the round": PlantedBug(
        f"{SESSION}._redraw_noise",
        (("self.random.gumbel(place, purpose", "self.random.at(self.round).gumbel(place, purpose"),),
        checks.coupled_drafts_save_forwards,
    ),
    "the left neighbour is the place before, a row's end included": PlantedBug(
        f"{LAYOUT}.left",
        (("look_up(self._left, first)", "(first - 1)"),),
        checks.neighbours_are_the_nearest_covered_cells,
    ),
    "the row above counted without its end": PlantedBug(
        f"{LAYOUT}.above",
        (("* self._stride\n", "* (self._stride - 1)\n"),),
        checks.neighbours_are_the_nearest_covered_cells,
    ),
}
CHECKS = {planted.check.__name__: planted.check for planted in BUGS.values()}


@pytest.mark.parametrize("name", CHECKS)
@torch.inference_mode()
def test_the_real_code_passes(name: str) -> None:
    CHECKS[name]()


@pytest.mark.parametrize("name", BUGS)
@torch.inference_mode()
def test_a_planted_bug_is_caught(name: str) -> None:
    with BUGS[name].planted(), pytest.raises(AssertionError):
        BUGS[name].check()
