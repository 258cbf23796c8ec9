"""Meanings and defaults of options, for the tables of the docs and for `mmspec accelerators NAME`.

They are read from the `Args` of docstrings. An entry "see `WindowDrafter`" stands for the entry of that
class, and "Options: see `CopyDrafter`" for all its entries. A clause "; 5 if None" states the default that
None stands for.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from mmspec.accelerators import build_accelerator, make, makers_of, options_of, rules_of
from mmspec.plugins import RULES, Method, keywords

__all__ = ["Meaning", "meaning_of", "meanings_of", "meanings_of_all", "meanings_of_rule"]

ARGS = re.compile(r"^Args:\n((?:(?: .*)?\n)+)", re.MULTILINE)
ENTRY = re.compile(r"^ {4}(\w+(?:, \w+)*): (.*(?:\n {8}.*)*)", re.MULTILINE)
ALL_OF = re.compile(
    r"(?:\b(?:args|options):?|for `\w+`,) (?:see|as of)(?: the rule)? ((?:`\w+`(?:,? and )?)+)",
    re.IGNORECASE,
)
SEE = re.compile(r"(?:see|as of) `(\w+)`([.;,]?) ?(.*)")
IF_NONE = re.compile(r"; ((?:[^;.]|\.(?=\d))+?),? if None\b")
OF_HEAD = "head's config"


@dataclass(frozen=True)
class Meaning:
    """Documentation of an option.

    Attributes:
        default: a value as on the command line, in backticks; or a description of the default.
        text: meaning and allowed values; "" if no docstring describes it.
    """

    name: str
    default: str
    text: str


def meaning_of(owner: Callable[..., Any], name: str) -> Meaning:
    """Return the documentation of a parameter of a function or class."""
    text = described(owner, name) or ""
    value, stated = inspect.signature(owner).parameters[name].default, IF_NONE.findall(text)
    default = shown(stated[-1]) if value is None and stated else written(value)
    return Meaning(name, default, shown(IF_NONE.sub("", text)).rstrip("."))


def meanings_of(method: Method) -> list[Meaning]:
    """Return the documentation of a method's options, then of those of its acceptance rules."""
    found: dict[str, Meaning] = {}
    own = options_of(method)
    for maker in makers_of(method):
        found |= {name: of_head(meaning_of(maker, name), method) for name in keywords(maker) if name in own}
    for rule in rules_of(method):
        label = next(name for name in RULES if RULES[name] is rule)
        for each in meanings_of_rule(label):
            if method.needs is not None:
                each = replace(each, text=f"with the rule `{label}`: {each.text}")
            elif each.default.startswith("`"):  # the method may set another default
                each = replace(each, default=written(getattr(make(method).rule, each.name)))
            found.setdefault(each.name, each)
    return list(found.values())


def meanings_of_rule(name: str) -> list[Meaning]:
    """Return the documentation of an acceptance rule's options."""
    return [meaning_of(RULES[name], each) for each in keywords(RULES[name])]


def meanings_of_all() -> list[Meaning]:
    """Return the documentation of the options that every accelerator has."""
    return [meaning_of(build_accelerator, name) for name in ("acceptance", "length", "stop_below")]


def of_head(meaning: Meaning, method: Method) -> Meaning:
    """Return a meaning with the value that the config of a new head has, if that is the default."""
    if meaning.default != OF_HEAD or method.head is None:
        return meaning
    value = getattr(method.head.load("model").config_class(), meaning.name)
    return replace(meaning, default=f"{OF_HEAD} (new heads: {written(value)})")


def described(owner: Callable[..., Any], name: str) -> str | None:
    """Return the text of a parameter, with those that it refers to; None without one."""
    for each in lineage(owner):
        doc = inspect.cleandoc(each.__doc__ or "") + "\n"
        for names, entry in ENTRY.findall("".join(ARGS.findall(doc))):
            if name not in names.split(", "):
                continue
            text = " ".join(entry.split())
            if (see := SEE.fullmatch(text)) is None:
                return text
            base = next((base for one in named(each, see[1]) if (base := described(one, name))), "")
            return f"{base.rstrip('.')}{see[2]} {see[3]}" if see[3] else base
        for other in referred(each):
            if (found := described(other, name)) is not None:
                return found
    return None


def lineage(owner: Callable[..., Any]) -> tuple[Callable[..., Any], ...]:
    """Return a function, or a class with its bases."""
    return owner.__mro__[:-1] if isinstance(owner, type) else (owner,)


def referred(owner: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Yield the classes and functions that document the other options of a function or class."""
    for found in ALL_OF.findall(" ".join((owner.__doc__ or "").split())):
        for name in re.findall(r"`(\w+)`", found):
            yield from named(owner, name)


def named(owner: Callable[..., Any], name: str) -> list[Callable[..., Any]]:
    """Return the class or function that a docstring names: a base, or from the module; [] without one."""
    bases = {each.__name__: each for each in lineage(owner)}
    found = bases.get(name) or getattr(sys.modules[owner.__module__], name, None)
    return [found] if callable(found) else []


def written(value: object) -> str:
    """Return a default value as on the command line, in backticks."""
    if value is inspect.Parameter.empty:
        return "required"
    if value is None or value == ():
        return "none"
    return f"`{str(value).lower() if isinstance(value, bool) else str(value).removesuffix('.0')}`"


def shown(text: str) -> str:
    """Return the text of a docstring with values in backticks, written as on the command line."""
    if re.fullmatch(r"[\d.]+|True|False", text):
        return f"`{text}`"
    parts = text.split("`")
    parts[::2] = [re.sub(r'(?<!\{)"([^" ]*)"', r"`\1`", part) for part in parts[::2]]
    parts[1::2] = [re.sub(r'="([^" ]*)"', r"=\1", part) for part in parts[1::2]]
    return "`".join(parts)
