"""Missing paths raise an error with the nearest name at once, and hub ids still reach the hub."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from mmspec.errors import CheckpointError
from mmspec.evaluation.machine import examine_model
from mmspec.heads.checkpoint import head_of
from mmspec.models.checkpoint import check_source
from mmspec.pipelines import MMSpecPipeline
from tests.tiny_models import tiny_llama


class Reached(Exception):
    pass


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with models, an empty hub cache, and a record of network access."""

    def noticed(*_: Any, **__: Any) -> Any:
        raise Reached

    for name in ("runs/my-llava", "runs/other", "deep/models/small"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.setattr(socket, "getaddrinfo", noticed)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


PATHS = {
    # the first name is a folder here
    "runs/my-lava": r"did you mean 'runs/my-llava'\?; for the hub's .*`hf download runs/my-lava`",
    "./runs/my-lava": "did you mean 'runs/my-llava'",
    "../elsewhere/at-all": "folders in",
    "/nowhere/at/all": "folders in '/'",
    "~/runs/my-llava": "did you mean '.*/runs/my-llava'",
    "deep/model/small": "did you mean 'deep/models/small'",
    "deep/modles/larger": "did you mean 'deep/models'",
    "no/such/folder": "folders in '.': deep, runs",
    "runs\\my-llava": "folders in '.'",
    "RUNS": "did you mean 'runs'",
    "assets/scenes-lava": "did you mean '.*assets/scenes-llava'",  # of a clone, from anywhere
    "scenes-lava": "did you mean '.*assets/scenes-llava'",
    "no/model.gguf": "folders in '.': deep, runs",
    "runs/my-lava/model.gguf": "did you mean 'runs/my-llava'",
}


@pytest.mark.parametrize("name", PATHS)
def test_a_path_that_does_not_exist_is_refused_before_the_network(name: str, here: Path) -> None:
    with pytest.raises(CheckpointError, match=f"^model .*{PATHS[name]}"):
        MMSpecPipeline.from_pretrained(name)
    with pytest.raises(CheckpointError, match=PATHS[name]):
        examine_model(name)
    if not name.endswith(".gguf"):
        with pytest.raises(CheckpointError, match=f"^drafter .*{PATHS[name]}"):
            head_of(name)


def test_a_repository_in_the_cache_is_found_beside_a_folder_of_its_first_name(here: Path) -> None:
    with pytest.raises(CheckpointError, match="folders in 'runs'"):
        check_source("runs/downloaded")
    repository = here / "cache" / "models--runs--downloaded"
    snapshot = repository / "snapshots" / "abc"
    tiny_llama().config.save_pretrained(snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    assert check_source("runs/downloaded") == "runs/downloaded"


def test_what_neither_the_hub_nor_its_cache_has_is_named_with_the_nearest_folder(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (here / "my-model").mkdir()
    with pytest.raises(
        CheckpointError, match=r"is neither a local folder nor in .*did you mean 'my-model'\?"
    ):
        MMSpecPipeline.from_pretrained("my-modle")
