"""`mmspec generate`."""

import pytest
from PIL import Image

from tests.tiny_models.llamagen import GRID, STRIDE

CELLS, SIDE = GRID**2, GRID * STRIDE


@pytest.fixture
def out(tmp_path):
    return tmp_path / "new" / "image.png"


def test_one_image_is_written_as_it_is(run, llamagens, out):
    result = run("generate", llamagens["caption"], "a red circle", "--out", out, "--window", 8)
    assert result.exit_code == 0
    with Image.open(out) as image:
        assert image.size == (SIDE, SIDE)
    assert result.stdout.splitlines()[-1] == str(out)
    (row,) = [line for line in result.stdout.splitlines() if line.strip().startswith("sjd")]
    promise, mean, most = row.split()[1:4]
    assert promise == "exact"
    assert 1 < float(mean) == int(most) <= CELLS


def test_compared_accelerators_draw_the_same_seeds_side_by_side(run_json, llamagens, out):
    records = run_json(
        "generate", llamagens["class"], "--class", 1, "--class", 3, "--out", out, "--seed", 5,
        "--accelerator", "none,sjd:coupling=exact,sjd", "--window", 8,
    )  # fmt: skip
    plain, exact, maximal = records
    assert [one["nfe"] for one in plain["images"]] == [CELLS] * 2
    assert plain["step_compression"] == 1.0
    assert exact["identical"] == 2  # coupled with the noise of plain decoding
    assert maximal["identical"] < 2  # exact in distribution, with other draws
    assert all(record["exactness"] == "exact" for record in records)
    assert all(record["seed"] == 5 for record in records)
    with Image.open(out) as sheet:
        width, height = sheet.size
    assert 3 * 192 < width < 4 * 192
    assert 2 * 192 < height < 3 * 192


def test_settings_reach_the_pipeline(run_json, llamagens, out, monkeypatch):
    from mmspec.pipelines import ImagePipeline

    draw, calls = ImagePipeline.__call__, []

    def spy(self, *arguments, **options):
        calls.append(options)
        return draw(self, *arguments, **options)

    monkeypatch.setattr(ImagePipeline, "__call__", spy)
    run_json(
        "generate", llamagens["caption"], "a red circle", "--out", out, "--window", 8,
        "--num-images-per-prompt", 2, "--negative-prompt", "a star", "--guidance-scale", 3,
        "--temperature", 0.5, "--top-k", 7, "--top-p", 0.9,
        "--height", SIDE, "--width", SIDE, "--batch-size", 2, "--seed", 4,
    )  # fmt: skip
    (asked,) = calls
    del asked["callback_on_step_end"]
    assert asked == {
        "prompt": ["a red circle"], "class_labels": None, "negative_prompt": "a star", "guidance_scale": 3.0,
        "temperature": 0.5, "top_k": 7, "top_p": 0.9, "height": SIDE, "width": SIDE,
        "num_images_per_prompt": 2, "batch_size": 2, "seed": 4,
    }  # fmt: skip
