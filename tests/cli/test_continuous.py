"""The commands on models of continuous tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.tiny_models.continuous import folder_of

Run = Callable[..., Any]
STEPS = ("--steps", "3", "--guidance", "2")


def test_generate_draws_with_both_kinds_of_model(run_json: Run, tmp_path: Path) -> None:
    out = tmp_path / "image.png"
    (record,) = run_json("generate", "a red ring", "--model", folder_of("nextstep"), *STEPS, "--out", out)
    assert record["accelerator"] == "none" and record["nfe_mean"] == 16
    assert Image.open(out).size == (8, 8)
    compared = "none,masked:iterations=4:order=checkerboard:last_steps=2"
    asked = ("--class", 0, "--class", 3, "--compare", compared)
    plain, fast = run_json("generate", "--model", folder_of("mar"), *asked, *STEPS, "--out", out)
    assert (plain["exactness"], plain["nfe_max"]) == ("exact", 16)
    assert (fast["exactness"], fast["nfe_max"]) == ("approximate", 4)
    assert (plain["identical"], fast["identical"]) == (2, 0)


def test_a_window_of_vectors_by_an_option(run: Run, run_json: Run, tmp_path: Path) -> None:
    options = ("--accelerator", "shared_noise:tolerance=9", "--window", "8", "--out", tmp_path / "a.png")
    (record,) = run_json("generate", "a ring", "--model", folder_of("nextstep"), *options, *STEPS)
    assert record["exactness"] == "approximate" and record["nfe_mean"] < 8
    assert 0 < record["drift_mean"] <= record["drift_max"] <= 9
    assert "drift" in run("generate", "a ring", "--model", folder_of("nextstep"), *options, *STEPS).stdout


@pytest.mark.parametrize("kind", ["nextstep", "mar"])
def test_bench_compares_what_the_model_has(run: Run, run_json: Run, kind: str) -> None:
    options = ("--samples", 2, "--repeats", 1, *STEPS)
    accelerators = ("--accelerators", "none,masked:iterations=4") if kind == "mar" else ()
    table = run_json("bench", folder_of(kind), *options, *accelerators)
    plain, *others = table["records"]
    assert plain["accelerator"] == "none" and plain["nfe_mean"] == 16
    assert table["settings"]["num_inference_steps"] == 3 and plain["promise"] == "exact"
    assert others and {one["promise"] for one in others} <= {"exact", "approximate"}
    assert all(one["drift"] is not None for one in others if one["accelerator"] == "shared_noise")
    assert "steps of the head" in run("bench", folder_of(kind), *options, *accelerators).stdout


@pytest.mark.parametrize(
    ("kind", "options", "mode", "code"),
    [
        ("nextstep", ("--accelerator", "shared_noise:tolerance=0"), "same noise", 0),
        ("nextstep", ("--accelerator", "shared_noise:tolerance=9"), "same noise", 1),
        ("nextstep", ("--accelerator", "draft_model", "--last-step-noise"), "distribution", 0),
        ("mar", ("--accelerator", "masked"), "same noise", 0),
        ("mar", ("--accelerator", "masked:iterations=2"), "same noise", 1),
        ("mar", ("--accelerator", "cspd:num_draft_tokens=3", "--last-step-noise"), "distribution", 0),
    ],
)
def test_check_knows_what_is_promised(
    run: Run, kind: str, options: tuple[str, ...], mode: str, code: int
) -> None:
    if options[1].startswith(("draft_model", "cspd")):
        options = (*options, "--drafter", str(folder_of(f"{kind}-draft")))
    result = run("check", folder_of(kind), "--samples", 8, *options, *STEPS, "--json")
    assert result.exit_code == code, result.output
    report = json.loads(result.stdout)
    assert report["passed"] is (code == 0)
    assert [one["mode"] for one in report["comparisons"]] == [mode]
    reference = "one cell a forward" if options[1].startswith("cspd") else "plain decoding"
    assert [one["reference"] for one in report["comparisons"]] == [reference]


@pytest.mark.parametrize(
    ("kind", "method"), [("nextstep", "shared_noise:tolerance=9"), ("mar", "masked:iterations=4")]
)
def test_images_are_read_beside_plain_decoding(run_json: Run, kind: str, method: str) -> None:
    options = ("--samples", 3, "--repeats", 1, "--accelerators", method, *STEPS, "--quality")
    plain, fast = run_json("bench", folder_of(kind), *options)["records"]
    assert set(plain["quality"]) >= {"kid", "diversity"} and "entropy_tokens" not in plain["quality"]
    assert fast["exactness"] == "approximate" and fast["step_compression"] > 1
    assert fast["quality"]["kid"] != plain["quality"]["kid"]
    assert (fast["drift"] is None) == (kind == "mar")


def test_exact_drafts_are_shown_beside_the_optimum(run_json: Run) -> None:
    overlaps = {}
    for draft in ("nextstep", "nextstep-draft"):
        methods = f"draft_model:drafter={folder_of(draft)}:num_draft_tokens=2"
        options = ("--samples", 3, "--repeats", 1, "--accelerators", methods, *STEPS, "--last-step-noise")
        _, drafted = run_json("bench", folder_of("nextstep"), *options)["records"]
        assert drafted["exactness"] == "exact"
        overlaps[draft] = drafted["overlap"]
    assert overlaps["nextstep"] > 0.99, "a model has everything in common with itself"
    assert overlaps["nextstep-draft"] < 0.9 and drafted["rollbacks"] > 0


def test_options_of_text_are_refused(fails: Callable[..., str], tmp_path: Path) -> None:
    image = ("--out", tmp_path / "a.png")
    assert "top_k" in fails("generate", "a", "--model", folder_of("nextstep"), "--top-k", 5, *STEPS, *image)
    assert "max-new-tokens" in fails("check", folder_of("mar"), "--max-new-tokens", 5)
