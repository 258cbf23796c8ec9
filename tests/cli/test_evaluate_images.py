"""`mmspec evaluate images`: from folders, from a model, and one against another."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mmspec.evaluation.examples import held_out_captions
from mmspec.evaluation.quality.image_folder import real_scenes
from tests.tiny_models.continuous import folder_of
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
    asked = ("evaluate", "images", *asked, "--n", COUNT)
    assert run_json(*asked)["rows"] == run_json(*asked, "--against", statistics)["rows"]


def test_accelerators_draw_and_plain_decoding_with_other_seeds_is_what_they_are_against(
    run_json, llamagens, tmp_path
):
    out = tmp_path / "drawn"
    asked = ("--n", COUNT, "--metrics", "kid,attributes", "--out", out, "--against", "none")
    asked += ("--accelerators", "none,sjd:coupling=exact")
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


def test_classes_own_prompts_and_vectors_are_drawn(run_json, llamagens, tmp_path):
    asked = ("evaluate", "images", llamagens["class"], "--n", 4, "--metrics", "attributes")
    assert 0 <= run_json(*asked)["rows"][0]["attributes"]["value"] <= 1
    prompts = tmp_path / "prompts.txt"
    asked = ("evaluate", "images", llamagens["caption"], "--prompt-file", prompts, "--n", 4)
    prompts.write_text("a red ring\na blue star\n")
    report = run_json(*asked)
    assert "kid" in report["left_out"] and "attributes" in report["rows"][0]  # scenes are not all rings
    prompts.write_text("anything\nat all\n")
    report = run_json(*asked)
    assert "kid" in report["left_out"] and "attributes" in report["left_out"]
    assert report["settings"]["against"] is None and "diversity" in report["rows"][0]
    asked = ("--n", 4, "--steps", 2, "--metrics", "entropy", "--accelerator", "masked:iterations=4")
    (row,) = run_json("evaluate", "images", folder_of("mar"), *asked)["rows"]
    assert row["promise"] == "approximate" and row["forwards per image"] == 4
    assert "entropy_tokens" not in row and row["entropy_colours"]["value"] > 0


def test_folders_that_do_not_fit_are_refused_in_one_line(fails, folders, tmp_path):
    few, prompts = save_scenes(tmp_path / "few", 0, 5), tmp_path / "prompts.txt"
    asked = ("evaluate", "images", "--folder", folders[0])
    assert "with 5 images" in fails(*asked, "--metrics", "kid", "--against", few)
    assert "at least 129 images" in fails(*asked, "--metrics", "fid", "--against", folders[0])
    for count in (1, 13):
        prompts.write_text("a red ring\n" * count)
        assert "one for each of the 12" in fails(*asked, "--prompt-file", prompts)
    (few / "001.png").write_bytes(b"no image")
    assert "001.png" in fails(*asked[:-1], few, "--metrics", "entropy")


def test_published_npz_files_are_samples_and_references(evaluate, fails, folders, tmp_path):
    one, two = (
        np.stack([np.asarray(Image.open(file)) for file in sorted(folder.glob("*.png"))])
        for folder in folders
    )
    np.savez(tmp_path / "one.npz", arr_0=one, arr_1=np.zeros(COUNT))
    np.savez(tmp_path / "two.npz", arr_0=two, mu=np.zeros(2048), sigma=np.eye(2048))
    (plain,) = evaluate("--folder", folders[0], "--against", folders[1])["rows"]
    (row,) = evaluate("--folder", tmp_path / "one.npz", "--against", tmp_path / "two.npz")["rows"]
    assert {**row, "images": "one"} == {**plain, "images": "one"}
    np.savez(tmp_path / "mu.npz", mu=np.zeros(128), sigma=np.eye(128))
    asked = ("--folder", folders[0], "--against", tmp_path / "mu.npz")
    assert {"kid", "precision_recall", "density_coverage"} <= set(evaluate(*asked)["left_out"])
    assert "mu and sigma alone" in fails("evaluate", "images", *asked, "--metrics", "kid")
    np.savez(tmp_path / "mu.npz", mu=np.zeros(2048), sigma=np.eye(2048))
    assert "--features inception" in fails("evaluate", "images", *asked, "--metrics", "kid")


def test_images_that_scenes_do_not_come_in_have_no_distances_to_them(run_json, fails, tmp_path):
    for name in ("a", "b", "c"):
        Image.new("RGB", (40, 30), "red" if name > "a" else 0).save(tmp_path / f"{name}.png")
    (tmp_path / "prompts.txt").write_text("a red ring\n" * 3)
    asked = ("evaluate", "images", "--folder", tmp_path, "--prompt-file", tmp_path / "prompts.txt")
    report = run_json(*asked)
    assert "kid" in report["left_out"] and "attributes" in report["rows"][0]
    assert "square images of 16 to 128" in fails(*asked, "--against", "scenes", "--metrics", "kid")
