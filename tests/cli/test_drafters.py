"""`mmspec evaluate drafters`."""

import json

import pytest

from mmspec.evaluation.speed.drafter_table import TASKS

FAST = ["--samples", 1, "--repeats", 1, "--max-new-tokens", 6]


def test_a_table_of_all_drafters_and_tasks(run_json, tiny_folder, heads, with_drafters, tmp_path):
    named = {"draft_model": ("draft_model", tiny_folder), "vispec": ("eagle", heads["eagle"])}
    model, out = with_drafters({**named, "flash": ("flash", heads["flash"])}), tmp_path / "table.json"
    table = run_json("evaluate", "drafters", model, "--out", out, *FAST)
    assert json.loads(out.read_text()) == table
    names = ["none", "copy", "draft_model", "vispec", "flash", "flash:block=1"]
    assert [(row["task"], row["drafter"]) for row in table["rows"]] == [
        (task, name) for task in TASKS for name in names
    ]
    rows = {row["drafter"]: row for row in table["rows"] if row["task"] == "describe"}
    assert all(row["identical"] == 1.0 for row in table["rows"])
    assert rows["vispec"]["folder"] == str(heads["eagle"])
    assert rows["flash"]["parameters"] == rows["flash:block=1"]["parameters"] > 0
    assert rows["none"]["draft_passes"] == rows["copy"]["draft_passes"] == 0
    assert rows["draft_model"]["draft_passes"] == 5
    assert rows["flash"]["draft_passes"] == 1 and rows["flash:block=1"]["draft_passes"] == 4
    assert table["settings"]["max_new_tokens"] == 6


def test_named_tasks_and_drafters(run, tiny_folder, heads):
    result = run(
        "evaluate",
        "drafters",
        tiny_folder,
        "--tasks",
        "two_images, caption",
        "--drafter",
        heads["flash"],
        *FAST,
    )
    assert result.exit_code == 0
    for word in ("two_images", "caption", "none", "copy", "flash", "passes"):
        assert word in result.stdout
    assert "clip" not in result.stdout


def test_a_plot_is_drawn(run, tiny_folder, heads, tmp_path):
    pytest.importorskip("matplotlib")
    plot = tmp_path / "drafters.png"
    asked = ("--tasks", "caption", "--drafter", heads["flash"], "--plot", plot)
    assert run("evaluate", "drafters", tiny_folder, *asked, *FAST).exit_code == 0
    assert plot.stat().st_size > 5_000


@pytest.mark.parametrize("table", ["drafters", "methods"])
def test_a_plot_without_matplotlib_is_refused_before_the_model_is_loaded(fails, hide, table):
    hide("matplotlib")
    assert "mmspec[eval]" in fails("evaluate", table, "no such folder", "--plot", "plot.png")


def test_an_unknown_task_is_refused_before_the_model_is_loaded(fails):
    assert "two_images" in fails("evaluate", "drafters", "no such folder", "--tasks", "captions")
