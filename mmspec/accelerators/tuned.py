"""Accelerators that `mmspec tune` found best, kept in files for `accelerator="auto"`."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import nn

from mmspec.atomic_file import atomic_file
from mmspec.errors import InputError, UnknownArgumentError
from mmspec.models.weights import stored_weight
from mmspec.open_types import Json, Keywords
from mmspec.validation import is_integer, require_number

__all__ = ["AUTO", "Tuned", "check_tuned_for", "find_tuned", "fingerprint", "save_tuned", "tuned_file"]

AUTO = "auto"
FOLDER = "MMSPEC_CACHE"
SAMPLED = 256  # numbers of each weight that the fingerprint reads


@dataclass(frozen=True)
class Tuned:
    """The best accelerator that was found for a model on a device.

    Attributes:
        accelerator: its name.
        options: of it, a drafter's folder included.
        batch_size: of the prompts it was tried on.
        tv: the largest total variation per token that was allowed.
        speedup: over plain decoding.
        speedup_interval: its 95 % interval; None where there were too few prompts.
        evidence: of every candidate, as `mmspec tune --json` prints it.
        found_on: device, versions and prompts.
    """

    accelerator: str
    options: Keywords
    batch_size: int
    tv: float
    speedup: float
    speedup_interval: tuple[float, float] | None = None
    evidence: list[Json] = field(default_factory=list)
    found_on: Json = field(default_factory=dict)


def fingerprint(model: nn.Module) -> str:
    """A name for the weights, the number format and the kind of device of a model, whatever its folder is.

    Reads the first numbers of every weight, so that it takes no time for large ones.
    """
    digest = hashlib.sha256()
    device = torch.device("cpu")
    for name, placed in model.state_dict().items():
        device, weight = placed.device, stored_weight(model, name) if placed.is_meta else placed
        start = weight.flatten()[:SAMPLED].detach().float().cpu().contiguous()
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        digest.update(start.numpy().tobytes())
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    digest.update(kind.encode())
    return digest.hexdigest()[:32]


def tuned_file(model: nn.Module, batch_size: int, tv: float) -> Path:
    """The file of a model's best accelerator, in the folder $MMSPEC_CACHE or ~/.cache/mmspec."""
    folder = Path(os.environ.get(FOLDER) or "~/.cache/mmspec").expanduser() / "tuned"
    return folder / f"{fingerprint(model)}-batch{batch_size}-tv{tv:g}.json"


def save_tuned(model: nn.Module, found: Tuned) -> Path:
    """Keep the best accelerator of a model; returns the file.

    Raises:
        InputError: the folder cannot be written.
    """
    path = tuned_file(model, found.batch_size, found.tv)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as temporary:
            temporary.write_text(json.dumps(asdict(found), indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError(
            FOLDER, str(path.parent), f"a folder that can be written ({error.strerror})"
        ) from error
    return path


def check_tuned_for(drafter: object = None, batch_size: int = 1, tv: float = 0.0, **others: object) -> None:
    """Check what is asked for beside `accelerator="auto"`; arguments as of `find_tuned`.

    Raises:
        InputError: a drafter is named, or a value is out of range.
        UnknownArgumentError: an option that does not say what the accelerator was tuned for.
    """
    if drafter is not None:
        raise InputError("drafter", drafter, "nothing: 'auto' has the one it was tuned with")
    for name, value in others.items():
        raise UnknownArgumentError(name, value, "batch_size and tv, which say what it was tuned for")
    if not is_integer(batch_size) or batch_size < 1:
        raise InputError("batch_size", batch_size, "an integer of at least 1")
    require_number("tv", tv, 0, 1, "a number from 0 to 1")


def find_tuned(model: nn.Module, batch_size: int = 1, tv: float = 0.0) -> Tuned:
    """The best accelerator of a model, as `mmspec tune` has saved it.

    Raises:
        InputError: there is none for this model, device, number format, batch size and TV, or its file is
            damaged.
    """
    path = tuned_file(model, batch_size, tv)
    options = (f" --batch-size {batch_size}" if batch_size != 1 else "") + (f" --tv {tv:g}" if tv else "")
    allowed = f"a model that was tuned on this device: run `mmspec tune MODEL{options}` first"
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        found = Tuned(**stored)
    except FileNotFoundError:
        raise InputError("accelerator", AUTO, allowed) from None
    except (OSError, ValueError, TypeError) as error:
        raise InputError("accelerator", AUTO, f"{allowed} ({path} is damaged: {error})") from error
    if not isinstance(found.accelerator, str) or not isinstance(found.options, dict):
        raise InputError("accelerator", AUTO, f"{allowed} ({path} is damaged)")
    return found
