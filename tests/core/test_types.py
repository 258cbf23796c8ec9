"""Types of a round: whatever the family, no field of theirs is left out or None."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

import pytest

import mmspec.core
from mmspec.core.draft import Block, Draft, Nodes, Tree
from mmspec.core.interfaces import Round, TargetOutput
from mmspec.core.verdict import Fill, Measured, Path

TYPES = (Draft, Tree, Block, Nodes, Path, Fill, Measured, TargetOutput, Round)


def fields_of(kind: Any) -> dict[str, Any]:
    """Field -> its default, or MISSING, of a dataclass or of a named tuple."""
    if dataclasses.is_dataclass(kind):
        return {field.name: field.default for field in dataclasses.fields(kind)}
    return {name: kind._field_defaults.get(name, dataclasses.MISSING) for name in kind._fields}


def parts_of(hint: Any) -> Iterator[Any]:
    """A type and all types that it is made of."""
    yield hint
    for part in get_args(hint):
        yield from parts_of(part)


def optional_fields(kind: Any) -> list[str]:
    """Fields of a type that may be None, or are by default."""
    hints = get_type_hints(kind)
    return [
        name
        for name, default in fields_of(kind).items()
        if default is None or type(None) in parts_of(hints[name])
    ]


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.__name__)
def test_no_field_is_optional(kind: Any) -> None:
    assert fields_of(kind) and not optional_fields(kind)


def test_a_draft_is_a_tree_or_a_block() -> None:
    for module in pkgutil.iter_modules(mmspec.core.__path__, "mmspec.core."):
        importlib.import_module(module.name)
    assert {kind for kind in Draft.__subclasses__() if kind.__module__.startswith("mmspec.")} == {Tree, Block}
