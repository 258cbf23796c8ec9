"""Launches of rounds, and what rows of a running batch copy, counted on the simulated GPU."""

from __future__ import annotations

from itertools import islice

import pytest
import torch
from torch.utils._device import _device_constructors

from benchmarks.launches import (
    MOVES,
    RUNNING,
    SCENARIOS,
    count_joining,
    count_moves,
    count_rounds,
    count_running,
)
from benchmarks.simulated_gpu import SimulatedGPU

ROUNDS = 10


@pytest.mark.parametrize("name", ["none, 8 rows", "sjd, 32 nodes", "EAGLE-3, length=auto"])
def test_a_round_is_one_replay(name: str) -> None:
    with SimulatedGPU() as gpu:
        rounds = list(islice(count_rounds(SCENARIOS[name], gpu), ROUNDS))[4:]
    assert all(each.replays == 1 and each.reads == 1 and each.copies == 0 for each in rounds)
    assert all(each.outside_graphs <= 12 for each in rounds)
    if "auto" in name:
        assert len({each.captured for each in rounds}) > 1, "rounds of several kinds"


@pytest.mark.parametrize("name", MOVES)
def test_a_row_that_enters_or_leaves_copies_one_row(name: str) -> None:
    with SimulatedGPU() as gpu:
        moves = count_moves(MOVES[name], gpu)
    # a head has keys of its own, and every row some numbers besides
    assert all(1 <= counts["rows_copied"] < 2 for counts in moves.values())


@pytest.mark.every(2)
@pytest.mark.parametrize(("name", "most"), [("none", 39), ("EAGLE-3, 59 nodes", 140)])
def test_a_request_enters_with_few_launches(name: str, most: int) -> None:
    """Beside the forward pass over its prompt; those of EAGLE-3 include its head's."""
    with SimulatedGPU() as gpu:
        counts = count_running(RUNNING[name], gpu, compiled=True)
    assert counts["enters"] <= most
    assert counts["reads"] == 1


@pytest.mark.parametrize(("name", "most"), [("none", 286), ("EAGLE-3, 59 nodes", 310)])
def test_short_prompts_that_join_at_once_share_their_launches(name: str, most: int) -> None:
    """One by one they take 2,008 and 2,106."""
    with SimulatedGPU() as gpu:
        counts = count_joining(RUNNING[name], gpu, compiled=False)
    assert counts["forwards"] == 1 and counts["reads"] == 1
    assert counts["launches"] <= most


def test_default_devices_act_after_a_simulation() -> None:
    """Otherwise transformers takes its empty models for real ones, and does not fill buffers of their own."""
    _device_constructors.cache_clear()
    with SimulatedGPU(), torch.device("meta"):
        torch.empty(0)
    with torch.device("meta"):
        assert torch.tensor([]).is_meta
