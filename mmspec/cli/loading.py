"""Reads the accelerators that the command line names, and loads its models and drafters.

An accelerator is written as `copy`, or as `draft_model:num_draft_tokens=3`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from mmspec.cli.console import note
from mmspec.errors import InputError, MMSpecError
from mmspec.open_types import Keywords
from mmspec.registry import did_you_mean, parse_options

if TYPE_CHECKING:
    import torch

    from mmspec.cli.options import ModelOptions
    from mmspec.pipelines import MMSpecPipeline
    from mmspec.plugins import Method
    from mmspec.targets import AnyTarget
    from mmspec.targets.model_target import ModelTarget

__all__ = [
    "AcceleratorChoice",
    "absolute_options",
    "absolute_source",
    "check_device",
    "choose",
    "compared_choices",
    "default_choices",
    "fits",
    "load_pipeline",
    "own_drafters",
    "parse_choice",
    "parse_choices",
    "read_dtype",
    "reference_model",
    "with_drafter",
]

Pipeline = TypeVar("Pipeline", bound="MMSpecPipeline")

REFERENCE, REFERENCE_IMAGE = "scenes-llava", "scenes-llamagen"
DTYPES = ("auto", "float32", "bfloat16", "float16")


def reference_model(name: str = REFERENCE) -> str:
    """The folder of a reference model."""
    from mmspec.assets import find_assets, reference_models

    if (folder := reference_models().get(name)) is not None:
        return _shown(folder)
    assets = find_assets()
    where = "there is no assets/ folder beside the package" if assets is None else f"it is not in {assets}"
    allowed = f"name a checkpoint folder or hub id: the reference model {name} comes with a clone of the "
    raise InputError("model", None, f"{allowed}repository (pip install -e .), and {where}")


def own_drafters(model: str) -> dict[str, AcceleratorChoice]:
    """The drafters that a model's folder names and that are in folders here, by label; {} for a hub id."""
    from mmspec import assets

    return {
        label: AcceleratorChoice(label, one.accelerator, {"drafter": _shown(one.folder)})
        for label, one in assets.own_drafters(model).entries.items()
        if one.folder is not None
    }


def with_drafter(choice: AcceleratorChoice, model: str, drafter: str | None) -> AcceleratorChoice:
    """The choice with what drafts for it among its options, if it needs that.

    Its own option `drafter` comes first, then what the command line names for all accelerators, and last what
    the model's folder names.
    """
    from mmspec.pipelines.drafter import find_drafter

    if (method := choice.method) is None:
        return choice
    named = choice.options.get("drafter") or (None if method.needs is None else drafter)
    found = find_drafter(choice.name, named, folder=model, checkpoint=model, argument="--drafter")
    if found is None:
        return choice
    source = named if named is not None else _shown(str(found))
    return replace(choice, options={**choice.options, "drafter": source})


def absolute_source(source: str) -> str:
    """A folder by its whole path, so that it is found from anywhere; a hub id as it is."""
    return str(Path(source).absolute()) if Path(source).is_dir() else source


def absolute_options(choice: AcceleratorChoice) -> Keywords:
    """The options of a choice, a drafter's folder by its whole path."""
    return {
        key: absolute_source(str(value)) if key == "drafter" else value
        for key, value in choice.options.items()
    }


def compared_choices(accelerators: str, model: str, drafter: str | None) -> list[AcceleratorChoice]:
    """Read accelerators to compare, separated by commas, with their drafters; plain decoding comes along."""
    choices = [with_drafter(choice, model, drafter) for choice in parse_choices(accelerators)]
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
    drafted = own_drafters(model).values() if drafter is None else [choice_of(drafter, model)]
    fitting = (one for one in parse_choices(without) if one.method is None or fits(one.method, target))
    return [*fitting, *drafted]


def fits(method: Method, target: AnyTarget) -> bool:
    """Whether a method without a drafter decodes with this model."""
    from mmspec.accelerators import make

    try:
        make(method).fit(target)
    except MMSpecError:
        return False
    return True


def choice_of(drafter: str, model: str) -> AcceleratorChoice:
    """The accelerator of a named drafter: the head that it is, or a draft model."""
    from mmspec.heads.checkpoint import head_of

    return with_drafter(parse_choice(head_of(drafter) or "draft_model"), model, drafter)


def choose(
    accelerator: str | None, model: str, drafter: str | None, otherwise: str = "copy"
) -> AcceleratorChoice:
    """The named accelerator with its drafter; else the named drafter's, the model's default, or another."""
    from mmspec import assets

    if accelerator is not None:
        return with_drafter(parse_choice(accelerator), model, drafter)
    if drafter is not None:
        return choice_of(drafter, model)
    own, default = own_drafters(model), assets.own_drafters(model).default
    return own[default] if default in own else parse_choice(otherwise)


def read_dtype(name: str) -> torch.dtype | None:
    """The dtype of that name; None for "auto"."""
    if name not in DTYPES:
        raise InputError("--dtype", name, did_you_mean(name, DTYPES))
    import torch

    found: torch.dtype | None = getattr(torch, name, None)
    return found


def load_pipeline(kind: type[Pipeline], model: str, how: ModelOptions) -> Pipeline:
    """Load a checkpoint with plain decoding; accelerators are set up on it afterwards."""
    dtype = read_dtype(how.dtype)
    note(f"loading {model}")
    import torch
    from transformers.utils import logging

    from mmspec.pipelines import ImageGenerationPipeline

    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    logging.set_verbosity_error()
    device = how.device
    if device is None and torch.cuda.is_available():
        device = "cuda"
    if device is not None and device != "auto":
        check_device(device)
    if dtype is None and device in (None, "cpu") and _is_reference(model):
        dtype = torch.float32  # stored in half precision, in which most CPUs are slow
    pipe = kind.from_pretrained(model, accelerator="none", dtype=dtype, device_map=device, mode=how.mode)
    if not how.pack:
        pipe.disable_packing()
    if isinstance(pipe, ImageGenerationPipeline):
        pipe.set_progress_bar_config(disable=True)  # the commands have their own
    return cast(Pipeline, pipe)


def _shown(folder: str | Path) -> str:
    """A path as the user would write it, or a hub id: reports should not tell where a clone lies."""
    here, path = Path.cwd(), Path(folder)
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(folder)


def _is_reference(model: str) -> bool:
    from mmspec.assets import reference_models

    return Path(model).resolve() in {folder.resolve() for folder in reference_models().values()}


def check_device(device: str) -> None:
    """Raise InputError for a device that does not work here."""
    import torch

    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError(
            "--device", device, f"a device that works here; see mmspec doctor ({reason})"
        ) from error


@dataclass(frozen=True)
class AcceleratorChoice:
    """An accelerator with its options.

    Attributes:
        label: as the user wrote it.
        name: of the method, known to exist; or "auto".
        options: of its drafter and rule.
    """

    label: str
    name: str
    options: Keywords = field(default_factory=dict)

    @property
    def method(self) -> Method | None:
        """The method of that name; None for "auto", which is one that `mmspec tune` has found."""
        from mmspec.accelerators.tuned import AUTO
        from mmspec.plugins import METHODS

        return None if self.name == AUTO else METHODS[self.name]


def parse_choice(text: str) -> AcceleratorChoice:
    """Read `name[:option=value]...`, as of `parse_options`."""
    choice = AcceleratorChoice(text.strip(), *parse_options("accelerator", text))
    _ = choice.method  # a typo should not cost a load
    return choice


def parse_choices(text: str) -> list[AcceleratorChoice]:
    """Read a list separated by commas; repeated entries count once."""
    written = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not written:
        raise InputError("accelerators", text, "names separated by commas, such as none,copy")
    return [parse_choice(part) for part in written]
