"""Finding the drafter of an accelerator, for pipelines, `enable`, `accelerate` and the command line."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from mmspec.accelerator import Accelerator
from mmspec.accelerators import DraftToCome, build_accelerator, option_names
from mmspec.assets import own_drafters
from mmspec.errors import InputError, UnknownArgumentError
from mmspec.heads.checkpoint import check_head, check_no_other, load_head
from mmspec.models.checkpoint import check_source
from mmspec.open_types import Keywords
from mmspec.pipelines.loading import Checkpoint
from mmspec.plugins import HEADS, METHODS, family_of, load
from mmspec.registry import did_you_mean, parse_options
from mmspec.validation import given_of

__all__ = ["DrafterSource", "FoundMethod", "check_accelerator", "find_drafter", "find_method", "read_written"]

#: Folder or hub id of a draft model or head, or a loaded one.
DrafterSource = str | Path | PreTrainedModel


def read_written(
    accelerator: Any, drafter: DrafterSource | None, options: Mapping[str, object]
) -> tuple[Any, Any, Keywords]:
    """Read an accelerator that is written with options, "copy:num_draft_tokens=8", as the command line does.

    Returns:
        Its name, its drafter and all options; what is no such string comes back as it is.

    Raises:
        InputError: the string cannot be read, or an option is given twice.
    """
    if not isinstance(accelerator, str) or ":" not in accelerator:
        return accelerator, drafter, dict(options)
    name, written = parse_options("accelerator", accelerator)
    for option, value in {**options, **given_of(drafter=drafter)}.items():
        if option in written:
            raise InputError(option, value, f"nothing: it is part of accelerator {accelerator!r} already")
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

    That is what `drafters.json` in its folder names; else, for heads that are part of it, its checkpoint.

    Returns:
        None for an accelerator that has no draft model.

    Raises:
        InputError: something is given that has no use, or nothing was found.
        CheckpointError: what `drafters.json` names is not there.
    """
    needs = METHODS[name].needs
    if needs is None:
        if given is not None:
            shown = type(given) if isinstance(given, PreTrainedModel) else given
            raise InputError("drafter", shown, f"nothing: accelerator {name!r} has no draft model")
        return None
    found = given
    if found is None and folder is not None:
        found = own_drafters(folder).source_for(name)
    if found is None and name in HEADS and HEADS[name].in_checkpoint:
        found = checkpoint
    if found is None:
        raise InputError(argument, None, f"the folder or id of {needs}, which {name!r} needs")
    return found


def check_accelerator(
    found: Checkpoint, name: str, drafter: DrafterSource | None, *, preset: str | None = None
) -> DrafterSource | None:
    """Refuse an accelerator that cannot be right whatever the target's weights are, before they are loaded.

    Returns:
        Its drafter; a head is loaded by now, since it is small and says more than its folder.

    Raises:
        InputError: a value out of range, an unsound pairing, or a drafter that is missing or has no use.
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
    to_come = DraftToCome()
    if family is not None and family.draws == "vectors":
        to_come = DraftToCome(1, load(family.target).any_order)
    build_accelerator(name, model=to_come, **found.options)
    return drafter


class HeadToLoad:
    """An accelerator whose head is loaded when a model is decoded, once for each checkpoint and device.

    Args:
        name: a key of `HEADS`.
        drafter: folder or hub id; None for the model's own checkpoint, where that may hold the head.
        options: of the accelerator.

    Raises:
        InputError: an unknown option, or no drafter.
        CheckpointError: there can be no such folder or hub id.
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
            InputError: there is no head.
            CheckpointError: it cannot be loaded.
        """
        key = target.model.name_or_path, target.dtype, target.device
        if key not in self._loaded:
            found: Any = find_drafter(self.name, self.drafter, checkpoint=target.model.name_or_path or None)
            head = load_head(self.name, found, target.config, target.dtype, target.device)
            self._loaded[key] = build_accelerator(self.name, model=head, **self.options)
        return self._loaded[key].fit(target)


#: What `fit` makes the accelerator of a target of.
FoundMethod = Accelerator | HeadToLoad


def find_method(
    accelerator: str | Accelerator, drafter: DrafterSource | None, options: Mapping[str, object]
) -> FoundMethod:
    """Find the method of `enable` or `accelerate`: an accelerator, or a name with its drafter and options.

    Raises:
        InputError: unknown name or option, or a missing draft model.
        CheckpointError: there can be no such folder or hub id of a head.
    """
    name, drafter, options = read_written(accelerator, drafter, options)
    if isinstance(name, Accelerator):
        return name
    is_head = isinstance(name, str) and name in HEADS
    if is_head and not isinstance(drafter, PreTrainedModel):
        return HeadToLoad(name, drafter, options)
    if METHODS[name].needs is not None and not isinstance(drafter, PreTrainedModel):
        raise InputError("drafter", drafter, f"a loaded draft model, which {name!r} needs")
    found: Any = find_drafter(name, drafter)
    if found is not None:
        options["model"] = check_head(name, found) if is_head else found
    return build_accelerator(name, **options)
