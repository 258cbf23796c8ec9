"""Accelerators by name, with typed options: `build_accelerator("copy", num_draft_tokens=8)`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from mmspec.accelerator import DEFAULT_RULES, Accelerator, default_rule
from mmspec.errors import UnknownArgumentError
from mmspec.plugins import METHODS, RULES, Method, keywords, load
from mmspec.registry import did_you_mean
from mmspec.validation import is_integer, plain_numbers

__all__ = [
    "build_accelerator",
    "list_accelerators",
    "makers_of",
    "option_names",
    "options_of",
    "promise_of",
    "rules_of",
]

OF_ALL = {"acceptance", "length", "stop_below"}


def make(method: Method, *model: Any, **options: Any) -> Accelerator:
    """Make a method's accelerator, with the rule that the method or its kind of drafts has by default.

    Args:
        model: the loaded model, where the method needs one.
        options: of the method's drafter; see `makers_of`.
    """
    maker, *adders = makers_of(method)
    made = maker(*model, **{name: options[name] for name in keywords(maker) if name in options})
    if isinstance(made, Accelerator):
        return made
    for add in adders:
        made = add(made, **{name: options[name] for name in keywords(add) if name in options})
    rule = default_rule(made) if method.rule is None else RULES[method.rule](**method.settings)
    return Accelerator(method.name, made, rule)


def __getattr__(name: str) -> Callable[..., Accelerator]:
    """Return the function that makes the accelerator of that name, such as `accelerators.sjd(window=16)`."""
    if name.startswith("_") or name not in METHODS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return partial(build_accelerator, name)


def makers_of(method: Method) -> tuple[Callable[..., Any], ...]:
    """Return the functions and classes whose arguments are the options of a method's drafter.

    The first makes the drafter, or the accelerator; others add candidates to the drafter of a head.
    """
    if method.make is not None:
        return (load(method.make),)
    drafter = method.drafter_class
    if method.head is None or not drafter.shares_tree:
        return (drafter,)
    return (drafter, *(load(each.beside) for each in METHODS.values() if each.beside is not None))


def of_drafter(method: Method) -> set[str]:
    """Return the names of the options of a method's drafter, without its `model`."""
    return set().union(*map(keywords, makers_of(method))) - {"model"}


def options_of(method: Method) -> set[str]:
    """Return the names of the options of a method: those of its drafter, and of a rule of its own."""
    of_rule = [] if method.rule is None else keywords(RULES[method.rule])
    return of_drafter(method).union(of_rule)


def promise_of(method: Method) -> tuple[str, str | None]:
    """Return the promise with default options, and its bound or reference distribution in words.

    The promise is "exact", "bounded", "approximate" or "lossy".
    """
    if method.needs is not None:  # verified by the default rule, unless the method names one
        rule = None if method.rule is None else RULES[method.rule]
        return ("exact", method.keeps) if rule is None else (rule.exactness, rule.bound)
    made = make(method)
    if made.drafter.exactness != "exact":
        return made.drafter.exactness, None
    exactness = "exact" if made.exactness == "exact" else made.rule.exactness
    return exactness, made.rule.bound or made.keeps or None


def list_accelerators() -> list[str]:
    """Return the names that `accelerator=` accepts."""
    return list(METHODS)


def rules_of(method: Method) -> list[Any]:
    """Return the acceptance rules that may verify the drafts of a method if the caller names none."""
    if method.needs is None:
        return [type(make(method).rule)]
    if method.rule is not None:
        return [RULES[method.rule]]
    # the loaded drafter decides which rule applies
    return [RULES[rule] for rule in (*DEFAULT_RULES, *method.judged_by)]


def option_names(name: str, acceptance: str | None = None) -> set[str]:
    """Return the names of the options that `build_accelerator` accepts for a method and a rule.

    Raises:
        InputError: there is no such method or rule.
    """
    method = METHODS[name]
    rules = rules_of(method) if acceptance is None else [RULES[acceptance]]
    return of_drafter(method).union(OF_ALL, *map(keywords, rules))


def build_accelerator(
    name: str,
    /,
    *model: Any,
    acceptance: str | None = None,
    length: str = "auto",
    stop_below: float | None = None,
    **options: object,
) -> Accelerator:
    """Make an accelerator from its name and options, as the command line does.

    Args:
        name: of a method.
        model: the loaded model, where the method needs one; also `model=`.
        acceptance: name of another acceptance rule; default rule of the drafter if None.
        length: how long drafts are: "auto", "fixed", "cost" or "confidence".
        stop_below: with `length="confidence"`, a draft ends where every path is less probable than this,
            above 0 to 1; 0.3 if None.
        options: of the method, and of the rule.

    `Accelerator.with_length` describes the lengths.

    Raises:
        InputError: a name is unknown, the rule is not sound for the drafter, or a value is out of range.
        UnknownArgumentError: neither the method nor the rule has such an option.
    """
    options = plain_numbers(options)
    method = METHODS[name]
    rule_class = None if acceptance is None else RULES[acceptance]
    of_rule = [] if rule_class is None else keywords(rule_class)
    names = of_drafter(method).difference(of_rule) | {"model"}
    own = {key: value for key, value in options.items() if key in names}
    given = {key: value for key, value in options.items() if key not in names}
    plain = is_integer(drafted := own.get("num_draft_tokens")) and drafted == 0
    made = replace(make(METHODS["none"]), name=name) if plain else make(method, *model, **own)
    if rule_class is None:
        of_rule = keywords(type(made.rule))
    for option in given.keys() - {*of_rule}:
        known = of_drafter(method).union(of_rule, OF_ALL)
        raise UnknownArgumentError(f"option of accelerator {name!r}", option, did_you_mean(option, known))
    if rule_class is not None:
        made = made.with_rule(rule_class(**given))
    elif given:
        rule: Any = made.rule  # rules with options are dataclasses
        made = made.with_rule(replace(rule, **given))
    return made.with_length(length, stop_below)
