"""Reports: tables on wide and narrow screens."""

from io import StringIO

import pytest
from rich.console import Console

from mmspec.decoding.stats import DecodingStats
from mmspec.evaluation.identity.comparison import Comparison, Difference, IdentityReport, identity_report
from mmspec.evaluation.speed.record import summarise
from mmspec.evaluation.speed.report import bench_report
from tests.evaluation.test_speed import run


def text(renderable, width=160) -> str:
    console = Console(file=StringIO(), width=width, markup=False)
    console.print(renderable)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [80, 149, 150])
def test_a_table_fits_its_screen(width):
    name = "draft_model:num_draft_tokens=7"
    runs = [run("none", 0, 2.0), run(name, 0, 4.0)]
    records = summarise(runs, ["none", name], settings={"model": "m", "batch_size": 1})
    shown = text(bench_report(records, records, width=width), width)
    assert "…" not in shown
    assert "0.50x" in shown  # the losing row
    assert ("left out on a narrow screen" in shown) == (width < 150)


def test_differences_are_shown_and_counted():
    differences = [Difference(i, 3, 5, None, 0.25, 4.0, False) for i in range(7)]
    comparison = Comparison("greedy", "model.generate", 8, 64, differences, DecodingStats())
    report = IdentityReport("copy", "exact", "bfloat16", "cpu", [comparison], ["[a note]"])
    shown = text(identity_report(report, lambda token: f"[word {token}]", ["[first]"]))
    for part in ("FAILED", "1 of 8", "'[word 5]' (5)", "(end)", "[first]", "prompt 1", "2 more", "[a note]"):
        assert part in shown
