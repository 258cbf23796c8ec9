"""The folders under demos/ are complete Spaces."""

import os
import re
import runpy
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.packaging.source_tree import ROOT, pyproject

COMMAND_OF = {"captioning": "caption", "image_generation": "generate"}
FOLDERS = {path.name: path for path in sorted((ROOT / "demos").iterdir()) if path.is_dir()}  # each a Space


@pytest.mark.parametrize("name", FOLDERS)
def test_the_front_matter_is_what_spaces_ask_for(name: str) -> None:
    text = (FOLDERS[name] / "README.md").read_text(encoding="utf-8")
    front = dict(re.findall(r"^(\w+): (.+)$", text.split("---")[1], re.MULTILINE))
    assert front["sdk"] == "gradio" and (FOLDERS[name] / front["app_file"]).is_file()
    assert len(front["short_description"]) <= 60
    gradio = next(map(Requirement, pyproject()["project"]["optional-dependencies"]["demo"]))
    assert gradio.specifier.contains(front["sdk_version"])
    (line,) = (FOLDERS[name] / "requirements.txt").read_text().split()
    assert Requirement(line).extras == {"demo"}


@pytest.mark.parametrize("name", FOLDERS)
def test_the_app_runs_the_command_with_the_variables_of_the_space(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr(sys, "argv", ["pytest"])
    monkeypatch.setattr("mmspec.cli.demo.main", lambda: seen.append(list(sys.argv)))
    for variable in ("GRADIO_SERVER_NAME", "GRADIO_SERVER_PORT", "MMSPEC_ACCELERATOR"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setitem(os.environ, "MMSPEC_MODEL", "a/model")
    runpy.run_path(str(Path(FOLDERS[name]) / "app.py"), run_name="__main__")
    command = ["mmspec", "demo", COMMAND_OF[name], "a/model", "--host", "0.0.0.0", "--port", "7860"]
    assert seen == [command]
