"""`mmspec evaluate images`: from folders, from a model, and one against another."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mmspec.evaluation.examples import held_out_captions
from mmspec.evaluation.quality.image_folder import real_scenes
from tests.tiny_models.continuous import folder_of
from tests.tiny_models.llamagen import GRID, save_llamagen

COUNT = 12


@pytest.fixture(scope="module")
def captions(tmp_path_factory) -> Path:
    return save_llamagen(tmp_path_factory.mktemp("image") / "captions", "caption")


@pytest.fixture(scope="module")
def classes(tmp_path_factory) -> Path:
    return save_llamagen(tmp_path_factory.mktemp("image") / "classes", "class")


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
    run_json, captions, tmp_path
):
    out = tmp_path / "drawn"
    report = run_json(
        "evaluate", "images", captions, "--accelerators", "none,sjd:coupling=exact", "--against", "none",
        "--n", COUNT, "--metrics", "kid,attributes", "--out", out,
    )  # fmt: skip
    plain, exact = report["rows"]
    assert report["settings"]["against"] == "none, other seeds"
    assert (plain["images"], exact["images"]) == ("none", "sjd:coupling=exact")
    assert plain["forwards per image"] == GRID**2 >= exact["forwards per image"]
    assert exact["promise"] == "exact" and exact["kid"] == plain["kid"]  # the same images
    assert plain["kid"]["value"] != 0.0
    assert set(plain) >= {"entropy_tokens", "entropy_colours", "diversity", "attributes"}
    assert len(list((out / "sjd,coupling=exact").glob("*.png"))) == COUNT
    again = run_json(
        "evaluate", "images", "--folder", out / "none", "--against", out / "reference",
        "--metrics", "kid,attributes", "--cache", tmp_path / "cache",
    )  # fmt: skip
    assert again["rows"][0]["kid"] == plain["kid"]
    assert again["rows"][0]["entropy_tokens"] == plain["entropy_tokens"]


def test_classes_and_own_prompts_are_drawn(run_json, captions, classes, tmp_path):
    (row,) = run_json("evaluate", "images", classes, "--n", 4, "--metrics", "attributes")["rows"]
    assert 0 <= row["attributes"]["value"] <= 1
    (tmp_path / "prompts.txt").write_text("a red ring\na blue star\n")
    report = run_json("evaluate", "images", captions, "--prompt-file", tmp_path / "prompts.txt", "--n", 4)
    assert "kid" in report["left_out"] and "attributes" in report["rows"][0]  # scenes are not all rings
    (tmp_path / "prompts.txt").write_text("anything\nat all\n")
    report = run_json("evaluate", "images", captions, "--prompt-file", tmp_path / "prompts.txt", "--n", 4)
    assert "kid" in report["left_out"] and "attributes" in report["left_out"]
    assert report["settings"]["against"] is None and "diversity" in report["rows"][0]


def test_models_of_vectors_have_no_tokens_to_count(run_json):
    asked = ("--n", 4, "--steps", 2, "--metrics", "entropy", "--accelerator", "masked:iterations=4")
    (row,) = run_json("evaluate", "images", folder_of("mar"), *asked)["rows"]
    assert row["promise"] == "approximate" and row["forwards per image"] == 4
    assert "entropy_tokens" not in row and row["entropy_colours"]["value"] > 0


def test_what_cannot_be_scored_is_refused_in_one_line(fails, captions):
    for arguments, words in [
        (("--metrics", "fidd"), "did you mean 'fid'"),
        (("--features", "incepton"), "did you mean 'inception'"),
        (("--accelerator", "sjdd"), "did you mean 'sjd'"),
        (("--against", "nobody"), "nobody"),
        (("--prompt-file", "none.txt"), "none.txt"),
        (("--folder", "nowhere"), "FileNotFoundError"),
        (("--device", "nothing"), "a device that works here"),
        (("--folder", ".", "--accelerator", "sjd"), "either a folder, or a model"),
        (("--metrics", "fid", "--n", 100), "at least 129 images, not 100"),
        (("--out", "."), "a new or empty folder"),
        (("--metrics", "kid", "--against", "assets/images/"), "at least 200 images"),
    ]:
        source = () if "--folder" in arguments else (captions,)
        assert words in fails("evaluate", "images", *source, *arguments)


def test_folders_that_do_not_fit_are_refused_in_one_line(fails, folders, tmp_path):
    one, _ = folders
    few = save_scenes(tmp_path / "few", 0, 5)
    assert "with 5 images" in fails(
        "evaluate", "images", "--folder", one, "--metrics", "kid", "--against", few
    )
    assert "at least 129 images" in fails(
        "evaluate", "images", "--folder", one, "--metrics", "fid", "--against", one
    )
    (tmp_path / "prompts.txt").write_text("a red ring\n")
    asked = ("--folder", one, "--prompt-file", tmp_path / "prompts.txt")
    assert "one for each of the 12" in fails("evaluate", "images", *asked)
    (tmp_path / "prompts.txt").write_text("a red ring\n" * 13)
    assert "one for each of the 12" in fails("evaluate", "images", *asked)
    (few / "001.png").write_bytes(b"no image")
    assert "001.png" in fails("evaluate", "images", "--folder", few, "--metrics", "entropy")


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
    report = evaluate("--folder", folders[0], "--against", tmp_path / "mu.npz")
    assert {"kid", "precision_recall", "density_coverage"} <= set(report["left_out"])
    asked = ("evaluate", "images", "--folder", folders[0], "--metrics", "kid", "--against")
    assert "mu and sigma alone" in fails(*asked, tmp_path / "mu.npz")
    np.savez(tmp_path / "mu.npz", mu=np.zeros(2048), sigma=np.eye(2048))
    assert "--features inception" in fails(*asked, tmp_path / "mu.npz")


def test_images_that_scenes_do_not_come_in_have_no_distances_to_them(run_json, fails, tmp_path):
    Image.new("RGB", (40, 30)).save(tmp_path / "a.png")
    for name in ("b", "c"):
        Image.new("RGB", (40, 30), "red").save(tmp_path / f"{name}.png")
    (tmp_path / "prompts.txt").write_text("a red ring\n" * 3)
    asked = ("evaluate", "images", "--folder", tmp_path, "--prompt-file", tmp_path / "prompts.txt")
    report = run_json(*asked)
    assert "kid" in report["left_out"] and "attributes" in report["rows"][0]
    assert "square images of 16 to 128" in fails(*asked, "--against", "scenes", "--metrics", "kid")


def test_an_interruption_prints_the_accelerators_that_are_done(run, captions, monkeypatch):
    from mmspec.evaluation.quality import image_folder

    draw, called = image_folder.draw_images, []

    def interrupted(*arguments, **options):
        called.append(arguments)
        if len(called) == 2:
            raise KeyboardInterrupt
        return draw(*arguments, **options)

    monkeypatch.setattr(image_folder, "draw_images", interrupted)
    asked = ("--accelerators", "none,sjd", "--n", 3, "--metrics", "entropy")
    result = run("evaluate", "images", captions, *asked)
    assert result.exit_code == 130
    assert "none" in result.stdout and "sjd" not in result.stdout and "interrupted" in result.stderr
