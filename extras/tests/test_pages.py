"""Every method has a page with an up-to-date generated part; every linked file exists."""

import re
import runpy
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "extras" / "docs"
(METHODS,) = (point.load() for point in entry_points(group="mmspec.methods", name="extras"))


def test_built_parts_of_pages_are_what_would_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["docs/build.py", "--extras", "--check"])
    with pytest.raises(SystemExit) as done:
        runpy.run_path(str(ROOT / "docs" / "build.py"), run_name="__main__")
    assert not done.value.code


@pytest.mark.parametrize("name", [method.name for method in METHODS])
def test_every_method_has_a_page_with_its_idea_formula_and_use(name: str) -> None:
    parts = re.split(r"^## (.*)$", (PAGES / f"{name}.md").read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    assert parts[::2][:3] == ["Idea", "Formula", "When to use it"]
    assert all(len(text.strip()) > 40 for text in parts[1::2])


def test_every_linked_file_exists() -> None:
    found = [
        (page, link)
        for page in (PAGES.parent / "README.md", *PAGES.glob("*.md"))
        for link in re.findall(r"\]\((?!https?:)([^)#]+)\)", page.read_text(encoding="utf-8"))
    ]
    assert found
    assert [(page.name, link) for page, link in found if not (page.parent / link).exists()] == []
