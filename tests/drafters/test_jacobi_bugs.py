"""Bugs planted in the Jacobi drafter, those of published code among them: SJD, SCD, Lumina-mGPT 2.0."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.drafters import jacobi_checks as checks

CHECKS = [
    checks.maximal_distribution,
    checks.maximal_distribution_at_low_temperature,
    checks.distribution_of_a_tree,
    checks.repeated_cells_are_scored_as_they_are,
    checks.coupled_drafts_save_forwards,
    checks.neighbours_are_the_nearest_covered_cells,
]


@pytest.mark.parametrize("check", CHECKS)
@torch.inference_mode()
def test_what_must_hold_holds(check: Callable[[], None]) -> None:
    check()
