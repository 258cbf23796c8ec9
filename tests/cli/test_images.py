"""`mmspec bench` and `mmspec check` on models that draw."""

from pathlib import Path

import pytest

from mmspec.errors import InputError
from tests.tiny_models.llamagen import GRID, save_llamagen

CELLS = GRID**2


@pytest.fixture(scope="module")
def classes(tmp_path_factory) -> Path:
    return save_llamagen(tmp_path_factory.mktemp("image") / "classes", "class")


@pytest.fixture(scope="module")
def captions(tmp_path_factory) -> Path:
    return save_llamagen(tmp_path_factory.mktemp("image") / "captions", "caption")


def test_bench_records_have_the_figures_of_images(run_json, classes):
    table = run_json(
        "bench", classes, "--accelerators", "sjd:coupling=exact:window=8,zipar:zipar_window=2",
        "--samples", 2, "--repeats", 1, "--guidance", 1.5, "--batch-size", 2,
    )  # fmt: skip
    plain, exact, zipar = records = table["records"]
    settings = table["settings"]
    assert settings["task"] == "generate" and settings["batch_size"] == 2
    assert (settings["guidance_scale"], settings["temperature"], settings["top_k"]) == (1.5, 1.0, 0)
    assert settings["baseline"].startswith("plain decoding")
    for record in records:
        assert record["new_tokens"] == 2 * CELLS
        assert record["state_bytes"] > 0 and record["pixel_seconds"] > 0
    assert (plain["nfe_mean"], plain["nfe_max"], plain["step_compression"]) == (CELLS, CELLS, 1.0)
    assert exact["identical"] == 1.0 and exact["promise"] == "exact" and exact["window"] == 8
    assert exact["nfe_mean"] <= CELLS
    assert zipar["nfe_max"] == GRID + (GRID - 1) * 2
    assert zipar["promise"] == "lossy, no bound" and zipar["window"] == 1 + GRID // 2
    assert plain["tv"] is None and exact["tv"] is None
    assert 0 < zipar["tv"]["mean"] < zipar["tv"]["max"] <= 1
    assert plain["speedup"] == plain["speedup_with_pixels"] == 1.0


def test_bench_draws_own_prompts(run, captions):
    result = run(
        "bench", captions, "--task", "generate", "--prompt", "a red circle", "--repeats", 1,
        "--accelerators", "zipar:zipar_window=3",
    )  # fmt: skip
    assert result.exit_code == 0
    for word in ("own prompts", "lossy, no", "NFE", "guidance 2", "pixels"):
        assert word in result.stdout


def test_check_passes_what_is_exact(run_json, captions):
    report = run_json("check", captions, "--accelerator", "sjd:window=8", "--samples", 4, "--batch-size", 4)
    assert report["passed"] is True
    greedy, distribution = report["comparisons"]
    assert (greedy["mode"], greedy["equal"]) == ("greedy", 4)
    assert (
        distribution["mode"] == "distribution"
        and distribution["distribution"]["places"] == 4 * CELLS
        and distribution["distribution"]["p_value"] > 1e-6
    )


def test_check_fails_what_is_not(run, classes):
    result = run("check", classes, "--accelerator", "zipar:zipar_window=2", "--samples", 3)
    assert result.exit_code == 1
    assert "lossy by its own account" in result.stdout and "FAILED" in result.stdout


def test_what_an_image_does_not_have_is_refused(run, classes):
    for arguments, named in [
        (["--max-new-tokens", 12], f"an image of this model has {CELLS} tokens"),
        (["--task", "caption"], "generate"),
        (["--task", "generat"], "did you mean 'generate'"),
        (["--image", "a.png"], "this model draws them"),
        (["--accelerators", "zipar:zipar_window=99"], "zipar_window"),
    ]:
        with pytest.raises(InputError, match=named):
            run("bench", classes, *arguments)


def test_words_are_checked_without_guidance(run, tiny_folder):
    with pytest.raises(InputError, match="--guidance"):
        run("check", tiny_folder, "--guidance", 2)
