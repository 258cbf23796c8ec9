"""`drafters.json`: which drafters a model's folder names, and where they are found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mmspec.errors import CheckpointError
from mmspec.models.drafters_file import OwnDrafters, read_drafters

METHODS = {"copy": False, "draft_model": True, "eagle": True, "flash": True}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    return folder


def written(model: Path, content: Any, elsewhere: dict[str, Path] | None = None) -> OwnDrafters:
    text = content if isinstance(content, str) else json.dumps(content)
    (model / "drafters.json").write_text(text, encoding="utf-8")
    return read_drafters(str(model), METHODS, elsewhere or {})


def entry(accelerator: str, drafter: str) -> dict[str, str]:
    return {"accelerator": accelerator, "drafter": drafter}


def test_a_drafter_beside_the_model_comes_before_a_reference_model_of_its_name(model: Path) -> None:
    here, there, inside = model.parent / "flash", model.parent / "elsewhere" / "flash", model / "eagle"
    for folder in (here, there, inside):
        folder.mkdir(parents=True)
    named = {"flash": entry("flash", "../flash"), "eagle": entry("eagle", "eagle"), "default": "flash"}
    elsewhere = {"flash": there}
    own = written(model, named, elsewhere)
    assert list(own.entries) == ["flash", "eagle"], "in the order of the file"
    assert (own.source_for("flash"), own.source_for("eagle")) == (str(here), str(inside))
    assert own.default == "flash"
    here.rmdir()
    own = written(model, named, elsewhere)
    assert own.source_for("flash") == str(there) and own.entries["flash"].folder == there


def test_of_two_that_an_accelerator_runs_the_one_of_its_name_is_taken(model: Path) -> None:
    for name in ("a", "b"):
        (model / name).mkdir()
    named = {"vispec": entry("eagle", "a"), "eagle": entry("eagle", "b")}
    assert written(model, named).source_for("eagle") == str(model / "b")
    assert written(model, {"vispec": named["vispec"]}).source_for("eagle") == str(model / "a")
    assert written(model, named).source_for("flash") is None


def test_a_folder_that_is_missing_matters_only_when_it_is_asked_for(model: Path) -> None:
    own = written(model, {"flash": entry("flash", "../scenes-flash"), "default": "flash"})
    assert own.entries["flash"].folder is None
    with pytest.raises(CheckpointError) as caught:
        own.source_for("flash")
    message = str(caught.value)
    assert message.startswith(f"{model / 'drafters.json'}: flash: drafter must be a folder that exists")
    assert f"there is no {model.parent / 'scenes-flash'}" in message
    assert message.endswith("no reference model named 'scenes-flash'; got '../scenes-flash'")


def test_a_hub_id_is_no_folder_and_is_passed_on_when_it_is_asked_for(model: Path) -> None:
    own = written(model, {"eagle": entry("eagle", "someone/EAGLE-llava")})
    assert own.entries["eagle"].folder is None
    assert own.source_for("eagle") == "someone/EAGLE-llava"
    for source in ("llava-hf/llava-1.5-7b-hf", "x" * 5000, "no\0folder"):
        assert read_drafters(source, METHODS, {}).entries == {}


def test_a_file_that_cannot_be_used_is_named_with_what_is_allowed(model: Path) -> None:
    cases: list[Any] = [
        ("{", "drafters.json", "must be valid JSON"),
        ([], "drafters.json", "must be an object of labels"),
        ({"flash": {**entry("flash", "a"), "depth": 3}}, "drafters.json: flash", "keys 'accelerator' and"),
        ({"flash": entry("flahs", "a")}, "drafters.json: flash: accelerator", "did you mean 'flash'?"),
        ({"mine": entry("copy", "../flash")}, "drafters.json: mine: accelerator", "flash"),
        ({"mine": {"accelerator": ["flash"], "drafter": "a"}}, "drafters.json: mine: accelerator", "flash"),
        ({"flash": entry("flash", "")}, "drafters.json: flash: drafter", "a folder relative to the model's"),
        ({"copy": entry("flash", "../flash")}, "drafters.json: copy", "no accelerator's name"),
        ({"default": "flahs", "flash": entry("flash", "a")}, "drafters.json: default", "mean 'flash'?"),
    ]
    for content, named, allowed in cases:
        with pytest.raises(CheckpointError) as caught:
            written(model, content)
        assert caught.value.argument == str(model / named)
        assert allowed in str(caught.value)
