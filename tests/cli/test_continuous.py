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
STEPS = ("--num-inference-steps", "3", "--guidance-scale", "2")


def test_generate_draws_with_both_kinds_of_model(run: Run, run_json: Run, tmp_path: Path) -> None:
    out = tmp_path / "image.png"
    drawn = ("generate", folder_of("nextstep"), "a red ring", *STEPS, "--out", out)
    (record,) = run_json(*drawn)
    assert record["accelerator"] == "none" and record["nfe_mean"] == 16
    assert Image.open(out).size == (8, 8)
    (record,) = run_json(*drawn, "--accelerator", "shared_noise:tolerance=9", "--window", "8")
    assert record["exactness"] == "approximate" and record["nfe_mean"] < 8
    assert 0 < record["drift_mean"] <= record["drift_max"] <= 9
    compared = "none,masked:iterations=4:order=checkerboard:last_steps=2"
    asked = ("--class", 0, "--class", 3, "--accelerator", compared)
    plain, fast = run_json("generate", folder_of("mar"), *asked, *STEPS, "--out", out)
    assert (plain["exactness"], plain["nfe_max"]) == ("exact", 16)
    assert (fast["exactness"], fast["nfe_max"]) == ("approximate", 4)
    assert (plain["identical"], fast["identical"]) == (2, 0)


@pytest.mark.parametrize(
    ("kind", "options", "mode", "code"),
    [
        ("nextstep", ("--accelerator", "shared_noise:tolerance=0"), "same noise", 0),
        ("nextstep", ("--accelerator", "draft_model", "--last-step-noise"), "distribution", 0),
        ("mar", ("--accelerator", "masked:iterations=2"), "same noise", 1),
        ("mar", ("--accelerator", "cspd:num_draft_tokens=3", "--last-step-noise"), "distribution", 0),
    ],
)
@pytest.mark.every(2)
def test_check_knows_what_is_promised(
    run: Run, kind: str, options: tuple[str, ...], mode: str, code: int
) -> None:
    if mode == "distribution":
        options = (*options, "--drafter", str(folder_of(f"{kind}-draft")))
    result = run("check", folder_of(kind), "--samples", 4, *options, *STEPS, "--json")
    assert result.exit_code == code, result.output
    report = json.loads(result.stdout)
    assert report["passed"] is (code == 0)
    reference = "one cell a forward" if "cspd" in options[1] else "plain decoding"
    assert [(one["mode"], one["reference"]) for one in report["comparisons"]] == [(mode, reference)]


@pytest.mark.parametrize(
    ("kind", "method"), [("nextstep", "shared_noise:tolerance=9"), ("mar", "masked:iterations=4")]
)
def test_bench_reads_images_beside_plain_decoding(run: Run, run_json: Run, kind: str, method: str) -> None:
    asked = ("bench", folder_of(kind), "--repeats", 1, *STEPS, "--accelerator", method)
    table = run_json(*asked, "--samples", 3, "--quality")
    plain, fast = table["records"]
    assert (plain["accelerator"], plain["nfe_mean"], plain["promise"]) == ("none", 16, "exact")
    assert table["settings"]["num_inference_steps"] == 3
    assert set(plain["quality"]) >= {"kid", "diversity"} and "entropy_tokens" not in plain["quality"]
    assert fast["exactness"] == fast["promise"] == "approximate" and fast["step_compression"] > 1
    assert fast["quality"]["kid"] != plain["quality"]["kid"]
    assert (fast["drift"] is None) == (kind == "mar")
    assert "steps of the head" in run(*asked, "--samples", 1).stdout
