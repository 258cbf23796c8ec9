"""The command that times forward passes by number of nodes prints both implementations."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from benchmarks.forward_costs import SIZES, print_costs
from mmspec.targets import CausalTarget
from tests.tiny_models import tiny_llama


def test_both_ways_are_printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    target = CausalTarget(tiny_llama(vocab=400))
    print_costs(target, {"as torch does": nullcontext, "fastest": target.computing()}, passes=1)
    told = capsys.readouterr().out
    assert all(f" {size} " in told for size in SIZES)
    for way in ("as torch does", "fastest"):
        (row,) = (line for line in told.splitlines() if way in line)
        assert len([word for word in row.split() if word.replace(".", "").isdigit()]) == len(SIZES) + 2
