"""Planting a bug: a few characters of a real function are replaced while a check runs."""

from __future__ import annotations
import __future__

import importlib
import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class PlantedBug:
    """A mutation and the check that must flag it.

    Attributes:
        where: "module:Class.function".
        edits: pairs (text that occurs once in the function, text to put there).
        check: raises AssertionError if the code is wrong, and nothing if it is right.
    """

    where: str
    edits: tuple[tuple[str, str], ...]
    check: Callable[[], None]

    @contextmanager
    def planted(self) -> Iterator[None]:
        module_name, path = self.where.split(":")
        module = importlib.import_module(module_name)
        *owners, name = path.split(".")
        owner = module
        for part in owners:
            owner = getattr(owner, part)
        real = vars(owner)[name]
        source = textwrap.dedent(inspect.getsource(plain_function(real)))
        for old, new in self.edits:
            assert source.count(old) == 1, f"{self.where} no longer holds {old!r} once: plant the bug anew"
            source = source.replace(old, new)
        made: dict[str, object] = {}
        flags = __future__.annotations.compiler_flag
        exec(compile(source, f"<planted in {path}>", "exec", flags=flags), vars(module), made)
        mutant = made[name]
        if hasattr(mutant, "__set_name__"):
            mutant.__set_name__(owner, name)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, mutant)
            yield


def plain_function(member: object) -> Callable[..., object]:
    """The function inside a property, a class method or a decorator."""
    for attribute in ("func", "fget", "__func__"):
        member = getattr(member, attribute, member)
    return inspect.unwrap(member)  # type: ignore[arg-type]
