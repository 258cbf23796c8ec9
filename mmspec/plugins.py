"""Methods, acceptance rules and model families by name: those of this package and those of entry points.

A method is a folder of `mmspec.methods` whose `__init__` has `METHODS`, records that name their parts as
"module:attribute". Parts are imported on first use. Another package registers a record, or a list of records,
under the entry point group `mmspec.methods`.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Generic, TypeVar

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
    """Import the attribute at "module:attribute"."""
    module, attribute = location.split(":")
    return getattr(importlib.import_module(module), attribute)


@dataclass(frozen=True)
class Variant:
    """Another way to train a head.

    Attributes:
        settings: default settings of its config and of its loss.
        loss: location of another loss; None for the head's own.
    """

    settings: Mapping[str, object] = field(default_factory=dict)
    loss: str | None = None


@dataclass(frozen=True)
class Head:
    """Parts of a trained drafting head.

    Attributes:
        model: the head, a `DraftingHead` with the `config_class` of its config.
        loss: the `DrafterLoss` that trains it; None if it cannot be trained here.
        published: reads a folder in the layout of the method's authors, for a target; None without one.
        of_images: whether it drafts image tokens alone.
        in_checkpoint: whether `published` reads the target's own checkpoint, so that no other is needed.
        image_settings: default settings of its config for targets that draw images.
        exports: writers of layouts of other engines, by the names that `mmspec export --to` takes: functions
            of the head, the layout, the name of its target, the target's config and a folder, which return
            further fields of the command's output.
        shipped: reference models of such heads by name: a description, and the command that makes each.
        variants: other ways to train it, by the names that `mmspec train drafter --method` takes.
    """

    model: str
    loss: str | None = None
    published: str | None = None
    of_images: bool = False
    in_checkpoint: bool = False
    image_settings: Mapping[str, object] = field(default_factory=dict)
    exports: Mapping[str, str] = field(default_factory=dict)
    shipped: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    variants: Mapping[str, Variant] = field(default_factory=dict)

    def load(self, part: str) -> Any:
        """Import a part that is not None: "model", "loss" or "published"."""
        return load(getattr(self, part))


@dataclass(frozen=True)
class Method:
    """Record of a method.

    Attributes:
        name: name for `accelerator=`; for a record that has rules alone, the folder's name.
        summary: one-line description, for tables.
        source: the paper's arXiv id; "-" without one.
        drafter: its `Drafter`, a class whose typed parameters are options; it takes the loaded `model` first
            if it needs one. The class attributes tell what is known before it is made. None for a record that
            has rules alone.
        rule: name of the rule that verifies its drafts; None for the default rule of their kind.
        settings: arguments of that rule in place of its defaults.
        make: a typed function with the parameters of `drafter` that returns the `Accelerator`, for a method
            that chooses among drafters or pairs drafter and rule itself; None for the others.
        head: parts of its trained head, if it has one.
        beside: a function that adds candidates beside those of a head's drafter, given the drafter and
            options of its own, which all heads with `Drafter.shares_tree` then have.
        rules: acceptance rules that the folder adds, by the names that `acceptance=` takes.
        former_rules: names that these rules had before, with those of today, for the error.
        trials: settings that `mmspec bench --accelerator all` compares on images, in command line syntax; of
            several values (`window=16|32`) it uses the best.
        tuned: settings that `mmspec tune` tries; () for the sizes of a head's tree.
        judged_by: further rules that may verify its drafts, if the loaded drafter allows them.
        needs: description of the required `drafter=`; None if none is required.
        keeps: description of the reference distribution of "exact", for methods without a loaded drafter.
    """

    name: str
    summary: str = ""
    source: str = "-"
    drafter: str | None = None
    rule: str | None = None
    settings: Mapping[str, object] = field(default_factory=dict)
    make: str | None = None
    head: Head | None = None
    beside: str | None = None
    rules: Mapping[str, str] = field(default_factory=dict)
    former_rules: Mapping[str, str] = field(default_factory=dict)
    trials: Sequence[str] = ()
    tuned: Sequence[str] = ()
    judged_by: Sequence[str] = ()
    needs: str | None = None
    keeps: str | None = None

    @property
    def drafter_class(self) -> Any:
        """The class of its drafters; of the usual one for a method that chooses among several."""
        return load(str(self.drafter))


@dataclass(frozen=True)
class Converter:
    """Conversion of official files of a family to folders, by `mmspec convert`.

    Attributes:
        convert: writes a folder: a function of the checkpoint and the folder, with `dtype` and the options
            of the command as keywords.
        recognises: whether a file or folder is the family's; None for all that no other family recognises.
        refuses: options of the command that it does not accept, each with the reason.
    """

    convert: str
    recognises: str | None = None
    refuses: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Family:
    """Record of a model family that needs more than the target of a causal language model.

    Attributes:
        name: name of the family.
        target: its `Target`.
        model_types: model types of its configs; None for the name alone.
        own_code: whether its published folders name remote code, which is not run because the family
            replaces it.
        complete: completes a folder that was saved without a part that a package provides: a function of the
            folder, which returns the completed folder, or the same folder if no part is missing.
        converter: converter of official files.
        official: reader of official files in a layout like LlamaGen's: a function of the path, the tensors,
            the image size and the attention heads, the last two None if unknown. It returns the model or
            image tokenizer, or None for files of another family.
        recognises: whether a config of these types is the family's; None if all are.
        draws: "tokens" or "vectors" for a family that draws images; "" for a text family.
        answers: whether a model that draws also generates text, which is then its default task.
        compact: whether its target's vocabulary has codes and syntax alone, so that heads of any vocabulary
            fit.
        vq: class of its image tokenizer, if that is a separate model.
        load: loads the arguments of an image pipeline: a function of a `ModelSource`, which returns them by
            name (`model`, `processor`, and parts such as `vq` or `vae`). None for a model that contains its
            image tokenizer.
        reader: reads prompts when heads are trained on images: a function of the model's folder and the
            target, which returns a `PromptReader` (`mmspec.families.llamagen.parts`) or an object with the
            same methods. None if heads of the family are not trained on images.
        prompts: makes requests of images that the target draws itself in training, if `image_requests` does
            not: a function of the target, the processor, texts, height and width in pixels, which are None
            for the default. It returns the requests, their `Sampler` and the tokens of each.
        generate: makes the arguments with which `generate` of transformers draws the image of a request at
            temperature 0: a function of the target, the request and the guidance scale. It returns the
            module whose forward passes are counted, the length of the prompt, and the keywords.
        accelerator: name of the default accelerator; None for the pipeline's default.
        presets: methods that run as another method if they have no drafter, by name.
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
    reader: str | None = None
    prompts: str | None = None
    generate: str | None = None
    accelerator: str | None = None
    presets: Mapping[str, str] = field(default_factory=dict)

    @property
    def types(self) -> Sequence[str]:
        """Model types of its configs."""
        return (self.name,) if self.model_types is None else self.model_types

    def has(self, config: PreTrainedConfig) -> bool:
        """Whether a config belongs to this family."""
        return config.model_type in self.types and (self.recognises is None or self.recognises(config))


class Plugins(Mapping[str, T], Generic[T]):
    """Plug-ins by name.

    Args:
        kind: kind of plug-in, for error messages.
        find: returns all plug-ins.
        former: returns the names that plug-ins had before, with those of today.
    """

    def __init__(
        self, kind: str, find: Callable[[], Mapping[str, T]], former: Callable[[], Mapping[str, str]] = dict
    ) -> None:
        self.kind, self._find, self._former = kind, find, former

    def __iter__(self) -> Iterator[str]:
        return iter(self._find())

    def __len__(self) -> int:
        return len(self._find())

    def __contains__(self, name: object) -> bool:
        return name in self._find()

    def __getitem__(self, name: str) -> T:
        """Return the plug-in of that name.

        Raises:
            InputError: no such name; the message has the one of today, or the nearest one and all others.
        """
        found = self._find()
        if not isinstance(name, str) or name not in found:
            if isinstance(name, str) and (now := self._former().get(name)) is not None:
                raise InputError(self.kind, name, f"must be {now!r}, the new name of this one")
            raise InputError(self.kind, name, did_you_mean(name, found))
        return found[name]


@cache
def records() -> tuple[Method, ...]:
    """All records of methods: plain decoding, then this package's by name, then those of entry points."""
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
    """The records of all accelerators, by name."""
    return unique("accelerator", [(each.name, each) for each in records() if each.drafter is not None])


@cache
def heads() -> dict[str, Head]:
    """The trained heads of the methods that have one."""
    return {name: each.head for name, each in methods().items() if each.head is not None}


@cache
def rules() -> dict[str, str]:
    """Locations of the acceptance rules: those for any tree first, then those of the methods."""
    shared = importlib.import_module("mmspec.trees").RULES | importlib.import_module("mmspec.vectors").RULES
    return unique(
        "acceptance", [*shared.items(), *(rule for each in records() for rule in each.rules.items())]
    )


def former_rules() -> dict[str, str]:
    """Names that acceptance rules had before, with those of today."""
    return {old: new for each in records() for old, new in each.former_rules.items()}


@cache
def families() -> dict[str, Family]:
    """The records of all model families, also of entry points; importing them registers their configs."""
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
    """Register the configs and models of all families with the auto classes of transformers."""
    families()


def family_of(config: PreTrainedConfig) -> Family | None:
    """The family of a model's config, or else of its language model's config; None without a record."""
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
            rule = "must be the name of one plug-in alone; uninstall one of the two packages"
            raise InputError(kind, name, rule)
        table[name] = plugin
    return table


class Located(Plugins[Any]):
    """Plug-ins by name, from a table of their locations; each is imported on first use."""

    def __getitem__(self, name: str) -> Any:
        return load(super().__getitem__(name))


METHODS: Plugins[Method] = Plugins("accelerator", methods)
FAMILIES: Plugins[Family] = Plugins("family", families)
HEADS: Plugins[Head] = Plugins("head", heads)
RULES = Located("acceptance", rules, former_rules)


def keywords(function: Callable[..., object]) -> list[str]:
    """Names of the arguments of a function or constructor that can be passed by name, in their order."""
    parameters = inspect.signature(function).parameters
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [name for name, item in parameters.items() if item.kind in by_name]
