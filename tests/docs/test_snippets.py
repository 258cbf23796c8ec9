"""The Python snippets of README, and of pages that need only the reference models, run unchanged."""

import re
from pathlib import Path

import pytest

from tests.packaging.source_tree import ROOT

PAGES = ("README.md", "docs/tutorials/five-minutes.md", "docs/explanation/the-loop.md")


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_the_snippets_of_a_page_run_one_after_the_other(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "assets").symlink_to(ROOT / "assets")
    monkeypatch.chdir(tmp_path)
    snippets = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    assert snippets
    names: dict[str, object] = {"__name__": "__main__"}
    for number, snippet in enumerate(snippets):
        exec(compile(snippet, f"{page}, snippet {number + 1}", "exec"), names)
