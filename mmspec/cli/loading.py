"""Accelerators, models and drafters as the command line names them.

An accelerator is written as `copy`, or as `draft_model:num_draft_tokens=3`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from mmspec.cli.console import note
from mmspec.errors import InputError, MMSpecError
from mmspec.open_types import Keywords
from mmspec.registry import did_you_mean, parse_options

if TYPE_CHECKING:
    import torch

    from mmspec.cli.options import LoadOptions
    from mmspec.pipelines import MMSpecPipeline
    from mmspec.plugins import Method
    from mmspec.targets import AnyTarget
    from mmspec.targets.model_target import ModelTarget

__all__ = [
    "AcceleratorChoice",
    "absolute_options",
    "absolute_source",
    "announce",
    "check_device",
    "choice_of",
    "choose",
    "compared_choices",
    "default_choices",
    "device_of",
    "drafted_choices",
    "fits",
    "load_accelerated",
    "load_pipeline",
    "own_drafters",
    "parse_choice",
    "parse_choices",
    "read_dtype",
    "reference_model",
    "with_drafters",
]

Pipeline = TypeVar("Pipeline", bound="MMSpecPipeline")

REFERENCE, REFERENCE_IMAGE = "scenes-llava", "scenes-llamagen"
IMAGE_SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".webp")
DTYPES = ("auto", "float32", "bfloat16", "float16")


def announce(model: str | None, reference: str = REFERENCE) -> str:
    """Return the named model, or else the reference model, after a note that it will be loaded.

    Commands call this first, because importing torch and transformers takes seconds.

    Raises:
        InputError: the name is a prompt or an image.
    """
    if model is not None and (" " in model.strip() or Path(model).suffix.lower() in IMAGE_SUFFIXES):
        rule = "must be a checkpoint folder or hub id, and stands before prompts and images"
        raise InputError("MODEL", model, rule)
    note(f"loading {model or reference}")
    return model or reference_model(reference)


def reference_model(name: str = REFERENCE) -> str:
    """Return the folder of a reference model.

    Raises:
        InputError: it is not installed.
    """
    from mmspec.assets import find_assets, reference_models, shown_path

    if (folder := reference_models().get(name)) is not None:
        return shown_path(folder)
    assets = find_assets()
    where = "there is no assets/ folder beside the package" if assets is None else f"it is not in {assets}"
    rule = (
        f"must be a checkpoint folder or hub id, because the reference model {name} is missing: {where}. It "
    )
    raise InputError("model", None, f"{rule}comes with a clone of the repository (pip install -e .)")


def own_drafters(model: str) -> dict[str, AcceleratorChoice]:
    """The drafters in `drafters.json` of a model's folder whose folders exist, by label; {} for a hub id."""
    from mmspec import assets

    return {
        label: AcceleratorChoice(label, one.accelerator, {"drafter": assets.shown_path(one.folder)})
        for label, one in assets.own_drafters(model).entries.items()
        if one.folder is not None
    }


def with_drafters(
    choices: Sequence[AcceleratorChoice], model: str, drafter: str | None
) -> list[AcceleratorChoice]:
    """Add the option `drafter` to the choices whose accelerators need one.

    Raises:
        InputError: a drafter is named, and none of the accelerators has one.
    """
    if drafter is not None and not any(one.method is not None and one.method.needs for one in choices):
        names = ", ".join(one.label for one in choices)
        raise InputError("--drafter", drafter, f"cannot be used with {names}, which has no drafter")
    return [with_drafter(choice, model, drafter) for choice in choices]


def with_drafter(choice: AcceleratorChoice, model: str, drafter: str | None) -> AcceleratorChoice:
    """Add the option `drafter` to the choice if its accelerator needs one.

    The choice's own option comes first, then `--drafter`, then `drafters.json` in the model's folder.
    """
    from mmspec.assets import shown_path
    from mmspec.pipelines.drafter import find_drafter

    if (method := choice.method) is None:
        return choice
    named = choice.options.get("drafter") or (None if method.needs is None else drafter)
    found = find_drafter(choice.name, named, folder=model, checkpoint=model, argument="--drafter")
    if found is None:
        return choice
    source = named if named is not None else shown_path(str(found))
    return replace(choice, options={**choice.options, "drafter": source})


def absolute_source(source: str) -> str:
    """The absolute path of a folder; a hub id unchanged."""
    return str(Path(source).absolute()) if Path(source).is_dir() else source


def absolute_options(choice: AcceleratorChoice) -> Keywords:
    """The options of a choice, with the absolute path of a drafter's folder."""
    return {
        key: absolute_source(str(value)) if key == "drafter" else value
        for key, value in choice.options.items()
    }


def compared_choices(accelerators: str, model: str, drafter: str | None) -> list[AcceleratorChoice]:
    """Parse accelerators separated by commas and add their drafters; plain decoding is always included."""
    choices = with_drafters(parse_choices(accelerators), model, drafter)
    has_plain = any(choice.label == "none" for choice in choices)
    return choices if has_plain else [parse_choice("none"), *choices]


def default_choices(
    model: str, drafter: str | None, target: ModelTarget[Any], default: str
) -> list[AcceleratorChoice]:
    """The accelerators that a command compares if none are named.

    They are those that the target lists (otherwise plain decoding, `copy` and the pipeline's `default`), with
    the named drafter or those of the model's folder.
    """
    without = ",".join(target.compared or ("none", "copy", default))
    fitting = (one for one in parse_choices(without) if one.method is None or fits(one.method, target))
    return list({one.label: one for one in (*fitting, *drafted_choices(model, drafter))}.values())


def drafted_choices(model: str, drafter: str | None) -> list[AcceleratorChoice]:
    """The accelerator of the named drafter, or those of the drafters of the model's folder."""
    return list(own_drafters(model).values()) if drafter is None else [choice_of(drafter, model)]


def fits(method: Method, target: AnyTarget) -> bool:
    """Whether a method without a drafter can decode with this model."""
    from mmspec.accelerators import make

    try:
        make(method).fit(target)
    except MMSpecError:
        return False
    return True


def choice_of(drafter: str, model: str) -> AcceleratorChoice:
    """The accelerator of a named drafter, a head or a draft model."""
    from mmspec.heads.checkpoint import head_of

    return with_drafter(parse_choice(head_of(drafter) or "draft_model"), model, drafter)


def choose(
    accelerator: str | None, model: str, drafter: str | None, otherwise: str = "copy"
) -> AcceleratorChoice:
    """The named accelerator, or that of the drafter, the default of the model's folder, or `otherwise`."""
    from mmspec import assets

    if accelerator is not None:
        (choice,) = with_drafters([parse_choice(accelerator)], model, drafter)
        return choice
    if drafter is not None:
        return choice_of(drafter, model)
    own, default = own_drafters(model), assets.own_drafters(model).default
    return own[default] if default in own else parse_choice(otherwise)


def read_dtype(name: str) -> torch.dtype | None:
    """The torch dtype of a name; None for "auto"."""
    if name not in DTYPES:
        raise InputError("--dtype", name, did_you_mean(name, DTYPES))
    import torch

    found: torch.dtype | None = getattr(torch, name, None)
    return found


def device_of(how: LoadOptions) -> str | None:
    """The device that a checkpoint is loaded to: a GPU if there is one, unless `--device` names another."""
    import torch

    return "cuda" if how.device is None and torch.cuda.is_available() else how.device


def load_pipeline(kind: type[Pipeline], model: str, how: LoadOptions) -> Pipeline:
    """Load a checkpoint with plain decoding; the caller sets accelerators afterwards."""
    dtype = read_dtype(how.dtype)
    import torch
    from transformers.utils import logging

    from mmspec.pipelines import ImageGenerationPipeline

    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    logging.set_verbosity_error()
    device = device_of(how)
    if device is not None and device != "auto":
        check_device(device)
    if dtype is None and device in (None, "cpu") and _is_reference(model):
        dtype = torch.float32  # stored in half precision, which is slow on most CPUs
    pipe = kind.from_pretrained(model, accelerator="none", dtype=dtype, device_map=device, mode=how.mode)
    if not how.pack:
        pipe.disable_packing()
    if isinstance(pipe, ImageGenerationPipeline):
        pipe.set_progress_bar_config(disable=True)  # commands show their own
    return cast(Pipeline, pipe)


def load_accelerated(kind: type[Pipeline], model: str, accelerator: str | None, how: LoadOptions) -> Pipeline:
    """Load a checkpoint with the named accelerator, or the default of its folder or its kind."""
    choose(accelerator, model, how.drafter)  # raises for a missing drafter, before the model is loaded
    pipe = load_pipeline(kind, model, how)
    choice = choose(accelerator, model, how.drafter, pipe.default_accelerator)
    pipe.set_accelerator(choice.name, **choice.options)
    return pipe


def _is_reference(model: str) -> bool:
    from mmspec.assets import reference_models

    return Path(model).resolve() in {folder.resolve() for folder in reference_models().values()}


def check_device(device: str) -> None:
    """Raise InputError for a device that does not work on this machine."""
    import torch

    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0]
        rule = f"must be a device that works on this machine; see mmspec doctor ({reason})"
        raise InputError("--device", device, rule) from error


@dataclass(frozen=True)
class AcceleratorChoice:
    """An accelerator with its options.

    Attributes:
        label: the text that the user wrote.
        name: name of a method in `METHODS`, or "auto".
        options: options of its drafter and acceptance rule.
    """

    label: str
    name: str
    options: Keywords = field(default_factory=dict)

    @property
    def method(self) -> Method | None:
        """The method of that name; None for "auto", the result of `mmspec tune`."""
        from mmspec.accelerators.tuned import AUTO
        from mmspec.plugins import METHODS

        return None if self.name == AUTO else METHODS[self.name]


def parse_choice(text: str) -> AcceleratorChoice:
    """Parse `name[:option=value]...`, see `parse_options`."""
    choice = AcceleratorChoice(text.strip(), *parse_options("accelerator", text))
    _ = choice.method  # raises for an unknown name, before a model is loaded
    return choice


def parse_choices(text: str) -> list[AcceleratorChoice]:
    """Parse a list separated by commas; repeated entries count once."""
    written = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not written:
        raise InputError("--accelerator", text, "must be names separated by commas, such as none,copy")
    return [parse_choice(part) for part in written]
