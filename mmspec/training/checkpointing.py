"""Training states on disk that are whole or absent, never half written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from mmspec.atomic_file import atomic_file
from mmspec.errors import CheckpointError

__all__ = ["load_state", "save_state"]


def save_state(path: Path, state: dict[str, Any]) -> None:
    """Write a state beside its final name and rename it, so that an interruption keeps the previous one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as temporary:
        torch.save(state, temporary)


def load_state(path: Path) -> dict[str, Any]:
    """Read a state of tensors and plain values; nothing in the file is executed."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise CheckpointError(
            "resume", str(path), "no training state is there; start without resume"
        ) from error
    except Exception as error:
        raise CheckpointError("resume", str(path), f"the training state cannot be read ({error})") from error
    if not isinstance(state, dict):
        raise CheckpointError("resume", str(path), "a training state that mmspec wrote")
    return state
