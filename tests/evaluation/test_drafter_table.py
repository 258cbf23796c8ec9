"""The table of drafters, from runs whose figures are known beforehand."""

import json

import pytest

from mmspec.accelerators import build_accelerator
from mmspec.errors import InputError
from mmspec.evaluation.speed.drafter_table import (
    TASKS,
    as_rows,
    count_parameters,
    drafter_report,
    draw_plot,
    task_examples,
    write_rows,
)
from mmspec.evaluation.speed.record import summarise
from tests.drafters.flash_checks import head_for, target_of
from tests.evaluation.test_report import text
from tests.evaluation.test_speed import run, stats

LABELS = ("none", "flash")


@pytest.fixture(scope="module")
def records():
    runs = []
    for batch, task in enumerate(("caption", "clip")):
        plain = stats(11, 10, seconds=6.0, prefill_seconds=1.0, prompt_seconds=1.0, target_seconds=4.0)
        fast = stats(
            11, 2, accepted=8, histogram={4: 2}, draft_passes=4,
            seconds=2.0 + batch, prefill_seconds=1.0, prompt_seconds=0.75, target_seconds=0.5,
            draft_seconds=0.25, verify_seconds=0.125,
        )  # fmt: skip
        runs.append(run("none", 0, 8.0, batch=batch, category=task, of=plain))
        runs.append(run("flash", 0, 4.0, batch=batch, category=task, of=fast))
    own = {name: {"drafter": None, "parameters": 1_500_000 * (name == "flash")} for name in LABELS}
    settings = {"model": "m"}
    return [
        record
        for task in ("caption", "clip")
        for record in summarise(runs, LABELS, category=task, settings=settings, own=own)
    ]


def test_rows_say_what_each_drafter_saves_and_where_its_time_goes(records):
    plain, caption, _, clip = as_rows(records)
    assert (plain["task"], caption["task"], clip["task"]) == ("caption", "caption", "clip")
    assert (caption["acceptance_length"], caption["accepted_length"]) == (5.0, 4.0)
    assert caption["draft_passes"] == 2.0
    assert (caption["decode_speedup"], clip["decode_speedup"]) == (5.0, 2.5)
    assert caption["speedup"] == clip["speedup"] == 2.0
    assert caption["parameters"] == 1_500_000
    assert caption["time"] == {
        "prompt": 0.1875, "target": 0.125, "draft": 0.0625, "verify": 0.03125, "rest": 0.59375
    }  # fmt: skip
    assert plain["time"] == {"prompt": 0.125, "target": 0.5, "draft": 0.0, "verify": 0.0, "rest": 0.375}


def test_the_table_is_printed_written_and_drawn(records, tmp_path):
    shown = text(drafter_report(records))
    for part in ("caption", "clip", "flash", "1.50 M", "5.00x", "2.00x (2.00-2.00)", "end to end"):
        assert part in shown
    rows = as_rows(records)
    written = json.loads(write_rows(tmp_path / "table.json", rows, {"model": "m"}).read_text())
    assert written == {"settings": {"model": "m"}, "rows": json.loads(json.dumps(rows))}
    pytest.importorskip("matplotlib")
    assert draw_plot(tmp_path / "table.png", rows).stat().st_size > 10_000


def test_every_task_has_as_many_prompts():
    examples = task_examples(TASKS, 2)
    assert [example.category for example in examples] == [task for task in TASKS for _ in range(2)]
    assert len({example.identifier + example.category for example in examples}) == len(examples)
    for tasks in ((), ("mixed",), ("caption", "clips")):
        with pytest.raises(InputError):
            task_examples(tasks, 2)


def test_parameters_are_those_that_the_drafter_adds():
    target = target_of("llava")
    head = head_for(target)
    assert count_parameters(build_accelerator("copy")) == 0
    assert count_parameters(build_accelerator("flash", model=head)) == head.num_parameters()
    assert count_parameters(build_accelerator("draft_model", model=target)) == target.model.num_parameters()
