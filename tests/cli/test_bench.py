"""`mmspec bench`."""

import json
import shutil
from dataclasses import fields

import pytest

from mmspec.errors import InputError
from mmspec.evaluation.speed.record import Record

FIELDS = {field.name for field in fields(Record)} - {"own", "settings"}
SETTINGS = {
    *("device", "device_name", "torch", "transformers", "mmspec", "batch_size", "dtype"),
    *("model", "task", "max_new_tokens", "temperature", "seed"),
}
FAST = ["--samples", 2, "--repeats", 2, "--max-new-tokens", 12]


@pytest.fixture
def bench(run_json):
    """`bench(...)`: the records of the command."""
    return lambda *arguments: run_json("bench", *arguments)["records"]


def test_records_have_all_fields(run_json, tiny_folder, tmp_path):
    asked = ("--accelerators", "copy,draft_model:num_draft_tokens=3", "--drafter", tiny_folder)
    table = run_json("bench", tiny_folder, *asked, *FAST, "--out", tmp_path / "bench.json")
    assert json.loads((tmp_path / "bench.json").read_text()) == table
    assert set(table["settings"]) >= SETTINGS
    records = table["records"]
    assert [record["accelerator"] for record in records] == ["none", "copy", "draft_model:num_draft_tokens=3"]
    for record in records:
        assert set(record) == FIELDS | {"drafter", "parameters"}
        assert record["identical"] == 1.0
        assert record["exactness"] == "exact"
        assert record["new_tokens"] == 24
        assert record["seconds"] > 0
        assert record["peak_memory_bytes"] > 10_000_000
        assert record["speedup_min"] <= record["speedup"] <= record["speedup_max"]
        assert min(record["time"].values()) > 0 and sum(record["time"].values()) == pytest.approx(1.0)
    plain, _, drafted = records
    assert plain["speedup"] == plain["speedup_min"] == plain["speedup_max"] == 1.0
    assert plain["acceptance_length"] == 1.0
    assert plain["target_forwards"] == 24
    assert drafted["target_forwards"] < 24 / 1.5
    assert drafted["drafter"] == str(tiny_folder) and drafted["parameters"] > plain["parameters"] == 0


def test_sampling_gives_the_same_tokens_too(bench, tiny_folder):
    records = bench(tiny_folder, "--accelerators", "copy", "--temperature", "0.7", *FAST)
    assert [record["identical"] for record in records] == [1.0, 1.0]


def test_a_file_of_the_mmspec_benchmark_in_batches(bench, tiny_folder, images, tmp_path):
    lines = [
        {"id": "a", "image": images[0], "turns": ["what is there ?", "how many ?"], "category": "chart"},
        {"id": "b", "image": images[1], "turns": ["what is there ?"], "category": "chart"},
        {"id": "c", "image": images[1], "turns": ["which colour ?"], "category": "table"},
    ]
    path = tmp_path / "bench.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    records = bench(
        tiny_folder, "--accelerators", "copy", "--prompt-file", path, "--batch-size", 2, *FAST[2:]
    )
    assert [(one["category"], one["accelerator"], one["samples"]) for one in records] == [
        *[("", "none", 3), ("", "copy", 3), ("chart", "none", 2), ("chart", "copy", 2)],
        *[("table", "none", 1), ("table", "copy", 1)],
    ]
    assert [one["new_tokens"] for one in records[:2]] == [4 * 12] * 2
    assert all(one["identical"] == 1.0 for one in records)


def test_the_mmspec_benchmark_as_it_is_published(bench, fails, tiny_folder, images, tmp_path):
    data = tmp_path / "testmini"
    (data / "images").mkdir(parents=True)
    shutil.copy(images[0], data / "images" / "gqa_1.png")
    turns = ["what is there ?", "how many ?"]
    line = {"id": "1", "image": "gqa_1.png", "turns": turns, "category": "a", "topic": "general vqa"}
    path = data / "mmspec.jsonl"
    path.write_text(json.dumps(line))
    for record in bench(tiny_folder, "--accelerators", "copy", "--prompt-file", path, *FAST):
        assert record["new_tokens"] == 2 * 12
        assert record["identical"] == 1.0
    path.write_text("\n" + json.dumps({**line, "image": "gqa_2.png"}))
    refused = fails("bench", "no such folder", "--prompt-file", path)
    assert "mmspec.jsonl:2: image: got 'gqa_2.png'" in refused
    assert f"in {data} or in {data / 'images'}" in refused


def test_a_losing_row_stays_in_the_table(run, tiny_folder):
    result = run("bench", tiny_folder, "--accelerators", "none,copy", *FAST)
    assert result.exit_code == 0
    for word in ("none", "copy", "exact", "100%", "speed-up", "memory", "where the time goes", "verify"):
        assert word in result.stdout


def test_peers_run_beside_our_accelerators(run, run_json, fails, tiny_folder, with_drafters):
    model = with_drafters({"draft_model": ("draft_model", tiny_folder)})
    asked = ["--prompt", "what is there ?", "--prompt", "how many ?", *FAST[2:]]
    table = run_json("bench", model, "--accelerators", "copy", "--peers", *asked)
    records = table["records"]
    assert list(table["settings"]["peers_missing"]) == ["generate MTP"]
    names = ["none", "copy", "generate", "generate look-up", "generate assisted"]
    assert [record["accelerator"] for record in records] == names
    for record in records:
        assert record["identical"] == 1.0
        assert set(record["over_generate"]) == {"median", "low", "high"}
    shown = run("bench", tiny_folder, "--accelerators", "copy", "--peers", *asked).stdout
    assert "generate assisted did not run: the model's folder names no draft model" in shown
    assert "--temperature" in fails("bench", tiny_folder, "--peers", "--temperature", 1, *FAST)


def test_an_interrupt_reports_what_was_measured(run, tiny_folder, monkeypatch):
    from mmspec.evaluation.speed import timing

    measure = timing.measure

    def interrupted(*arguments, **options):
        for count, measured in enumerate(measure(*arguments, **options)):
            yield measured
            if count == 2:  # both accelerators on the first example, one of them on the second
                raise KeyboardInterrupt

    monkeypatch.setattr(timing, "measure", interrupted)
    result = run("bench", tiny_folder, "--accelerators", "copy", *FAST, "--json")
    assert result.exit_code == 130
    assert [record["samples"] for record in json.loads(result.stdout)["records"]] == [1, 1]


def test_every_accelerator_has_a_drafter_of_its_own(bench, tiny_folder, heads):
    flash = f"drafter={heads['flash']}"
    named = f"flash:{flash},draft_model:num_draft_tokens=2,flash:block=1:{flash}"
    records = bench(tiny_folder, "--accelerators", named, "--drafter", tiny_folder, *FAST)
    assert [record["drafter"] for record in records] == [
        None,
        str(heads["flash"]),
        str(tiny_folder),
        str(heads["flash"]),
    ]
    assert [record["identical"] for record in records] == [1.0] * 4


def test_a_model_whose_folder_names_its_drafters_needs_no_more_than_its_name(
    bench, fails, tiny_folder, heads, with_drafters
):
    named = {"draft_model": ("draft_model", tiny_folder)} | {name: (name, heads[name]) for name in heads}
    model = with_drafters({**named, "medusa": ("medusa", tiny_folder.parent / "no-such-head")})
    by_name = bench(model, "--accelerators", "none,copy,draft_model,eagle,flash", *FAST)
    assert [record["drafter"] for record in by_name] == [
        None,
        None,
        str(tiny_folder),
        str(heads["eagle"]),
        str(heads["flash"]),
    ]
    assert [record["identical"] for record in by_name] == [1.0] * 5
    by_default = bench(model, *FAST)
    assert [one["accelerator"] for one in by_default] == [one["accelerator"] for one in by_name]
    assert "no-such-head is not" in fails("bench", model, "--accelerators", "medusa")


def test_a_missing_or_idle_drafter_is_refused_before_the_model_is_loaded(fails):
    for accelerators, message in [("flash", "a head that was trained"), ("copy:drafter=x", "no draft model")]:
        assert message in fails("bench", "no such folder", "--accelerators", accelerators)


def test_a_report_result_lines_and_a_comparison(run, run_json, fails, tiny_folder, tmp_path):
    pytest.importorskip("matplotlib")
    page, lines, saved = tmp_path / "page.html", tmp_path / "lines", tmp_path / "a.json"
    asked = ("bench", tiny_folder, "--accelerators", "copy", *FAST)
    result = run(*asked, "--html", page, "--results", lines, "--json")
    assert result.exit_code == 0, result.output
    assert page.read_text().count("<img") >= 4
    assert sorted(path.name for path in lines.iterdir()) == ["copy.jsonl", "none.jsonl"]
    saved.write_text(result.stdout)
    compared = run_json("bench", "compare", saved, saved)
    assert [one["ratio"] for one in compared["compared"]] == [1.0, 1.0] and not compared["differs"]
    assert "--batch-size 1" in fails(*asked, "--batch-size", 2, "--results", lines)
    assert "--html" in fails(*asked, "--html", tmp_path / "none" / "page.html")


def test_tasks_with_a_search_and_a_plot(run, run_json, tiny_folder, heads, tmp_path):
    pytest.importorskip("matplotlib")
    plot, named = tmp_path / "tasks.png", "flash:block=1|2,copy"
    asked = ("--task", "two_images, caption", "--accelerators", named, "--drafter", heads["flash"])
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
    with pytest.raises(InputError, match="one setting of each"):
        run("bench", tiny_folder, *asked[2:], *quick, "--prompt", "what is there ?")


def test_what_cannot_be_measured_is_refused(run, tiny_folder):
    for arguments, message in [
        (["--task", "captions"], "did you mean 'caption'"),
        (["--best", "luck", "--accelerators", "copy"], "seconds or forwards"),
        (["--quality"], "a model that draws"),
    ]:
        with pytest.raises(InputError, match=message):
            run("bench", tiny_folder, *arguments)


def test_a_plot_without_matplotlib_is_refused_before_the_model_is_loaded(fails, hide):
    hide("matplotlib")
    assert "mmspec[eval]" in fails("bench", "no such folder", "--plot", "plot.png")
