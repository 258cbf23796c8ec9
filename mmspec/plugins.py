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
    "Converter",
    "Family",
    "Head",
    "Located",
    "Method",
    "Plugins",
    "Variant",
    "converter_of",
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
        exports: writers of layouts that other engines load, by the names that `mmspec export --to` takes:
            functions of the head, the layout, the name of its target, the target's config and a folder, which
            return what is to be told beside the path.
        shipped: reference models that are such heads, by name: what each is, and the command that makes it.
        variants: other ways to train it, by the names that `mmspec train drafter --method` takes.
    """

    model: str
    drafter: str
    loss: str | None = None
    published: str | None = None
    of_images: bool = False
    in_checkpoint: bool = False
    image_settings: Mapping[str, object] = field(default_factory=dict)
    exports: Mapping[str, str] = field(default_factory=dict)
    shipped: Mapping[str, tuple[str, str]] = field(default_factory=dict)
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
        judged_by: rules that may judge its drafts besides the default ones, where the loaded drafter decides.
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
    judged_by: Sequence[str] = ()
    needs: str | None = None
    keeps: str | None = None

    @property
    def accelerates(self) -> bool:
        """Whether `accelerator=` takes the name; other records have acceptance rules alone."""
        return bool(self.make or self.head or self.policy)


@dataclass(frozen=True)
class Converter:
    """Conversion of the files of a family's authors to folders, by `mmspec convert`.

    Attributes:
        convert: writes a folder: a function of the checkpoint, the folder, and by name of `dtype` and the
            options of the command.
        recognises: whether a file or folder is the family's; None for all that no other family recognises.
        refuses: options of the command that it does not take, and why.
    """

    convert: str
    recognises: str | None = None
    refuses: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Family:
    """Record of a model family that is not driven as any causal language model is.

    Attributes:
        name: of the family.
        target: its `Target`.
        model_types: of its configs; None for the name alone.
        own_code: whether its published folders name code of their authors, which is not run: the family has
            its own.
        complete: makes whole a folder that was saved without a part that others have as well: a function of
            the folder, which returns that of the whole, or the same where nothing is missing.
        converter: reads files of its authors.
        official: the same of files whose layout is akin to LlamaGen's: a function of the path, the
            tensors, the image size and the attention heads, the last two None where unknown. It returns the
            model or image tokenizer, or None for files of another family.
        recognises: says whether a config of these types is the family's; None where all are.
        draws: "tokens" or "vectors" for a family that draws images; "" for one of text.
        answers: whether a model that draws also answers, which is then what it is loaded for.
        compact: whether its target counts codes and syntax alone, so that heads of any vocabulary fit.
        vq: class of its image tokenizer, where that is a model of its own.
        load: loads what the pipeline of a family that draws is made of: a function of a `ModelSource`, which
            returns the pipeline's arguments by name (`model`, `processor`, and parts such as `vq` or `vae`).
            None for a model that holds its image tokenizer.
        prompts: makes requests of images that the target is to draw itself in training, where
            `image_requests` does not: a function of the target, the processor, texts, height and width in
            pixels, None for the usual. It returns the requests, their `Sampler` and the tokens of each.
        generate: what `generate` of transformers takes to draw the image of a request at temperature 0: a
            function of the target, the request and the guidance scale. It returns the module whose forwards
            are counted, the length of the prompt that it reads, and the keywords.
        accelerator: what decodes where none is named; None for the pipeline's own default.
        presets: methods that run as another one where they have no drafter, by name.
    """

    name: str
    target: str
    model_types: Sequence[str] | None = None
    recognises: Callable[[PreTrainedConfig], bool] | None = None
    own_code: bool = False
    complete: str | None = None
    converter: Converter | None = None
    official: str | None = None
    draws: str = ""
    answers: bool = True
    compact: bool = False
    vq: str | None = None
    load: str | None = None
    prompts: str | None = None
    generate: str | None = None
    accelerator: str | None = None
    presets: Mapping[str, str] = field(default_factory=dict)

    @property
    def types(self) -> Sequence[str]:
        """Model types of its configs."""
        return (self.name,) if self.model_types is None else self.model_types

    def has(self, config: PreTrainedConfig) -> bool:
        """Whether a config is of this family."""
        return config.model_type in self.types and (self.recognises is None or self.recognises(config))


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


def converter_of(checkpoint: object) -> Converter:
    """The converter of an official file or folder."""
    found = [family.converter for family in families().values() if family.converter is not None]
    found.sort(key=lambda each: each.recognises is None)
    return next(each for each in found if each.recognises is None or load(each.recognises)(checkpoint))


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
