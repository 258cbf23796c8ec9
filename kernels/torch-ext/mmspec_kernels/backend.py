"""Choice of the implementation of an op: the Triton kernel or its twin in torch."""

from __future__ import annotations

import functools
import importlib.util
import os

import torch


@functools.cache
def has_triton() -> bool:
    """Return whether Triton is installed; it has no wheels outside Linux."""
    return importlib.util.find_spec("triton") is not None


def use_triton(device: torch.device) -> bool:
    """Return whether ops on this device run as Triton kernels; `MMSPEC_BACKEND=torch` forces the twins.

    Raises:
        ValueError: `MMSPEC_BACKEND` names no backend.
    """
    wanted = os.environ.get("MMSPEC_BACKEND", "triton")
    if wanted not in ("torch", "triton"):
        raise ValueError(f"MMSPEC_BACKEND: got {wanted!r}; allowed: torch, triton")
    return wanted == "triton" and device.type == "cuda" and has_triton()
