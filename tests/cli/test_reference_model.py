"""The commands on the reference models of the repository."""

import shutil
from pathlib import Path

import pytest

from mmspec.assets import reference_models

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


def copied(name: str, folder: Path) -> Path:
    """A reference model in another folder, its weights linked."""
    copy = folder / name
    shutil.copytree(reference_models()[name], copy, ignore=shutil.ignore_patterns("*.safetensors"))
    for weights in reference_models()[name].glob("*.safetensors"):
        (copy / weights.name).symlink_to(weights)
    return copy


def test_copies_of_the_models_have_their_drafters(run_json, tmp_path):
    from mmspec.cli.loading import own_drafters

    model = copied("scenes-llava", tmp_path)
    found = {label: (one.name, one.options["drafter"]) for label, one in own_drafters(str(model)).items()}
    named = {"draft_model": "small", "eagle": "eagle", "flash": "flash"}
    assert found == {label: (label, f"assets/scenes-llava-{name}") for label, name in named.items()}
    flash = copied("scenes-llava-flash", tmp_path)
    assert own_drafters(str(model))["flash"].options == {"drafter": str(flash)}, "one of its own comes first"
    (record,) = run_json("caption", model, "--compare", "--max-new-tokens", 16)
    assert (record["accelerator"], record["identical"]) == ("flash", True)
    own = own_drafters(str(copied("scenes-llamagen", tmp_path)))
    found = {label: (one.name, one.options) for label, one in own.items()}
    heads = ("cjd", "eagle")
    assert found == {name: (name, {"drafter": f"assets/scenes-llamagen-{name}"}) for name in heads}
