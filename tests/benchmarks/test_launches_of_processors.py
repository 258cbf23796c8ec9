"""Logits processors cost a round neither reads nor copies, and few launches."""

from itertools import islice

import pytest

from benchmarks.launches import SCENARIOS, count_rounds
from benchmarks.simulated_gpu import Counts, SimulatedGPU

ROUNDS = 8


def last_round(name: str) -> Counts:
    with SimulatedGPU() as gpu:
        return list(islice(count_rounds(SCENARIOS[name], gpu), ROUNDS))[-1]


@pytest.mark.every(2)
def test_a_penalty_adds_a_few_launches_and_no_read() -> None:
    plain = last_round("EAGLE-3, 59 nodes")
    penalized = last_round("EAGLE-3, 59 nodes, repetition_penalty")
    assert penalized.reads == plain.reads == 1 and penalized.copies == 0
    assert 0 < penalized.total - plain.total <= 12
    assert penalized.outside_graphs == plain.outside_graphs <= 12
