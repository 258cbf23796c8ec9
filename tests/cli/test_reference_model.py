"""The main job on the model that ships with the repository."""

import pytest

from mmspec.evaluation.doctor import reference_models

pytestmark = pytest.mark.skipif(
    len(reference_models()) < 2, reason="the reference models are not in assets/ (yet)"
)


def test_with_nothing_named_a_scene_is_captioned_in_fewer_forwards(run_json):
    from mmspec.scenes import caption, sample_scene

    (record,) = run_json("caption", "--compare", "--seed", 1)
    assert record["identical"] is True
    assert record["accelerator"] == "flash", "the fastest that ships"
    assert record["target_forwards"] < record["plain"]["target_forwards"]
    seed = int(record["image"].removeprefix("scene "))
    assert record["text"].strip() == caption(sample_scene(seed))


def test_bench_takes_its_own_draft_model(run_json):
    records = run_json(
        "bench",
        "assets/scenes-llava",
        "--accelerators",
        "none,copy,draft_model",
        "--samples",
        1,
        "--repeats",
        1,
    )
    assert [record["identical"] for record in records] == [1.0, 1.0, 1.0]
    plain, _, drafted = records
    assert drafted["drafter"].endswith("scenes-llava-small")
    assert plain["target_forwards"] >= 1.5 * drafted["target_forwards"]


@pytest.mark.skipif(
    "scenes-llamagen" not in reference_models(), reason="the image model is not in assets/ (yet)"
)
def test_pictures_take_a_third_of_the_forwards(run_json, tmp_path):
    from PIL import Image

    out = tmp_path / "rings.png"
    (record,) = run_json("generate", "a red ring left of a small blue cross", "--n", 2, "--out", out)
    assert record["exactness"] == "exact"
    assert [one["new_tokens"] for one in record["pictures"]] == [256, 256]
    assert record["nfe_mean"] <= 256 / 3
    with Image.open(out) as sheet:
        assert sheet.width > 2 * 192
