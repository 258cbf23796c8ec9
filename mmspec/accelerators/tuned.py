"""Files with the fastest accelerator that `mmspec tune` found for a model, used by `accelerator="auto"`."""

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
SAMPLED = 256  # numbers of each weight in the fingerprint


@dataclass(frozen=True)
class Tuned:
    """The fastest accelerator that was found for a model on a device.

    Attributes:
        accelerator: its name.
        options: of the accelerator, with the folder of its drafter.
        batch_size: of the prompts that it was measured on.
        tv: largest total variation per token that was allowed.
        speedup: over plain decoding.
        speedup_interval: 95 % interval of the speed-up; None if there were too few prompts.
        evidence: measurements of every candidate, as `mmspec tune --json` prints them.
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
    """Return a hash of a model's weights, number format and kind of device; the folder does not matter.

    It covers the first numbers of every weight, so that large models take no time.
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
    """Return the file of a model's fastest accelerator, in the folder $MMSPEC_CACHE or ~/.cache/mmspec."""
    folder = Path(os.environ.get(FOLDER) or "~/.cache/mmspec").expanduser() / "tuned"
    return folder / f"{fingerprint(model)}-batch{batch_size}-tv{tv:g}.json"


def save_tuned(model: nn.Module, found: Tuned) -> Path:
    """Save the fastest accelerator of a model, and return the file.

    Raises:
        InputError: the folder cannot be written.
    """
    path = tuned_file(model, found.batch_size, found.tv)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as temporary:
            temporary.write_text(json.dumps(asdict(found), indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        rule = f"must be a folder that can be written ({error.strerror})"
        raise InputError(FOLDER, str(path.parent), rule) from error
    return path


def check_tuned_for(drafter: object = None, batch_size: int = 1, tv: float = 0.0, **others: object) -> None:
    """Check the options beside `accelerator="auto"`; arguments: see `find_tuned`.

    Raises:
        InputError: a drafter is named, or a value is out of range.
        UnknownArgumentError: an option other than `batch_size` and `tv`.
    """
    if drafter is not None:
        raise InputError("drafter", drafter, "cannot be combined with accelerator='auto', which has its own")
    for name, value in others.items():
        raise UnknownArgumentError(name, value, "is not an option of 'auto', which takes batch_size and tv")
    if not is_integer(batch_size) or batch_size < 1:
        raise InputError("batch_size", batch_size, "must be an integer of at least 1")
    require_number("tv", tv, 0, 1, "must be a number from 0 to 1")


def find_tuned(model: nn.Module, batch_size: int = 1, tv: float = 0.0) -> Tuned:
    """Return the fastest accelerator of a model, from the file that `mmspec tune` saved.

    Raises:
        InputError: there is none for this model, device, number format, batch size and TV, or its file is
            damaged.
    """
    path = tuned_file(model, batch_size, tv)
    options = (f" --batch-size {batch_size}" if batch_size != 1 else "") + (f" --tv {tv:g}" if tv else "")
    rule = f"needs a model that was tuned on this device: run `mmspec tune MODEL{options}` first"
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        found = Tuned(**stored)
    except FileNotFoundError:
        raise InputError("accelerator", AUTO, rule) from None
    except (OSError, ValueError, TypeError) as error:
        raise InputError("accelerator", AUTO, f"{rule} ({path} is damaged: {error})") from error
    if not isinstance(found.accelerator, str) or not isinstance(found.options, dict):
        raise InputError("accelerator", AUTO, f"{rule} ({path} is damaged)")
    return found
