"""Trial runs of `python -m benchmarks.gpu` on the CPU: parts, rows, floors, independent failures."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import pytest
import torch
from torch.utils._pytree import tree_leaves

from benchmarks.gpu import __main__ as program
from benchmarks.gpu.ceilings import Ceilings, Row
from benchmarks.gpu.commands import language_commands, reference_commands
from benchmarks.gpu.commands import test_commands as commands_of_tests
from benchmarks.gpu.kernel_cases import ATTENTION_PEERS, CASES
from benchmarks.gpu.kernel_times import time_kernels
from benchmarks.gpu.steps import DRAFTERS, SHAPES, time_rounds, time_steps
from mmspec.errors import InputError

CPU = torch.device("cpu")
CEILINGS = Ceilings(1e9, 1e10)
ROOT = Path(__file__).resolve().parents[2]
MISSING = ("diffusers", "gradio", "av", "num2words", "tensorboard")


def test_a_case_makes_arguments_of_its_op_and_its_peer_gives_as_much():
    for case in CASES:
        arguments = case.make(case.tiny, CPU)
        made = case.function(*arguments)
        if case.peer is not None:
            assert case.peer(*arguments).shape == made.shape, case.op
        written = tree_leaves(made)
        assert case.cost(case.tiny).bytes >= sum(each.nbytes for each in written if each is not None), case.op
        assert all(shape.keys() == case.tiny.keys() for shape in case.shapes), case.op


def test_kernels_are_timed_beside_their_floor_and_one_that_fails_costs_no_other():
    def broken(**shape):
        raise RuntimeError("no such shape")

    cases = (replace(CASES[0], arguments=broken), *CASES)
    rows = [row.measured() for row in time_kernels(CPU, CEILINGS, tiny=True, cases=cases)]
    assert rows[0]["error"] == "RuntimeError: no such shape"
    for case, row in zip(CASES, rows[1:], strict=True):
        assert (row["op"], row["shape"], row["graph"]) == (case.op, case.tiny, None)
        assert row["floor"] == case.cost(case.tiny).floor(CEILINGS)
        assert row["over_floor"] == pytest.approx(row["seconds"] / row["floor"])
        assert row["peer"] > 0 and row["formula"]


@pytest.mark.parametrize("name", SHAPES)
def test_steps_are_timed_against_generate(name):
    rows = [row.measured() for row in time_steps(name, CPU, torch.float32, CEILINGS, tiny=True)]
    ours = [row for row in rows if row["way"] == "mmspec"]
    assert [(row["batch"], row["nodes"]) for row in ours] == [(1, 1), (1, 3), (2, 1), (2, 3)]
    for row in rows:
        assert row["shape"] == name
        if row["way"] == "mmspec" or row["way"] == "generate eager":
            assert "ms" in row, row
        if row.get("ms", 0.0) > 0:
            assert row["tokens_per_second"] == pytest.approx(1000 * row["batch"] / row["ms"])
            assert row["floor_ms"] > 0
    for row in ours:
        assert row["target"] > 0 and row["verify"] > 0 and row["rest"] >= 0


def test_rounds_of_drafters_are_timed():
    rows = [row.measured() for row in time_rounds(CPU, torch.float32, CEILINGS, tiny=True)]
    assert [(row["shape"], row["method"], row["nodes"]) for row in rows] == [*DRAFTERS]
    for row in rows:
        assert row["ms"] > row["target"] > 0, row


def test_ways_of_attention_give_one_result():
    case = next(case for case in CASES if case.op == "tree_attention")
    torch.manual_seed(0)
    given = case.make(case.tiny, CPU)
    expected, *others = (prepare(*given)() for prepare in ATTENTION_PEERS.values())
    assert len(others) == 2
    for other in others:
        torch.testing.assert_close(other, expected, rtol=0.02, atol=0.02)


def test_rows_that_do_not_fit_the_time_are_skipped_and_named(tmp_path, monkeypatch):
    rows = [Row({"op": "short"}, dict, 1), Row({"op": "long"}, dict, 500), Row({"op": "last"}, dict, 1)]
    monkeypatch.setitem(program.PARTS, "kernels", lambda setting: iter(rows))
    ceilings = Ceilings(1.0, 1.0)
    setting = program.Setting(tmp_path, CPU, torch.float32, ceilings, False, (), perf_counter() + 60)
    assert program._run("kernels", setting)
    record = json.loads((tmp_path / "kernels.json").read_text())
    assert record["rows"] == [{"op": "short"}, {"op": "last"}] and record["skipped"] == [{"op": "long"}]


def test_the_program_writes_every_part_and_names_those_that_failed(tmp_path, monkeypatch, capsys):
    def broken(setting):
        yield Row({"op": "first"}, lambda: {"floor": 1.0})
        raise RuntimeError("half way")

    monkeypatch.setitem(program.PARTS, "tests", broken)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    parts = ["--part", "ceilings", "--part", "tests", "--part", "kernels"]
    assert program.main(["--out", str(tmp_path), "--tiny", *parts]) == 1
    assert capsys.readouterr().err.endswith("failed: tests\n")
    ceilings, tests, timed = (
        json.loads((tmp_path / f"{part}.json").read_text()) for part in ("ceilings", "tests", "kernels")
    )
    assert ceilings["rows"] == [ceilings["ceilings"]] and ceilings["error"] is None
    assert tests["rows"] == [{"op": "first", "floor": 1.0}] and "half way" in tests["error"]
    assert len(timed["rows"]) == len(CASES)
    for record in (ceilings, tests, timed):
        assert record["torch"] and record["device_name"] and record["tiny"] is True
    with pytest.raises(InputError, match="--tiny"):
        program.main(["--out", str(tmp_path)])


def test_the_commands_name_files_and_options_that_there_are(tmp_path):
    from typer.main import get_command

    from benchmarks.real_language import app as real_language
    from mmspec.cli.application import app

    apps = {"mmspec": app, "benchmarks.real_language": real_language}
    made = (reference_commands, language_commands)
    commands = [command for each in made for command in each(tmp_path, False)]
    for command in commands:
        group = get_command(apps[command[1]])
        words = command[2:]
        while hasattr(group, "commands"):
            named = words[0] in group.commands  # else its first one, as of bench
            group = group.commands[words[0] if named else next(iter(group.commands))]
            words = words[named:]
        known = {option for parameter in group.params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= known
        for word in words:
            assert not word.startswith("assets/") or (ROOT / word).exists()
    kernels_first, *others = commands_of_tests(tmp_path, False)
    assert "tests/kernels" in kernels_first
    assert "tests/evaluation/test_speed.py" in others[0]
    assert "tests/benchmarks/test_gpu.py" not in others[0]


BARE = f"""
import sys
for name in {MISSING}:
    sys.modules[name] = None
from benchmarks.gpu.__main__ import main
main(["--help"])
"""


def test_it_starts_without_the_packages_that_a_bare_machine_lacks():
    done = subprocess.run(
        [sys.executable, "-c", BARE],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": "."},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "--part" in done.stdout
