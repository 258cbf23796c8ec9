"""`mmspec bench`."""

import json
import shutil

import pytest

PROMISED = {
    *("accelerator", "new_tokens", "target_forwards", "acceptance_length", "seconds", "speedup", "identical"),
    *("exactness", "acceptance_rate", "acceptance_by_position", "speedup_min", "speedup_max", "categories"),
    *(
        "tokens_per_second",
        "time_to_first_token",
        *("prompt_share", "target_share", "draft_share", "verify_share", "rest_share"),
        "peak_memory_bytes",
        "memory_kind",
        "device",
    ),
    *("device_name", "torch", "transformers", "mmspec", "batch_size", "dtype", "samples", "repeats"),
    *("model", "drafter", "task", "max_new_tokens", "temperature", "seed"),
}
FAST = ["--samples", 2, "--repeats", 2, "--max-new-tokens", 12]


def test_records_have_all_fields(run_json, tiny_folder):
    records = run_json(
        "bench",
        tiny_folder,
        "--accelerators",
        "copy,draft_model:num_draft_tokens=3",
        "--drafter",
        tiny_folder,
        *FAST,
    )
    assert [record["accelerator"] for record in records] == ["none", "copy", "draft_model:num_draft_tokens=3"]
    for record in records:
        assert set(record) >= PROMISED
        assert record["identical"] == 1.0
        assert record["exactness"] == "exact"
        assert record["new_tokens"] == 24
        assert record["seconds"] > 0
        assert record["peak_memory_bytes"] > 10_000_000
        assert record["speedup_min"] <= record["speedup"] <= record["speedup_max"]
        shares = [record[f"{part}_share"] for part in ("prompt", "target", "draft", "verify", "rest")]
        assert min(shares) > 0
        assert sum(shares) == pytest.approx(1.0)
    plain, _, drafted = records
    assert plain["speedup"] == plain["speedup_min"] == plain["speedup_max"] == 1.0
    assert plain["acceptance_length"] == 1.0
    assert plain["target_forwards"] == 24
    assert drafted["target_forwards"] < 24 / 1.5
    assert drafted["drafter"] == str(tiny_folder)


def test_sampling_gives_the_same_tokens_too(run_json, tiny_folder):
    records = run_json("bench", tiny_folder, "--accelerators", "copy", "--temperature", "0.7", *FAST)
    assert [record["identical"] for record in records] == [1.0, 1.0]


def test_a_file_of_the_mmspec_benchmark_in_batches(run_json, tiny_folder, images, tmp_path):
    lines = [
        {"id": "a", "image": images[0], "turns": ["what is there ?", "how many ?"], "category": "chart"},
        {"id": "b", "image": images[1], "turns": ["what is there ?"], "category": "chart"},
        {"id": "c", "image": images[1], "turns": ["which colour ?"], "category": "table"},
    ]
    path = tmp_path / "bench.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    records = run_json(
        "bench", tiny_folder, "--accelerators", "copy", "--prompt-file", path, "--batch-size", 2, *FAST[2:]
    )
    for record in records:
        assert record["samples"] == 3
        assert record["new_tokens"] == 4 * 12
        assert record["identical"] == 1.0
        assert [part["category"] for part in record["categories"]] == ["chart", "table"]
        assert [part["samples"] for part in record["categories"]] == [2, 1]


def test_the_mmspec_benchmark_as_it_is_published(run_json, fails, tiny_folder, images, tmp_path):
    data = tmp_path / "testmini"
    (data / "images").mkdir(parents=True)
    shutil.copy(images[0], data / "images" / "gqa_1.png")
    turns = ["what is there ?", "how many ?"]
    line = {"id": "1", "image": "gqa_1.png", "turns": turns, "category": "a", "topic": "general vqa"}
    path = data / "mmspec.jsonl"
    path.write_text(json.dumps(line))
    for record in run_json("bench", tiny_folder, "--accelerators", "copy", "--prompt-file", path, *FAST):
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
    records = run_json("bench", model, "--accelerators", "copy", "--peers", *asked)
    names = ["none", "copy", "generate", "generate look-up", "generate assisted"]
    assert [record["accelerator"] for record in records] == names
    for record in records:
        assert record["identical"] == 1.0
        assert set(record["over_generate"]) == {"median", "low", "high"}
        assert list(record["peers_missing"]) == ["generate MTP"]
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
    assert [record["samples"] for record in json.loads(result.stdout)] == [1, 1]


def test_every_accelerator_has_a_drafter_of_its_own(run_json, tiny_folder, heads):
    flash = f"drafter={heads['flash']}"
    named = f"flash:{flash},draft_model:num_draft_tokens=2,flash:block=1:{flash}"
    records = run_json("bench", tiny_folder, "--accelerators", named, "--drafter", tiny_folder, *FAST)
    assert [record["drafter"] for record in records] == [
        None,
        str(heads["flash"]),
        str(tiny_folder),
        str(heads["flash"]),
    ]
    assert [record["identical"] for record in records] == [1.0] * 4


def test_a_model_whose_folder_names_its_drafters_needs_no_more_than_its_name(
    run_json, fails, tiny_folder, heads, with_drafters
):
    named = {"draft_model": ("draft_model", tiny_folder)} | {name: (name, heads[name]) for name in heads}
    model = with_drafters({**named, "medusa": ("medusa", tiny_folder.parent / "no-such-head")})
    by_name = run_json("bench", model, "--accelerators", "none,copy,draft_model,eagle,flash", *FAST)
    assert [record["drafter"] for record in by_name] == [
        None,
        None,
        str(tiny_folder),
        str(heads["eagle"]),
        str(heads["flash"]),
    ]
    assert [record["identical"] for record in by_name] == [1.0] * 5
    by_default = run_json("bench", model, *FAST)
    assert [one["accelerator"] for one in by_default] == [one["accelerator"] for one in by_name]
    assert "no-such-head is not" in fails("bench", model, "--accelerators", "medusa")


@pytest.mark.parametrize(
    ("accelerators", "message"), [("flash", "a head that was trained"), ("copy:drafter=x", "no draft model")]
)
def test_a_missing_or_idle_drafter_is_refused_before_the_model_is_loaded(fails, accelerators, message):
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
