"""`mmspec check`."""

import json

import pytest


@pytest.mark.parametrize("accelerator", ["copy", "draft_model:num_draft_tokens=3"])
def test_an_exact_accelerator_passes(run_json, tiny_folder, accelerator):
    report = run_json(
        "check", tiny_folder, "--accelerator", accelerator, "--drafter", tiny_folder, "--samples", 2,
        "--max-new-tokens", 24, "--batch-size", 2,
    )  # fmt: skip
    assert report["passed"] is True
    assert [one["mode"] for one in report["comparisons"]] == ["greedy", "sampled"]
    assert all(one["equal"] == one["examples"] == 2 for one in report["comparisons"])
    assert all(one["tokens"] == 48 for one in report["comparisons"])


def test_a_wrong_accelerator_is_exit_code_1_and_shows_the_first_difference(run, tiny_folder, monkeypatch):
    from mmspec.acceptance.matching import SampleAndMatch
    from tests.evaluation.planted import accept_everything

    monkeypatch.setattr(SampleAndMatch, "verify", accept_everything)
    result = run("check", tiny_folder, "--samples", 2, "--max-new-tokens", 32)
    assert result.exit_code == 1
    assert "FAILED" in result.stdout
    assert "logit gap" in result.stdout
    assert "wrong" in result.stdout


def test_own_images_and_prompts(run_json, tiny_folder, images):
    arguments = ["--image", images[0], "--image", images[1], "--prompt", "what is there ?"]
    report = run_json("check", tiny_folder, *arguments, "--max-new-tokens", 8)
    assert report["comparisons"][0]["examples"] == 2


def test_an_interrupt_prints_the_comparison_that_is_done(run, tiny_folder, monkeypatch):
    from mmspec.evaluation.identity.checks import IdentityCheck

    def interrupted(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(IdentityCheck, "sampled", interrupted)
    result = run("check", tiny_folder, "--samples", 1, "--max-new-tokens", 4, "--json")
    assert result.exit_code == 130
    report = json.loads(result.stdout)
    assert report["finished"] is False
    assert [one["mode"] for one in report["comparisons"]] == ["greedy"]


def test_a_drafter_that_is_named_is_what_is_checked(run_json, tiny_folder):
    report = run_json("check", tiny_folder, "--drafter", tiny_folder, "--samples", 1, "--max-new-tokens", 8)
    assert report["accelerator"] == "draft_model"
    assert report["comparisons"][0]["accepted"] > 0
