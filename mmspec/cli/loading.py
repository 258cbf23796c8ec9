"""From what the command line says to a loaded pipeline, and to the examples to decode."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from mmspec.cli.choice import AcceleratorChoice, parse_choice, parse_choices
from mmspec.cli.console import note
from mmspec.errors import InputError
from mmspec.registry import did_you_mean

if TYPE_CHECKING:
    from mmspec.evaluation.examples import Example
    from mmspec.pipelines import ImagePipeline, VisionLanguagePipeline

__all__ = [
    "default_choice",
    "default_choices",
    "given_examples",
    "load_any_pipeline",
    "load_image_pipeline",
    "load_pipeline",
    "own_drafters",
    "reference_model",
    "takes_images",
    "with_drafter",
]

REFERENCE, REFERENCE_IMAGE = "scenes-llava", "scenes-llamagen"
DTYPES = ("auto", "float32", "bfloat16", "float16")


def reference_model(name: str = REFERENCE) -> str:
    """The folder of a reference model.

    Raises:
        InputError: it is not there; the message says what to do.
    """
    from mmspec.evaluation.machine import find_assets, reference_models

    folder = reference_models().get(name)
    if folder is None:
        assets = find_assets()
        where = (
            "there is no assets/ folder beside the package" if assets is None else f"it is not in {assets}"
        )
        raise InputError(
            "model",
            None,
            f"name a checkpoint folder or hub id: the reference model {name} comes with a clone of the "
            f"repository (pip install -e .), and {where}",
        )
    return _shown(folder)


def own_drafters(model: str) -> dict[str, AcceleratorChoice]:
    """The drafters that a model's folder names and that are in folders here, by label; {} for a hub id.

    Raises:
        CheckpointError: its `drafters.json` cannot be used.
    """
    from mmspec.pipelines import heads

    return {
        label: AcceleratorChoice(label, one.accelerator, {"drafter": _shown(one.folder)})
        for label, one in heads.own_drafters(model).entries.items()
        if one.folder is not None
    }


def with_drafter(choice: AcceleratorChoice, model: str, drafter: str | None) -> AcceleratorChoice:
    """The choice with what drafts for it among its options, if it needs that.

    Args:
        choice: its own option `drafter` comes first.
        model: folder or hub id of the target; the drafter that its folder names comes last.
        drafter: what the command line names for all accelerators.

    Raises:
        InputError: it needs a drafter and there is none, or has no use for the one it names.
        CheckpointError: the drafter that the model's folder names for it is not there.
    """
    from mmspec.accelerators import find_preset
    from mmspec.pipelines import heads

    preset = find_preset(choice.name)
    named = choice.options.get("drafter")
    if not preset.needs_draft_model:
        if named is not None:
            raise InputError("drafter", named, f"nothing: accelerator {choice.name!r} has no draft model")
        return choice
    found = named or drafter
    if found is None and (own := heads.own_drafters(model).source_for(choice.name)) is not None:
        found = _shown(own)
    if found is None:
        raise InputError(
            "--drafter", None, f"the folder or hub id of {preset.needs}, which {choice.name!r} needs"
        )
    return replace(choice, options={**choice.options, "drafter": found})


def default_choices(model: str, drafter: str | None) -> list[AcceleratorChoice]:
    """What to compare where nothing is said: plain decoding, copying, and all that is here to draft.

    Args:
        model: folder or hub id of the target.
        drafter: what the command line names; None for what the model's folder names.
    """
    choices = parse_choices("none,copy")
    if drafter is not None:
        return [*choices, with_drafter(parse_choice(drafts_as(drafter)), model, drafter)]
    return [*choices, *own_drafters(model).values()]


def default_choice(model: str, drafter: str | None) -> AcceleratorChoice:
    """What to use where nothing is said: the drafter that is named, or the model's default, or copying."""
    from mmspec.pipelines import heads

    if drafter is not None:
        return default_choices(model, drafter)[-1]
    own, default = own_drafters(model), heads.own_drafters(model).default
    return own[default] if default in own else parse_choice("copy")


def drafts_as(drafter: str) -> str:
    """The accelerator that a folder or hub id is for: that of its head, else draft_model."""
    from mmspec.models.checkpoint import check_source, load_config
    from mmspec.pipelines.heads import HEADS

    config: Any = load_config(check_source(drafter, "drafter"), argument="drafter")
    kinds: dict[str, Any] = dict(HEADS)
    return next(
        (name for name, head in kinds.items() if isinstance(config, head.config_class)), "draft_model"
    )


def load_pipeline(model: str, *, dtype: str = "auto", device: str | None = None) -> VisionLanguagePipeline:
    """Load a checkpoint to answer with, and plain decoding; accelerators are set up on it afterwards."""
    return cast("VisionLanguagePipeline", _load("VisionLanguagePipeline", model, dtype, device))


def load_image_pipeline(model: str, *, dtype: str = "auto", device: str | None = None) -> ImagePipeline:
    """Load a checkpoint to draw with, and plain decoding."""
    pipe = cast("ImagePipeline", _load("ImagePipeline", model, dtype, device))
    pipe.set_progress_bar_config(disable=True)  # the commands have their own
    return pipe


def load_any_pipeline(
    model: str, *, dtype: str = "auto", device: str | None = None
) -> ImagePipeline | VisionLanguagePipeline:
    """Load a checkpoint for what it does, with plain decoding; one that answers and draws is to answer."""
    return cast("ImagePipeline | VisionLanguagePipeline", _load("MMSpecPipeline", model, dtype, device))


def _load(kind: str, model: str, dtype: str, device: str | None) -> Any:
    """A pipeline of that class, or for "MMSpecPipeline" of the class for the checkpoint."""
    if dtype not in DTYPES:
        raise InputError("--dtype", dtype, did_you_mean(dtype, DTYPES))
    note(f"loading {model}")
    import torch
    from transformers.utils import logging

    from mmspec import pipelines

    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    logging.set_verbosity_error()
    if device is None and torch.cuda.is_available():
        device = "cuda"
    if device is not None and device != "auto":
        _check_device(device)
    chosen: torch.dtype | str = "auto" if dtype == "auto" else getattr(torch, dtype)
    if dtype == "auto" and device in (None, "cpu") and _is_reference(model):
        chosen = torch.float32  # stored in half precision, in which most CPUs are slow
    cls = getattr(pipelines, kind)
    return cls.from_pretrained(model, accelerator="none", dtype=chosen, device_map=device)


def given_examples(
    prompts: Sequence[str] | None, images: Sequence[str] | None, jsonl: str | None, samples: int
) -> list[Example]:
    """The user's own prompts and images, or so many of their file; [] where there is nothing of theirs.

    Raises:
        InputError: both a file and prompts, or something that cannot be used.
    """
    from mmspec.evaluation.examples import own_examples, read_examples

    if jsonl is not None:
        if prompts or images:
            raise InputError("--jsonl", jsonl, "either a file, or --prompt and --image")
        return read_examples(jsonl, samples)
    return own_examples(prompts or (), images or ()) if prompts or images else []


def takes_images(pipe: VisionLanguagePipeline) -> bool:
    """Whether the model is a vision-language model."""
    return getattr(pipe.processor, "image_processor", None) is not None


def _shown(folder: str | Path) -> str:
    """A path as the user would write it, or a hub id: reports should not tell where a clone lies."""
    here, path = Path.cwd(), Path(folder)
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(folder)


def _is_reference(model: str) -> bool:
    from mmspec.evaluation.machine import reference_models

    return Path(model).resolve() in {folder.resolve() for folder in reference_models().values()}


def _check_device(device: str) -> None:
    import torch

    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError(
            "--device", device, f"a device that works here; see mmspec doctor ({reason})"
        ) from error
