"""`mmspec bench`."""

import json
from dataclasses import fields

import pytest

from mmspec.evaluation.speed.record import Record

FIELDS = {field.name for field in fields(Record)} - {"own", "settings"}
SETTINGS = {
    *("device", "device_name", "torch", "transformers", "mmspec", "batch_size", "dtype"),
    *("model", "task", "max_new_tokens", "temperature", "seed"),
}
FAST = ["--samples", 2, "--repeats", 1, "--max-new-tokens", 12]


@pytest.fixture
def bench(run_json):
    """`bench(...)`: the records of the command."""
    return lambda *arguments: run_json("bench", *arguments)["records"]


def test_records_have_all_fields(run_json, tiny_folder, tmp_path):
    asked = ("--accelerator", "copy,draft_model:num_draft_tokens=3", "--drafter", tiny_folder)
    table = run_json("bench", tiny_folder, *asked, *FAST, "--out", tmp_path / "bench.json")
    assert json.loads((tmp_path / "bench.json").read_text()) == table
    assert set(table["settings"]) >= SETTINGS
    records = table["records"]
    assert [record["accelerator"] for record in records] == ["none", "copy", "draft_model:num_draft_tokens=3"]
    for record in records:
        assert set(record) == FIELDS | {"drafter", "parameters"}
        assert (record["identical"], record["exactness"], record["new_tokens"]) == (1.0, "exact", 24)
        assert record["seconds"] > 0 and record["peak_memory_bytes"] > 10_000_000
        assert record["speedup_min"] <= record["speedup"] <= record["speedup_max"]
        assert min(record["time"].values()) > 0 and sum(record["time"].values()) == pytest.approx(1.0)
    plain, _, drafted = records
    assert plain["speedup"] == plain["speedup_min"] == plain["speedup_max"] == plain["acceptance_length"] == 1
    assert plain["target_forwards"] == 24
    assert drafted["target_forwards"] < 24 / 1.5
    assert drafted["drafter"] == str(tiny_folder) and drafted["parameters"] > plain["parameters"] == 0


def test_peers_run_beside_our_accelerators(run, run_json, tiny_folder, with_drafters):
    model = with_drafters({"draft_model": ("draft_model", tiny_folder)})
    asked = ["--prompt", "what is there ?", "--prompt", "how many ?", *FAST[2:]]
    table = run_json("bench", model, "--accelerator", "copy", "--peers", *asked)
    records = table["records"]
    assert list(table["settings"]["peers_missing"]) == ["generate MTP"]
    names = ["none", "copy", "generate", "generate look-up", "generate assisted"]
    assert [record["accelerator"] for record in records] == names
    for record in records:
        assert record["identical"] == 1.0
        assert set(record["over_generate"]) == {"median", "low", "high"}
    shown = run("bench", tiny_folder, "--accelerator", "copy", "--peers", *asked).stdout
    assert "generate assisted did not run: the model's folder names no draft model" in shown
    for word in ("none", "copy", "exact", "100%", "speed-up", "memory", "parts of the time", "verify"):
        assert word in shown, "slower rows stay in the table"


def test_tasks_with_a_search_and_a_plot(run_json, tiny_folder, heads, tmp_path):
    pytest.importorskip("matplotlib")
    plot, named = tmp_path / "tasks.png", "flash:block=1|2,copy"
    asked = ("--task", "two_images, caption", "--accelerator", named, "--drafter", heads["flash"])
    quick = ("--samples", 1, "--repeats", 1, "--max-new-tokens", 6)
    table = run_json(
        "bench", tiny_folder, *asked, *quick, "--search", 1, "--best", "forwards", "--plot", plot
    )
    best = table["records"][1]["accelerator"]
    assert set(table["settings"]["tried"]) == {"flash:block=1", "flash:block=2"}
    assert [one.get("searched") for one in table["records"][:3]] == [None, 2, None]
    assert [(one["category"], one["accelerator"]) for one in table["records"]] == [
        (task, name) for task in ("", "two_images", "caption") for name in ("none", best, "copy")
    ]
    assert plot.stat().st_size > 5_000


def test_the_best_setting_for_prompts_of_a_file_is_found_on_those_of_another(
    run_json, fails, tiny_folder, tmp_path
):
    asked, searched = tmp_path / "asked.txt", tmp_path / "searched.txt"
    asked.write_text("right circle right circle\n")
    searched.write_text("four there up\nsmall 0 small 0\n")
    own = ("bench", tiny_folder, "--prompt-file", asked, "--accelerator", "copy:num_draft_tokens=2|4")
    quick = ("--samples", 1, "--repeats", 1, "--max-new-tokens", 6, "--best", "forwards", "--search", 2)
    assert "without --search-file" in fails(*own, *quick)
    table = run_json(*own, *quick, "--search-file", searched)
    assert table["settings"]["search_file"] == str(searched)
    assert set(table["settings"]["tried"]) == {"copy:num_draft_tokens=2", "copy:num_draft_tokens=4"}
    assert [one["samples"] for one in table["records"]] == [1, 1]
