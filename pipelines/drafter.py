"""Lookup of an accelerator's drafter, for pipelines, `enable`, `accelerate` and the command line."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from mmspec.accelerator import Accelerator
from mmspec.accelerators import build_accelerator, option_names
from mmspec.assets import own_drafters
from mmspec.errors import InputError, UnknownArgumentError
from mmspec.heads.checkpoint import check_head, check_no_other, load_head
from mmspec.models.checkpoint import check_source
from mmspec.open_types import Keywords
from mmspec.pipelines.loading import Checkpoint
from mmspec.plugins import HEADS, METHODS, family_of, load
from mmspec.registry import did_you_mean, parse_options
from mmspec.targets import CausalTarget
from mmspec.validation import given_of

__all__ = ["DrafterSource", "FoundMethod", "check_accelerator", "find_drafter", "find_method", "read_written"]

#: Folder or hub id of a draft model or head, or a loaded model.
DrafterSource = str | Path | PreTrainedModel


def read_written(
    accelerator: Any, drafter: DrafterSource | None, options: Mapping[str, object]
) -> tuple[Any, Any, Keywords]:
    """Parse an accelerator with options, such as "copy:num_draft_tokens=8", as the command line does.

    Returns:
        Its name, its drafter and all options. Other accelerators are returned unchanged.

    Raises:
        InputError: the string cannot be parsed, or an option is given twice.
    """
    if not isinstance(accelerator, str) or ":" not in accelerator:
        return accelerator, drafter, dict(options)
    name, written = parse_options("accelerator", accelerator)
    for option, value in {**options, **given_of(drafter=drafter)}.items():
        if option in written:
            raise InputError(option, value, f"is given twice; accelerator {accelerator!r} already sets it")
    drafter = written.pop("drafter", drafter)
    return name, drafter, {**written, **options}


def find_drafter(
    name: str,
    given: DrafterSource | None,
    *,
    folder: str | Path | None = None,
    checkpoint: str | None = None,
    argument: str = "drafter",
) -> DrafterSource | None:
    """Find the drafter of an accelerator: the given one, or one that belongs to the model.

    The latter is the drafter that `drafters.json` in the model's folder names, or, for heads that are part of
    the model's checkpoint, the checkpoint itself.

    Returns:
        The drafter; None if the accelerator needs none.

    Raises:
        InputError: a drafter is given but not needed, or needed but not found.
        CheckpointError: the drafter that `drafters.json` names does not exist.
    """
    needs = METHODS[name].needs
    if needs is None:
        if given is not None:
            shown = type(given).__name__ if isinstance(given, PreTrainedModel) else given
            raise InputError("drafter", shown, f"must be None; accelerator {name!r} uses no draft model")
        return None
    found = given
    if found is None and folder is not None:
        found = own_drafters(folder).source_for(name)
    if found is None and name in HEADS and HEADS[name].in_checkpoint:
        found = checkpoint
    if found is None:
        raise InputError(argument, None, f"must be the folder or hub id of {needs}, which {name!r} needs")
    return found


def check_accelerator(
    found: Checkpoint, name: str, drafter: DrafterSource | None, *, preset: str | None = None
) -> DrafterSource | None:
    """Check an accelerator as far as possible before the weights of the target are loaded.

    Returns:
        The drafter; a head is returned loaded, since it is small.

    Raises:
        InputError: a value is out of range, drafter and acceptance rule cannot be combined, or the drafter is
            missing or not needed.
        CheckpointError: the head cannot be loaded.
    """
    drafter = find_drafter(name, drafter, folder=found.folder, checkpoint=found.source)
    if drafter is None:
        build_accelerator(preset or name, **found.options)
        return None
    if name in HEADS:
        head = load_head(name, drafter, found.model_config)
        build_accelerator(name, model=head, **found.options)
        return head
    if not isinstance(drafter, PreTrainedModel):
        check_no_other(name, check_source(drafter, "drafter"))
    family = family_of(found.model_config)
    kind = CausalTarget if family is None or family.draws != "vectors" else load(family.target)
    build_accelerator(name, kind, **found.options)
    return drafter


class HeadToLoad:
    """Accelerator whose head is loaded at the first decoding, once for each checkpoint and device.

    Args:
        name: a key of `HEADS`.
        drafter: folder or hub id of the head; None for the model's own checkpoint.
        options: options of the accelerator.

    Raises:
        InputError: an option is unknown, or the drafter is missing.
        CheckpointError: the folder or hub id is invalid.
    """

    def __init__(self, name: str, drafter: str | Path | None, options: Keywords) -> None:
        known = option_names(name, options.get("acceptance"))
        for option in options.keys() - known:
            raise UnknownArgumentError(f"option of accelerator {name!r}", option, did_you_mean(option, known))
        find_drafter(name, drafter, checkpoint="the model's own")
        if drafter is not None:
            check_source(drafter, "drafter")
        self.name, self.drafter, self.options = name, drafter, options
        self._loaded: dict[tuple[object, ...], Accelerator] = {}

    def fit(self, target: Any) -> Accelerator:
        """Return the accelerator fitted to a target.

        Raises:
            InputError: no head was found.
            CheckpointError: the head cannot be loaded.
        """
        key = target.model.name_or_path, target.dtype, target.device
        if key not in self._loaded:
            found: Any = find_drafter(self.name, self.drafter, checkpoint=target.model.name_or_path or None)
            head = load_head(self.name, found, target.config, target.dtype, target.device)
            self._loaded[key] = build_accelerator(self.name, model=head, **self.options)
        return self._loaded[key].fit(target)


#: An accelerator, or one whose head is not loaded yet; `fit` returns the accelerator for a target.
FoundMethod = Accelerator | HeadToLoad


def find_method(
    accelerator: str | Accelerator, drafter: DrafterSource | None, options: Mapping[str, object]
) -> FoundMethod:
    """Return the accelerator of `enable` or `accelerate`, from a name with its drafter and options.

    Raises:
        InputError: a name or an option is unknown, or the draft model is missing.
        CheckpointError: the folder or hub id of a head is invalid.
    """
    name, drafter, options = read_written(accelerator, drafter, options)
    if isinstance(name, Accelerator):
        return name
    is_head = isinstance(name, str) and name in HEADS
    if is_head and not isinstance(drafter, PreTrainedModel):
        return HeadToLoad(name, drafter, options)
    if METHODS[name].needs is not None and not isinstance(drafter, PreTrainedModel):
        raise InputError("drafter", drafter, f"must be a loaded draft model, which {name!r} needs")
    found: Any = find_drafter(name, drafter)
    if found is not None:
        options["model"] = check_head(name, found) if is_head else found
    return build_accelerator(name, **options)
