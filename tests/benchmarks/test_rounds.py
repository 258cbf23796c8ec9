"""Time of a round of the loop, and its floor."""

import pytest
import torch

from benchmarks.gpu.ceilings import Ceilings, Cost, measure_ceilings, seconds_of
from benchmarks.gpu.rounds import FixedDrafter, RoundShape, measure_round
from mmspec.targets import adapt
from tests.tiny_models import tiny_llama

CPU = torch.device("cpu")


def test_a_floor_is_the_slower_of_moving_and_computing():
    ceilings = Ceilings(bytes_per_second=100.0, flops_per_second=1000.0)
    assert Cost(50, 100).floor(ceilings) == 0.5
    assert Cost(50, 2000).floor(ceilings) == 2.0


@pytest.mark.parametrize("nodes", [1, 3])
def test_rounds_are_those_of_the_loop(nodes, monkeypatch):
    target, seen = adapt(tiny_llama(vocab=1000)), []
    score = target.score
    monkeypatch.setattr(target, "score", lambda *given: seen.append(given[1].nodes.tokens) or score(*given))
    time = measure_round(target, RoundShape(2, nodes, 20), rounds=3, warm_up=1)
    assert [tuple(tokens.shape) for tokens in seen] == [(2, nodes)] * 4
    assert time.seconds > 0 and time.target > 0 and time.verify > 0 and time.rest >= 0
    assert FixedDrafter(nodes, 1000).max_nodes == nodes


def test_ceilings_are_measured_and_calls_timed():
    ceilings = measure_ceilings(CPU, torch.float32, copied=2**16, width=16)
    assert ceilings.bytes_per_second > 0 and ceilings.flops_per_second > 0
    calls = []
    assert seconds_of(lambda: calls.append(1), CPU, repeats=4, warm_up=2) >= 0
    assert len(calls) == 6
