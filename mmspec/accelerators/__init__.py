"""Accelerators by name, with typed options: `build_accelerator("copy", num_draft_tokens=8)`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypedDict, Unpack

from torch import nn
from transformers import LlamaConfig, PreTrainedModel

from mmspec.accelerator import DEFAULT_RULES, Accelerator, pair
from mmspec.errors import UnknownArgumentError
from mmspec.families.masked_language.unmasking import UnmaskingDrafter
from mmspec.methods.copy.beside_head import CopyBesideHeadDrafter
from mmspec.plugins import HEADS, METHODS, RULES, Method, keywords, load
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


class TreeOptions(TypedDict, total=False):
    """Options of a head's drafter: `block` of FLASH, `probes_per_node` of PPD, the others of most heads."""

    num_draft_tokens: int | None
    depth: int | None
    top_k: int | None
    tree: str | int | Sequence[int]
    sampling: str
    block: int | None
    probes_per_node: float


def make(method: Method, *model: Any, **options: Any) -> Accelerator:
    """Make a method's accelerator.

    Args:
        model: the loaded model, where the method needs one.
        options: of the method; see `options_of`.
    """
    if method.make is not None:
        made: Accelerator = load(method.make)(*model, **options)
        return made
    if method.head is not None:
        return trained_head(method.name, *model, **options)
    return unmasked(method.name, **options)


def __getattr__(name: str) -> Callable[..., Accelerator]:
    """Return the function that makes the accelerator of that name, such as `accelerators.sjd(window=16)`."""
    if name.startswith("_") or name not in METHODS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return partial(make, METHODS[name])


def trained_head(
    name: str,
    model: PreTrainedModel,
    copy: bool = False,
    corpus: str | Path | None = None,
    **tree: Unpack[TreeOptions],
) -> Accelerator:
    """Make the accelerator of a trained head.

    Args:
        name: of a method that has a head.
        model: the loaded head.
        copy, corpus: see `with_copies`.
        tree: options of the head's drafter.
    """
    drafter = HEADS[name].load("drafter")
    return pair(name, with_copies(drafter(model, **tree), copy, corpus))


def with_copies(drafter: Any, /, copy: bool = False, corpus: str | Path | None = None) -> Any:
    """Add copies beside the candidates of a head if an option requires it.

    Args:
        drafter: of the head.
        copy: whether copies of earlier text compete with the head's candidates for the nodes of a tree.
        corpus: file of n-grams, whose continuations compete for the nodes too, and so do copies; no file if
            None.
    """
    return CopyBesideHeadDrafter(drafter, corpus) if copy or corpus is not None else drafter


def unmasked(
    name: str, *, block_length: int | None = None, cache: str = "none", **options: object
) -> Accelerator:
    """Make the accelerator of a masked language model that decides several places in a forward pass.

    Args:
        name: of a method whose rule decides places.
        block_length, cache: see `UnmaskingDrafter`.
        options: of the rule.
    """
    return Accelerator(name, UnmaskingDrafter(block_length, cache), RULES[name](**options))


def makers_of(method: Method) -> tuple[Callable[..., object], ...]:
    """Return the functions and classes whose arguments are the options of a method."""
    if method.make is not None:
        return (load(method.make),)
    if method.head is not None:
        drafter = method.head.load("drafter")
        return (drafter, with_copies) if drafter.shares_tree else (drafter,)
    return RULES[method.name], UnmaskingDrafter


def options_of(method: Method) -> set[str]:
    """Return the names of the options of a method, without its `model`."""
    return set().union(*map(keywords, makers_of(method))) - {"model"}


def promise_of(method: Method) -> tuple[str, str | None]:
    """Return the promise with default options, and its bound or reference distribution in words.

    The promise is "exact", "bounded", "approximate" or "lossy".
    """
    if method.needs is not None:  # all of these are verified by the default rule
        return "exact", method.keeps
    made = make(method)
    if made.drafter.exactness != "exact":
        return made.drafter.exactness, None
    exactness = "exact" if made.exactness == "exact" else made.rule.exactness
    return exactness, made.rule.bound or made.keeps or None


def list_accelerators() -> list[str]:
    """Return the names that `accelerator=` accepts."""
    return list(METHODS)


class WithoutLayers(nn.Module):
    """A language model that computes nothing."""

    config = LlamaConfig(num_hidden_layers=0)

    def get_decoder(self) -> nn.Module:
        return self


@dataclass(frozen=True)
class DraftToCome:
    """Stand-in for a draft model that is not loaded yet, so that its options can be checked."""

    vector_size: int = 0
    any_order: bool = False
    fills_masks: bool = False
    model: nn.Module = field(default_factory=WithoutLayers)


def rules_of(method: Method) -> list[Any]:
    """Return the acceptance rules that may verify the drafts of a method if the caller names none."""
    if method.needs is None:
        return [type(make(method).rule)]
    # the loaded drafter decides which rule applies
    return [RULES[rule] for rule in (*DEFAULT_RULES, *method.judged_by)]


def option_names(name: str, acceptance: str | None = None) -> set[str]:
    """Return the names of the options that `build_accelerator` accepts for a method and a rule.

    Raises:
        InputError: there is no such method or rule.
    """
    method = METHODS[name]
    rules = rules_of(method) if acceptance is None else [RULES[acceptance]]
    of_rules = set().union(*map(keywords, rules))
    return options_of(method) | of_rules | {"acceptance", "length", "stop_below"}


def build_accelerator(
    name: str,
    *,
    acceptance: str | None = None,
    length: str = "auto",
    stop_below: float | None = None,
    **options: object,
) -> Accelerator:
    """Make an accelerator from its name and options, as the command line does.

    Args:
        name: of a method.
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
    of_rule = set() if rule_class is None else keywords(rule_class)
    names = options_of(method)
    own = {key: value for key, value in options.items() if key in names - of_rule | {"model"}}
    plain = is_integer(drafted := own.get("num_draft_tokens")) and drafted == 0
    made = replace(make(METHODS["none"]), name=name) if plain else make(method, **own)
    if rule_class is None:
        of_rule = keywords(type(made.rule))
    for option in options.keys() - own.keys() - of_rule:
        known = names | of_rule | {"acceptance", "length", "stop_below"}
        raise UnknownArgumentError(f"option of accelerator {name!r}", option, did_you_mean(option, known))
    given = {key: value for key, value in options.items() if key not in own}
    if rule_class is not None:
        made = made.with_rule(rule_class(**given))
    elif given:
        made = made.with_rule(replace(made.rule, **given))  # type: ignore[type-var]  # rules with options are dataclasses
    return made.with_length(length, stop_below)
