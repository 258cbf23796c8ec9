"""`mmspec evaluate text`: correct answers, comparison with plain decoding, and the user's own files."""

import json

SOURCE = "assets/scenes-llava"


def test_the_reference_model_is_right_and_copying_changes_nothing(run_json):
    report = run_json("evaluate", "text", SOURCE, "--accelerator", "copy", "--samples", 3)
    plain, copied = report["rows"]
    assert (plain["accelerator"], copied["accelerator"]) == ("none", "copy")
    assert copied["identical"]["value"] == 1.0 and copied["identical"]["low"] < 1.0
    assert copied["caption: exact"] == plain["caption: exact"]
    assert plain["caption: exact"]["value"] >= 2 / 3 and plain["question: exact"]["value"] >= 2 / 3
    assert report["settings"]["samples"] == 6 and report["settings"]["dtype"] == "float32"


def test_a_planted_bug_is_found(run, tiny_folder, monkeypatch):
    from tests.evaluation.planted import accept_everything

    monkeypatch.setattr("mmspec.trees.matching.SampleAndMatch.verify", accept_everything)
    asked = ("--accelerator", "copy", "--samples", 3, "--max-new-tokens", 24)
    result = run("evaluate", "text", tiny_folder, *asked)
    assert result.exit_code == 1
    assert "copy is exact by its promise, but changed" in result.stderr


def test_own_questions_in_batches_have_all_figures(run, run_json, tiny_folder, images, tmp_path):
    lines = [
        {"prompt": "what is it?", "image": images[index % 2], "references": ["a dog", "an animal"]}
        for index in range(4)
    ]
    path = tmp_path / "own.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    asked = ("evaluate", "text", tiny_folder, "--prompt-file", path, "--accelerator", "copy")
    asked += ("--max-new-tokens", 6, "--batch-size", 2)
    plain, copied = run_json(*asked)["rows"]
    assert {"exact", "bleu", "rouge", "cider", "identical", "promise"} <= set(plain)
    assert plain["exact"]["value"] == 0.0 and copied["differences"] == []
    assert "identical" in run(*asked, "--metrics", "rouge").stdout
