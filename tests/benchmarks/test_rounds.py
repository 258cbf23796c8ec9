"""Time of a round of the loop, and its floor."""

import pytest
import torch

from benchmarks.gpu.ceilings import Ceilings, Cost, measure_ceilings, seconds_of
from benchmarks.gpu.rounds import FixedDrafter, RoundShape, cost_of_round, measure_round
from mmspec.targets import adapt
from tests.tiny_models import tiny_llama

CPU = torch.device("cpu")


def test_a_floor_is_the_slower_of_moving_and_computing():
    ceilings = Ceilings(bytes_per_second=100.0, flops_per_second=1000.0)
    assert Cost(50, 100).floor(ceilings) == 0.5
    assert Cost(50, 2000).floor(ceilings) == 2.0


def test_the_cost_of_a_round_counts_weights_once_and_keys_by_row():
    target = adapt(tiny_llama(vocab=1000))
    config = target.config
    layers, width, wide = config.num_hidden_layers, config.hidden_size, config.intermediate_size
    kv_heads, head_width = config.num_key_value_heads, width // config.num_attention_heads
    attention = 2 * width * width + 2 * width * kv_heads * head_width
    weights = layers * (attention + 3 * width * wide + 2 * width) + width + width * 1000
    key = 2 * layers * kv_heads * head_width * 4  # bytes of a token
    cost = cost_of_round(target, RoundShape(batch=3, nodes=5, context=70))
    assert cost["target"].bytes == 4 * weights + 3 * key * (70 + 2 * 5)
    assert cost["target"].flops == 2 * weights * 15 + 4 * layers * 15 * 75 * width
    assert cost["verify"].bytes == 2 * 15 * 1000 * 4
    guided = cost_of_round(target, RoundShape(batch=3, nodes=5, context=70), guided=True)
    assert guided == cost_of_round(target, RoundShape(batch=6, nodes=5, context=70))


def test_a_tied_head_is_read_and_an_embedding_table_is_not():
    target = adapt(tiny_llama(vocab=1000))
    before = cost_of_round(target, RoundShape())["target"].bytes
    target.model.lm_head.weight = target.model.model.embed_tokens.weight
    assert cost_of_round(target, RoundShape())["target"].bytes == before


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
