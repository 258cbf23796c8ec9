"""`mmspec evaluate images`: from folders, from a model, and one against another."""

from pathlib import Path

import pytest

from mmspec.evaluation.examples import held_out_captions
from mmspec.evaluation.quality.image_folder import real_scenes
from tests.tiny_models.llamagen import GRID

COUNT = 12


def save_scenes(folder: Path, seed: int, count: int = COUNT, side: int = 64) -> Path:
    folder.mkdir()
    for index, image in enumerate(real_scenes(count, (side, side), seed)):
        image.save(folder / f"{index:03}.png")
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[Path, Path]:
    where = tmp_path_factory.mktemp("folders")
    return save_scenes(where / "one", 0), save_scenes(where / "two", 700)


@pytest.fixture(autouse=True)
def no_cache_at_home(monkeypatch, tmp_path):
    here = "mmspec.evaluation.quality.reference_statistics.DEFAULT_CACHE"
    monkeypatch.setattr(here, tmp_path / "home")


@pytest.fixture
def evaluate(run_json, tmp_path):
    return lambda *arguments: run_json("evaluate", "images", *arguments, "--cache", tmp_path / "cache")


def test_a_folder_against_a_folder(evaluate, folders):
    one, two = folders
    report = evaluate("--folder", one, "--against", two)
    (row,) = report["rows"]
    assert report["settings"]["n"] == COUNT and report["settings"]["against"] == "two"
    assert set(report["left_out"]) == {"fid", "attributes"}  # too few images, and no prompts
    figures = {name: value for name, value in row.items() if name != "images"}
    assert {"kid", "precision", "density", "entropy_colours", "diversity"} <= set(figures)
    assert all(one["low"] <= one["value"] <= one["high"] for one in figures.values())
    assert figures["kid"]["low"] < 0 < figures["kid"]["high"]


def test_a_folder_with_prompts_against_scenes_reads_the_cache_the_second_time(
    run, run_json, folders, tmp_path
):
    (tmp_path / "prompts.txt").write_text("\n".join(held_out_captions(COUNT)))
    asked = ("--folder", folders[0], "--prompt-file", tmp_path / "prompts.txt", "--cache", tmp_path / "cache")
    first, second = (run("evaluate", "images", *asked) for _ in range(2))
    assert "written to" in first.stderr and "read from" in second.stderr
    assert first.stdout == second.stdout and "attributes" in first.stdout and "fid" not in first.stdout
    (statistics,) = (tmp_path / "cache").iterdir()
    asked = ("evaluate", "images", *asked, "--samples", COUNT)
    assert run_json(*asked)["rows"] == run_json(*asked, "--against", statistics)["rows"]


def test_accelerators_draw_and_plain_decoding_with_other_seeds_is_what_they_are_against(
    run_json, llamagens, tmp_path
):
    out = tmp_path / "drawn"
    asked = ("--samples", COUNT, "--metrics", "kid,attributes", "--out", out, "--against", "none")
    asked += ("--accelerator", "none,sjd:coupling=exact")
    report = run_json("evaluate", "images", llamagens["caption"], *asked)
    plain, exact = report["rows"]
    assert report["settings"]["against"] == "none, other seeds"
    assert (plain["images"], exact["images"]) == ("none", "sjd:coupling=exact")
    assert plain["forwards per image"] == GRID**2 >= exact["forwards per image"]
    assert exact["promise"] == "exact" and exact["kid"] == plain["kid"]  # the same images
    assert plain["kid"]["value"] != 0.0
    assert set(plain) >= {"entropy_tokens", "entropy_colours", "diversity", "attributes"}
    assert len(list((out / "sjd,coupling=exact").glob("*.png"))) == COUNT
    asked = ("--folder", out / "none", "--against", out / "reference", "--metrics", "kid,attributes")
    again = run_json("evaluate", "images", *asked)
    assert again["rows"][0]["kid"] == plain["kid"]
    assert again["rows"][0]["entropy_tokens"] == plain["entropy_tokens"]
