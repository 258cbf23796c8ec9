"""`mmspec caption`."""

import json

import pytest


@pytest.mark.parametrize("accelerator", ["copy", "draft_model:num_draft_tokens=3:drafter={tiny}"])
def test_captions_are_those_of_plain_decoding(run_json, tiny_folder, images, accelerator):
    accelerator = accelerator.format(tiny=tiny_folder)
    records = run_json(
        "caption", tiny_folder, *images, "--accelerator", accelerator, "--compare", "--max-new-tokens", 16
    )
    assert [record["image"] for record in records] == images
    for record in records:
        assert record["identical"] is True
        assert record["new_tokens"] == 16
        assert record["plain"]["target_forwards"] == 16
        assert record["target_forwards"] <= 16
        assert record["exactness"] == "exact"


def test_text_goes_to_stdout_with_the_name_of_its_image_and_figures_to_stderr(run, tiny_folder, images):
    common = ["caption", tiny_folder, *images, "--max-new-tokens", 12]
    result = run(*common)
    assert [line.split(": ")[0] for line in result.stdout.splitlines()] == images
    assert "forward passes" not in result.stdout and "forward passes" in result.stderr
    assert run(*common, "--stream").stdout == result.stdout, "the stream joins to the text"


@pytest.fixture
def two_turns(tmp_path, images):
    """A file of a conversation of two turns about an image, and one of one turn."""
    path = tmp_path / "talk.jsonl"
    rows = [{"turns": ["describe", "what colour"], "image": images[0]}, {"prompt": "red", "image": images[1]}]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_later_turns_are_decoded_behind_the_answers_to_earlier_ones(run, run_json, tiny_folder, two_turns):
    from mmspec import MMSpecPipeline
    from mmspec.evaluation.prompt_files import read_prompt_file

    asked = ["caption", tiny_folder, "--prompt-file", two_turns, "--max-new-tokens", 6]
    records = run_json(*asked, "--compare")
    pipe = MMSpecPipeline.from_pretrained(tiny_folder)
    wanted = []
    for example in read_prompt_file(two_turns):
        said = []
        for turn in example.turns:
            parts = (
                [{"type": "text", "text": turn}]
                if said
                else [{"type": "image"}, {"type": "text", "text": turn}]
            )
            said.append({"role": "user", "content": parts})
            wanted.append(pipe(said, images=list(example.images), max_new_tokens=6, temperature=0.0).text[0])
            said.append({"role": "assistant", "content": wanted[-1]})
    assert [record["text"] for record in records] == wanted
    assert [record["prompt"] for record in records] == ["describe", "what colour", "red"]
    assert [record.get("turn") for record in records] == [0, 1, None]
    assert all(record["identical"] for record in records)
    plain = run(*asked).stdout
    assert run(*asked, "--stream").stdout == plain
    assert [line.split(": ", 1)[1] for line in plain.splitlines()] == [text.strip("\n") for text in wanted]


def test_turns_that_are_not_decoded_are_refused_or_counted(
    run_json, fails, tiny_folder, llamagens, two_turns
):
    asked = ("--prompt-file", two_turns, "--samples", 2)
    report = run_json("check", tiny_folder, *asked, "--max-new-tokens", 4)
    assert any("1 later turns of conversations" in note for note in report["notes"])
    for command in (["generate"], ["bench"], ["evaluate", "images"]):
        said = fails(*command, llamagens["caption"], "--prompt-file", two_turns)
        assert "got '2 turns'" in said


def test_by_default_the_drafter_is_the_one_that_the_models_folder_names(
    run_json, heads, images, with_drafters
):
    named = {name: (name, folder) for name, folder in heads.items()}
    model = with_drafters(named, default="eagle")
    asked = ["caption", model, images[0], "--max-new-tokens", 4, "--compare"]
    (record,) = run_json(*asked)
    assert (record["accelerator"], record["identical"]) == ("eagle", True)
    table = json.loads((model / "drafters.json").read_text())
    table["eagle"]["drafter"] = "../no-such-head"
    (model / "drafters.json").write_text(json.dumps(table))
    assert run_json(*asked)[0]["accelerator"] == "copy", "what is not here is left out"


def test_a_difference_is_exit_code_1(run, tiny_folder, images, monkeypatch):
    from mmspec.trees.matching import SampleAndMatch
    from tests.evaluation.planted import accept_everything

    monkeypatch.setattr(SampleAndMatch, "verify", accept_everything)
    result = run("caption", tiny_folder, *images, "--compare", "--max-new-tokens", 32)
    assert result.exit_code == 1
    assert "NOT the tokens of plain decoding" in result.stderr
