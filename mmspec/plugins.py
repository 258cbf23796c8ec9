"""Methods, acceptance rules and model families by name: ours by folder, anyone's by entry points.

A method is a folder of `mmspec.methods` whose `__init__` has `METHODS`, records that name their parts as
"module:attribute". Parts are imported when they are asked for. A package outside registers a record, or a
list of records, under the entry points `mmspec.methods`.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Generic, TypeVar, get_args, get_type_hints

from mmspec.errors import InputError
from mmspec.registry import did_you_mean

__all__ = [
    "FAMILIES",
    "HEADS",
    "METHODS",
    "RULES",
    "Family",
    "Head",
    "Located",
    "Method",
    "Plugins",
    "Variant",
    "family_of",
    "keywords",
    "load",
    "register_families",
]

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

T = TypeVar("T")


def load(location: str) -> Any:
    """Import what stands at "module:attribute"."""
    module, attribute = location.split(":")
    return getattr(importlib.import_module(module), attribute)


@dataclass(frozen=True)
class Variant:
    """Another way to train a head.

    Attributes:
        settings: of its config and of its loss, where nothing else is asked for.
        loss: another loss than the head's own; None for that.
    """

    settings: Mapping[str, object] = field(default_factory=dict)
    loss: str | None = None


@dataclass(frozen=True)
class Head:
    """Parts of a trained drafting head.

    Attributes:
        model: the head, a `DraftingHead`; its `config_class` is its config.
        drafter: the `Drafter` that runs it.
        loss: the `DrafterLoss` that trains it; None if it comes trained.
        published: reads a folder as the method's authors publish it, for a target; None if they do not.
        of_images: whether it drafts image tokens alone.
        in_checkpoint: whether `published` reads the target's own checkpoint, which then needs no other.
        image_settings: settings of its config where the target draws images and nothing else is asked for.
        variants: other ways to train it, by the names that `mmspec train drafter --method` takes.
    """

    model: str
    drafter: str
    loss: str | None = None
    published: str | None = None
    of_images: bool = False
    in_checkpoint: bool = False
    image_settings: Mapping[str, object] = field(default_factory=dict)
    variants: Mapping[str, Variant] = field(default_factory=dict)

    def load(self, part: str) -> Any:
        """Import the part of that name, one that there is: "model", "drafter", "loss" or "published"."""
        return load(getattr(self, part))


@dataclass(frozen=True)
class Method:
    """Record of a method.

    Attributes:
        name: as `accelerator=` takes it; of a record that has rules alone, the folder's.
        summary: what it does, for tables.
        source: the paper's arXiv id; "-" without one.
        make: a typed function that returns the `Accelerator`; it takes the loaded `model` first where one is
            needed. None of heads and of policies, which are made alike.
        head: parts of its trained head, if it has one.
        policy: the rule of a method that decides places of a masked block.
        rules: acceptance rules that the folder adds, by the names that `acceptance=` takes.
        trials: settings that `mmspec bench --accelerators all` compares on images, as the command line writes
            them; the best of several values (`window=16|32`) is searched for.
        tuned: settings that `mmspec tune` tries; () for the sizes of a head's tree.
        needs: what `drafter=` has to be, in words; None where nothing is needed.
        keeps: what "exact" refers to, in words, where no drafter is there to state it.
    """

    name: str
    summary: str = ""
    source: str = "-"
    make: str | None = None
    head: Head | None = None
    policy: str | None = None
    rules: Mapping[str, str] = field(default_factory=dict)
    trials: Sequence[str] = ()
    tuned: Sequence[str] = ()
    needs: str | None = None
    keeps: str | None = None

    @property
    def accelerates(self) -> bool:
        """Whether `accelerator=` takes the name; other records have acceptance rules alone."""
        return bool(self.make or self.head or self.policy)


@dataclass(frozen=True)
class Family:
    """Record of a model family that is not driven as any causal language model is.

    Attributes:
        name: of the family.
        target: its `Target`.
        model_types: of its configs; None for the name alone.
        recognises: says whether a config of these types is the family's; None where all are.
        draws: "tokens" or "vectors" for a family that draws images; "" for one of text.
        answers: whether a model that draws also answers, which is then what it is loaded for.
        vq_apart: whether its image tokenizer is a model of its own.
        accelerator: what decodes where none is named; None for the pipeline's own default.
    """

    name: str
    target: str
    model_types: Sequence[str] | None = None
    recognises: Callable[[PreTrainedConfig], bool] | None = None
    draws: str = ""
    answers: bool = True
    vq_apart: bool = False
    accelerator: str | None = None

    def has(self, config: PreTrainedConfig) -> bool:
        """Whether a config is of this family."""
        types = (self.name,) if self.model_types is None else self.model_types
        return config.model_type in types and (self.recognises is None or self.recognises(config))


class Plugins(Mapping[str, T], Generic[T]):
    """Plug-ins by name.

    Args:
        kind: what they are, for error messages.
        find: returns all of them.
    """

    def __init__(self, kind: str, find: Callable[[], Mapping[str, T]]) -> None:
        self.kind, self._find = kind, find

    def __iter__(self) -> Iterator[str]:
        return iter(self._find())

    def __len__(self) -> int:
        return len(self._find())

    def __contains__(self, name: object) -> bool:
        return name in self._find()

    def __getitem__(self, name: str) -> T:
        """Return the plug-in of that name.

        Raises:
            InputError: no such name; the message has the nearest one and all that exist.
        """
        found = self._find()
        if not isinstance(name, str) or name not in found:
            raise InputError(self.kind, name, did_you_mean(name, found))
        return found[name]


@cache
def records() -> tuple[Method, ...]:
    """All records of methods: plain decoding, then ours by name, then those of entry points."""
    package = importlib.import_module("mmspec.methods")
    folders = [each.name for each in pkgutil.iter_modules(package.__path__) if each.ispkg]
    found: list[Method] = []
    for folder in sorted(folders, key=lambda name: (name != "none", name)):
        found += importlib.import_module(f"{package.__name__}.{folder}").METHODS
    for point in entry_points(group=package.__name__):
        given = point.load()
        found += [given] if isinstance(given, Method) else given
    return tuple(found)


@cache
def methods() -> dict[str, Method]:
    """The records of what `accelerator=` takes."""
    return unique("accelerator", [(each.name, each) for each in records() if each.accelerates])


@cache
def heads() -> dict[str, Head]:
    """The trained heads of the methods that have one."""
    return {name: each.head for name, each in methods().items() if each.head is not None}


@cache
def rules() -> dict[str, str]:
    """Locations of the acceptance rules: those that judge any tree first, then those of the methods."""
    shared = importlib.import_module("mmspec.trees").RULES | importlib.import_module("mmspec.vectors").RULES
    return unique(
        "acceptance", [*shared.items(), *(rule for each in records() for rule in each.rules.items())]
    )


@cache
def families() -> dict[str, Family]:
    """The records of all model families, ours and those of entry points; importing them registers configs."""
    package = importlib.import_module("mmspec.families")
    found: list[Family] = []
    for each in pkgutil.iter_modules(package.__path__):
        if each.ispkg:
            found += importlib.import_module(f"{package.__name__}.{each.name}").FAMILIES
    for point in entry_points(group=package.__name__):
        given = point.load()
        found += [given] if isinstance(given, Family) else given
    return unique("family", [(each.name, each) for each in found])


def register_families() -> None:
    """Make the auto classes of transformers know the configs and models of all families."""
    families()


def family_of(config: PreTrainedConfig) -> Family | None:
    """The family of a model's config, or else of its language model's; None where it has no record."""
    for each in (config, config.get_text_config(decoder=True)):
        for family in families().values():
            if family.has(each):
                return family
    return None


def unique(kind: str, named: Sequence[tuple[str, T]]) -> dict[str, T]:
    """Return a table of names.

    Raises:
        InputError: two plug-ins have the same name.
    """
    table: dict[str, T] = {}
    for name, plugin in named:
        if name in table:
            raise InputError(
                kind, name, "a name that no other plug-in has; uninstall one of the two packages"
            )
        table[name] = plugin
    return table


class Located(Plugins[Any]):
    """Plug-ins by name, of which the table has the locations; each is imported when it is asked for."""

    def __getitem__(self, name: str) -> Any:
        return load(super().__getitem__(name))


METHODS: Plugins[Method] = Plugins("accelerator", methods)
FAMILIES: Plugins[Family] = Plugins("family", families)
HEADS: Plugins[Head] = Plugins("head", heads)
RULES = Located("acceptance", rules)


def keywords(function: Callable[..., object]) -> set[str]:
    """Names of the arguments of a function or constructor, those of a `TypedDict` of keywords included."""
    names = set()
    for name, item in inspect.signature(function).parameters.items():
        if item.kind is item.VAR_KEYWORD:
            (options,) = get_args(get_type_hints(function)[name])
            names |= set(options.__annotations__)
        elif item.kind is item.POSITIONAL_OR_KEYWORD:
            names.add(name)
    return names
