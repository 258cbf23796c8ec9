"""Entries of the API reference in Markdown: signature, first paragraph, parameters and members of each name.

`docs/build.py` writes them into docs/reference/api.md, for readers on GitHub. The site replaces them by what
mkdocstrings renders (`docs/site_hooks.py`). All texts are from docstrings.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from reference_tables import SETTINGS, table

SECTION = r"^{name}:\n((?:(?: .*)?\n)+)"
ENTRY = re.compile(r"^ {4}(\w+(?:, \w+)*): (.*(?:\n {8}.*)*)", re.MULTILINE)
#: Public members that are for the package alone, by the last filter of mkdocstrings.
INTERNAL = re.compile(
    re.findall(r'"!(\^.*?)"', (Path(__file__).parents[1] / "mkdocs.yml").read_text(encoding="utf-8"))[-1]
)
CALL = "__call__"
WIDTH = 100  # characters of a signature on one line


def entry(path: str) -> str:
    """Return the entry of a function or class: `mmspec.enable` or a longer path."""
    module, _, name = path.rpartition(".")
    owner = getattr(importlib.import_module(module), name)
    is_settings, is_record = owner in SETTINGS.values(), is_dataclass(owner) and section(owner, "Attributes")
    texts = [f"### `{name}`"]
    if not is_settings and not is_record:
        texts.append(f"```python\n{signature(owner, name)}\n```")
    texts.append(first_paragraph(owner))
    if is_settings:
        texts.append("[Call keywords](call-keywords.md) lists the fields.")
    texts += tables(owner)
    if "from_pretrained" in vars(owner):
        texts += ["Arguments of `from_pretrained`:", *tables(owner.from_pretrained)]
    texts += [
        f"{title}: {' '.join(found.split())}"
        for title in ("Returns", "Raises")
        if not isinstance(owner, type) and (found := section(owner, title))
    ]
    if rows := list(members(owner)):
        texts.append(table(("member", "description"), rows))
    return "\n\n".join(texts)


def tables(owner: Any) -> list[str]:
    """Return the table of the arguments that a docstring describes, and that of its attributes."""
    made = []
    if rows := list(parameters(owner, "Args")):
        made.append(table(("argument", "type", "default", "meaning"), rows))
    if rows := list(parameters(owner, "Attributes")):
        kept = rows if is_dataclass(owner) else [(name, meaning) for name, _, _, meaning in rows]
        columns = ("attribute", "type", "default", "meaning")
        made.append(table(columns if is_dataclass(owner) else ("attribute", "meaning"), kept))
    return made


def signature(owner: Any, name: str) -> str:
    """Return the call of a function or class with annotations and defaults."""
    found = inspect.signature(owner)
    parts = [str(item) for item in arguments(found)]
    result = found.return_annotation
    tail = "" if isinstance(owner, type) or result is found.empty else f" -> {plain(result)}"
    line = f"{name}({', '.join(parts)}){tail}"
    return (
        line if len(line) <= WIDTH else "\n".join([f"{name}(", *(f"    {one}," for one in parts), f"){tail}"])
    )


def arguments(found: inspect.Signature, annotated: bool = True) -> Iterator[str]:
    """Yield the arguments of a signature, without `self` and `cls`, with "*" before keywords."""
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    is_marked = False
    for name, item in found.parameters.items():
        if name in ("self", "cls"):
            continue
        if item.kind is item.KEYWORD_ONLY and not is_marked:
            yield "*"
        is_marked |= item.kind in (item.KEYWORD_ONLY, item.VAR_POSITIONAL)
        text = stars.get(item.kind, "") + name
        if annotated and item.annotation is not item.empty:
            text += f": {plain(item.annotation)}"
        if item.default is not item.empty:
            text += f" = {default(item)}" if annotated else f"={default(item)}"
        yield text


def plain(annotation: object) -> str:
    """Return an annotation as in the source."""
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))


def default(item: inspect.Parameter) -> str:
    """Return a default value in Python; "..." for one that is made in each call."""
    text = repr(item.default)
    return "..." if text.startswith("<") else text.replace("'", '"')


def first_paragraph(owner: Any) -> str:
    """Return the first paragraph of a docstring on one line."""
    return " ".join((inspect.getdoc(owner) or "").split("\n\n")[0].split())


def section(owner: Any, title: str) -> str:
    """Return the text of a section of a docstring; "" without one."""
    doc = (inspect.getdoc(owner) or "") + "\n"
    found = re.search(SECTION.format(name=title), doc, re.MULTILINE)
    return found[1] if found else ""


def parameters(owner: Any, title: str) -> Iterator[tuple[str, str, str, str]]:
    """Yield rows of the entries of a section of a docstring, with types and defaults of the signature."""
    known = inspect.signature(owner).parameters
    for names, text in ENTRY.findall(section(owner, title)):
        items = [known.get(name) for name in names.split(", ")]
        types = dict.fromkeys(f"`{plain(one.annotation)}`" for one in items if one is not None)
        values = dict.fromkeys(
            f"`{default(one)}`" for one in items if one is not None and one.default is not one.empty
        )
        shown = ", ".join(f"`{name}`" for name in names.split(", "))
        yield shown, ", ".join(types) or "-", ", ".join(values) or "-", " ".join(text.split()).rstrip(".")


def members(owner: Any) -> Iterator[tuple[str, str]]:
    """Yield rows of the public methods and properties of a class, and its `__call__` if that is inherited."""
    own = dict(vars(owner)) if isinstance(owner, type) else {}
    bases = owner.__mro__[1:] if own else ()
    own |= next(({CALL: vars(base)[CALL]} for base in bases if CALL not in own and CALL in vars(base)), {})
    for name, member in own.items():
        member = getattr(member, "__func__", member)
        if name.startswith("_") and name != CALL or INTERNAL.match(name) or not inspect.getdoc(member):
            continue
        if isinstance(member, property):
            yield f"`{name}`", first_paragraph(member)
        elif inspect.isfunction(member):
            called = ", ".join(arguments(inspect.signature(member), annotated=False))
            yield f"`{name}({called})`", first_paragraph(member)
