"""`mmspec check`."""

import pytest

from mmspec.errors import InputError
from tests.tiny_models import save_masked


def test_the_named_drafter_is_checked_in_batches(run_json, tiny_folder):
    asked = ("--drafter", tiny_folder, "--samples", 2, "--max-new-tokens", 24, "--batch-size", 2)
    report = run_json("check", tiny_folder, *asked)
    assert report["passed"] is True and report["accelerator"] == "draft_model"
    assert [one["mode"] for one in report["comparisons"]] == ["greedy", "sampled"]
    for one in report["comparisons"]:
        assert one["equal"] == one["examples"] == 2 and one["tokens"] == 48 and one["accepted"] > 0


def test_own_images_and_prompts(run_json, tiny_folder, images):
    arguments = ["--image", images[0], "--image", images[1], "--prompt", "what is there ?"]
    asked = ("--accelerator", "copy", "--max-new-tokens", 8)
    assert run_json("check", tiny_folder, *arguments, *asked)["comparisons"][0]["examples"] == 2


def test_a_wrong_accelerator_is_exit_code_1_and_shows_the_first_difference(run, tiny_folder, monkeypatch):
    from mmspec.trees.matching import SampleAndMatch
    from tests.evaluation.planted import accept_everything

    monkeypatch.setattr(SampleAndMatch, "verify", accept_everything)
    result = run("check", tiny_folder, "--samples", 2, "--max-new-tokens", 32)
    assert result.exit_code == 1
    assert all(word in result.stdout for word in ("FAILED", "logit gap", "wrong"))


def test_a_masked_model_is_compared_with_one_place_a_forward(run, run_json, tmp_path):
    folder = save_masked("llada", tmp_path / "llada")
    asked = ("--samples", 2, "--max-new-tokens", 8, "--batch-size", 2)
    report = run_json("check", folder, *asked)
    assert report["passed"] is True and report["accelerator"] == "none"
    assert [one["mode"] for one in report["comparisons"]] == ["greedy", "sampled"]
    assert all(one["tokens"] == 16 and one["target_forwards"] == 8 for one in report["comparisons"])
    assert report["notes"] == ["exact refers to one place per forward pass, the most confident first"]
    lossy = run("check", folder, *asked, "--accelerator", "low_confidence:places_per_step=2")
    assert lossy.exit_code == 1
    assert "is declared lossy" in lossy.output and "no draft token" not in lossy.output
    with pytest.raises(InputError, match="no next token to draft"):
        run("check", folder, *asked, "--accelerator", "copy")
