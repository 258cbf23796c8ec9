"""Hooks of mkdocs: links to files outside docs/, and the entries of the API reference.

Pages link to files of the repository, so that the links work on GitHub. On the site these links lead to the
repository that `[project.urls]` in pyproject.toml names. If it names none, only the text of the link remains.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path, PurePosixPath
from posixpath import normpath

from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
FENCED = re.compile(r"(^ *```.*?^ *```$)", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])+)\]\((?!\w+:|#)([^)\s#]+)(#[^)\s]*)?\)")
#: An entry that docs/build.py wrote for readers of the Markdown.
ENTRY = re.compile(r"^<!-- built: api (\S+) -->$.*?^<!-- /built -->$", re.DOTALL | re.MULTILINE)


def main_branch() -> str | None:
    """Return the address of the files on the main branch, or None if pyproject.toml names no repository."""
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"].get("urls", {})
    found = next((url for name, url in urls.items() if name.lower() in ("repository", "source")), None)
    return found and f"{found.rstrip('/')}/blob/main"


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Return a page with directives of mkdocstrings, and with links that resolve on the site."""
    folder, main = PurePosixPath("docs", page.file.src_uri).parent, main_branch()

    def resolved(link: re.Match[str]) -> str:
        text, path, anchor = link[1], normpath(f"{folder}/{link[2]}"), link[3] or ""
        if path.startswith("docs/") and PurePosixPath(path).suffix not in ("", ".py"):
            return link[0]  # a page or an image of the site; mkdocs reports missing ones
        return f"[{text}]({main}/{path}{anchor})" if main else text

    parts = FENCED.split(ENTRY.sub(r"\n::: \1\n", markdown))
    return "".join(part if index % 2 else LINK.sub(resolved, part) for index, part in enumerate(parts))
