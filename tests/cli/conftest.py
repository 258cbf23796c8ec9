"""A tiny checkpoint, images on disk, and a way to run a command in this process."""

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from mmspec.methods.eagle3.head import Eagle3Config, Eagle3Head
from tests.tiny_models import save_family, tiny_images
from tests.tiny_models.llamagen import save_llamagen


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory) -> Path:
    return save_family("llava", tmp_path_factory.mktemp("models") / "tiny-llava")


@pytest.fixture(scope="session")
def llamagens(tmp_path_factory) -> dict[str, Path]:
    """Tiny LlamaGens by condition: "class" and "caption"."""
    base = tmp_path_factory.mktemp("llamagens")
    return {condition: save_llamagen(base / condition, condition) for condition in ("class", "caption")}


@pytest.fixture(scope="session")
def heads(tmp_path_factory) -> dict[str, Path]:
    """Folders of heads of random weights for the tiny checkpoint, by accelerator."""
    from tests.methods import eagle_checks, flash_checks

    target, folder = flash_checks.target_of("llava"), tmp_path_factory.mktemp("heads")
    made = {"eagle": eagle_checks.head_for(target), "flash": flash_checks.head_for(target)}
    for name, head in made.items():
        head.save_pretrained(folder / name)
    return {name: folder / name for name in made}


@pytest.fixture(scope="session")
def eagle3_head(tmp_path_factory) -> Path:
    """An EAGLE-3 head of random weights for the reference model."""
    from transformers import AutoConfig

    torch.manual_seed(0)
    config = Eagle3Config.for_target(
        AutoConfig.from_pretrained("assets/scenes-llava"), 418, intermediate_size=64
    )
    folder = tmp_path_factory.mktemp("eagle3") / "head"
    Eagle3Head(config).save_pretrained(folder)
    return folder


@pytest.fixture
def with_drafters(tiny_folder, tmp_path) -> Callable[..., Path]:
    """`with_drafters({label: (accelerator, folder)})`: the tiny checkpoint in a folder that names them."""

    def copy(named: dict[str, tuple[str, Path]], **other: object) -> Path:
        model = tmp_path / "model"
        shutil.copytree(tiny_folder, model)
        entries = {
            label: {"accelerator": accelerator, "drafter": os.path.relpath(folder, model)}
            for label, (accelerator, folder) in named.items()
        }
        (model / "drafters.json").write_text(json.dumps({**entries, **other}))
        return model

    return copy


@pytest.fixture(scope="session")
def images(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("images")
    paths = [folder / f"{index}.png" for index in range(2)]
    for image, path in zip(tiny_images(2), paths, strict=True):
        image.save(path)
    return [str(path) for path in paths]


@pytest.fixture
def run(monkeypatch) -> Callable[..., Result]:
    """`run("caption", ...)`: exit code, stdout and stderr of the whole command, errors included."""
    monkeypatch.setenv("NO_COLOR", "1")

    def invoke(*arguments: object) -> Result:
        from mmspec.cli.application import app

        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return invoke


@pytest.fixture
def run_json(run) -> Callable[..., object]:
    def invoke(*arguments: object) -> object:
        result = run(*arguments, "--json")
        assert result.exit_code == 0, result.stderr
        return json.loads(result.stdout)

    return invoke


@pytest.fixture
def fails(monkeypatch, capsys) -> Callable[..., str]:
    """Run main() with invalid arguments, and return its line of error text."""

    def invoke(*arguments: object) -> str:
        from mmspec.cli import main

        monkeypatch.setattr(sys, "argv", ["mmspec", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            main()
        assert exit_.value.code == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        said = captured.err.splitlines()
        lines = [line for line in said if line and not line.lower().startswith("loading")]
        assert len(lines) == 1
        assert lines[0].startswith("error: ")
        return lines[0]

    return invoke
