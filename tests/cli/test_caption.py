"""`mmspec caption`."""

import json

import pytest


@pytest.mark.parametrize("accelerator", ["copy", "draft_model:num_draft_tokens=3"])
def test_captions_are_those_of_plain_decoding(run_json, tiny_folder, images, accelerator):
    records = run_json(
        "caption", *images, "--model", tiny_folder, "--accelerator", accelerator, "--drafter", tiny_folder,
        "--compare", "--max-new-tokens", 16,
    )  # fmt: skip
    assert [record["image"] for record in records] == images
    for record in records:
        assert record["identical"] is True
        assert record["new_tokens"] == 16
        assert record["plain"]["target_forwards"] == 16
        assert record["target_forwards"] <= 16
        assert record["exactness"] == "exact"


def test_text_goes_to_stdout_with_the_name_of_its_image_and_figures_to_stderr(run, tiny_folder, images):
    common = ["caption", *images, "--model", tiny_folder, "--max-new-tokens", 12]
    result = run(*common)
    assert [line.split(": ")[0] for line in result.stdout.splitlines()] == images
    assert "forwards" not in result.stdout and "target forwards" in result.stderr
    assert run(*common, "--stream").stdout == result.stdout, "the stream joins to the text"


def test_by_default_the_drafter_is_the_one_that_the_models_folder_names(
    run_json, heads, images, with_drafters
):
    named = {name: (name, folder) for name, folder in heads.items()}
    model = with_drafters(named, default="eagle")
    asked = ["caption", images[0], "--model", model, "--max-new-tokens", 4, "--compare"]
    (record,) = run_json(*asked)
    assert (record["accelerator"], record["identical"]) == ("eagle", True)
    table = json.loads((model / "drafters.json").read_text())
    table["eagle"]["drafter"] = "../no-such-head"
    (model / "drafters.json").write_text(json.dumps(table))
    assert run_json(*asked)[0]["accelerator"] == "copy", "what is not here is left out"


def test_a_difference_is_exit_code_1(run, tiny_folder, images, monkeypatch):
    from mmspec.acceptance.matching import SampleAndMatch
    from tests.evaluation.planted import accept_everything

    monkeypatch.setattr(SampleAndMatch, "verify", accept_everything)
    result = run("caption", *images, "--model", tiny_folder, "--compare", "--max-new-tokens", 32)
    assert result.exit_code == 1
    assert "NOT the tokens of plain decoding" in result.stderr
