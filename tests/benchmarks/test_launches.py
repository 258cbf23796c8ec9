"""What rows of a running batch copy, counted on the simulated GPU."""

from __future__ import annotations

import pytest

from benchmarks.launches import MOVES, count_moves
from benchmarks.simulated_gpu import SimulatedGPU


@pytest.mark.parametrize("name", MOVES)
def test_a_row_that_enters_or_leaves_copies_one_row(name: str) -> None:
    with SimulatedGPU() as gpu:
        moves = count_moves(MOVES[name], gpu)
    # a head has keys of its own, and every row some numbers besides
    assert all(1 <= counts["rows_copied"] < 2 for counts in moves.values())
