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
