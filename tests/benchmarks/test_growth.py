"""Time of a round as its work grows: floors, exponents, the table and the plot."""

import json

import pytest
import torch

from benchmarks import growth as growing
from benchmarks.ceilings import Ceilings, Cost, measure_ceilings, seconds_of
from benchmarks.growth import GrowthRow, exponents, growth_report, random_llama, values_of
from benchmarks.rounds import FixedDrafter, RoundShape, cost_of_round, measure_round
from mmspec.errors import InputError
from tests.evaluation.test_bench_reports import text

CPU = torch.device("cpu")


def test_a_floor_is_the_slower_of_moving_and_computing():
    ceilings = Ceilings(bytes_per_second=100.0, flops_per_second=1000.0)
    assert Cost(50, 100).floor(ceilings) == 0.5
    assert Cost(50, 2000).floor(ceilings) == 2.0
    assert Cost(1, 2) + Cost(3, 4) == Cost(4, 6)


def test_the_cost_of_a_round_counts_weights_once_and_keys_by_row():
    target = random_llama("tiny", 1000, CPU, torch.float32)
    layers, width, heads, kv_heads, wide = growing.SIZES["tiny"]
    head_width = width // heads
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
    target = random_llama("tiny", 1000, CPU, torch.float32)
    before = cost_of_round(target, RoundShape())["target"].bytes
    target.model.lm_head.weight = target.model.model.embed_tokens.weight
    assert cost_of_round(target, RoundShape())["target"].bytes == before


@pytest.mark.parametrize("nodes", [1, 3])
def test_rounds_are_those_of_the_loop(nodes, monkeypatch):
    target, seen = random_llama("tiny", 1000, CPU, torch.float32), []
    score = target.score
    monkeypatch.setattr(target, "score", lambda *given: seen.append(given[1].nodes.tokens) or score(*given))
    time = measure_round(target, RoundShape(2, nodes, 20), rounds=3, warm_up=1)
    assert [tuple(tokens.shape) for tokens in seen] == [(2, nodes)] * 4
    assert time.seconds > 0 and time.target > 0 and time.verify > 0 and time.rest >= 0
    assert FixedDrafter(nodes, 1000).max_nodes == nodes


def test_exponents_are_those_of_power_functions():
    rows = [GrowthRow("nodes", n, 2.0 * n, 3.0 * n**2, 0.0, 1.0, 5.0 + n, float(n)) for n in (1, 4, 16)]
    assert exponents(rows, "seconds") == pytest.approx({"fitted": 1.0, "last": 1.0})
    assert exponents(rows, "target") == pytest.approx({"fitted": 2.0, "last": 2.0})
    assert exponents(rows, "verify") == pytest.approx({"fitted": 0.0, "last": 0.0})
    grown = exponents(rows, "rest")
    assert 0 < grown["fitted"] < grown["last"] < 1  # what is fixed hides growth, least in the last step
    assert exponents(rows[:1], "seconds") == {"fitted": 0.0, "last": 0.0}


def test_values_of_an_axis_end_at_the_last():
    assert values_of("nodes", 64) == [1, 4, 16, 64]
    assert values_of("vocabulary", 150_000) == [1000, 4000, 16_000, 64_000, 150_000]
    assert values_of("context", 256) == [256]


def test_ceilings_are_measured_and_calls_timed():
    ceilings = measure_ceilings(CPU, torch.float32, copied=2**16, width=16)
    assert ceilings.bytes_per_second > 0 and ceilings.flops_per_second > 0
    calls = []
    assert seconds_of(lambda: calls.append(1), CPU, repeats=4, warm_up=2) >= 0
    assert len(calls) == 6


def test_the_table_has_the_exponents_and_the_ratio_to_the_floor():
    rows = [GrowthRow("batch", n, 0.004 * n, 0.002, 0.0, 0.001, 0.001, 0.001 * n) for n in (1, 4)]
    shown = text(growth_report(rows, {"size": "tiny"}))
    for part in ("batch grows", "4.0x", "exponent, fitted", "exponent, last", "1.00", "size tiny"):
        assert part in shown


def test_the_command_writes_rows_exponents_and_a_plot(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(growing, "measure_ceilings", lambda *given: Ceilings(1e9, 1e10))
    out, plot = tmp_path / "growth.json", tmp_path / "growth.png"
    asked = {"size": "tiny", "device": "cpu", "context": 256, "nodes": 4, "batch": 2, "vocabulary": 1000}
    growing.main(**asked, rounds=2, out=out, plot=plot, as_json=True)
    record = json.loads(out.read_text())
    assert record == json.loads(capsys.readouterr().out)
    assert [(row["axis"], row["value"]) for row in record["rows"]] == [
        *[("context", 256), ("nodes", 1), ("nodes", 4), ("batch", 1), ("batch", 2), ("vocabulary", 1000)]
    ]
    assert set(record["exponents"]) == {"context", "nodes", "batch", "vocabulary"}
    assert record["settings"]["copy_gb_per_second"] == 1.0
    assert plot.stat().st_size > 5000
    with pytest.raises(InputError, match="--size"):
        growing.main(size="huge")
