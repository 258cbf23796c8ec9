"""Choice of the implementation of an op, and its registration with torch."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, Protocol, TypeVar

import torch

NAMESPACE = __package__.replace(".", "_")
"""Namespace of the ops in `torch.ops`: a copy from the Hub beside the installed one has its own."""

P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)


class Op(Protocol[P, R_co]):
    """An op as callers see it: a function, with the registered `op` that torch.compile keeps whole."""

    op: Any

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...


@functools.cache
def has_triton() -> bool:
    """Return whether Triton is installed; it has no wheels outside Linux."""
    return importlib.util.find_spec("triton") is not None


def is_interpreted() -> bool:
    """Return whether Triton kernels run in Triton's interpreter, which takes tensors on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def use_triton(device: torch.device) -> bool:
    """Return whether ops on this device run as Triton kernels.

    On CUDA they do, unless `MMSPEC_BACKEND=torch`. On the CPU they do where `MMSPEC_BACKEND=triton` and
    `TRITON_INTERPRET=1`: slowly, for tests.

    Raises:
        ValueError: `MMSPEC_BACKEND` names no backend.
    """
    wanted = os.environ.get("MMSPEC_BACKEND")
    if wanted is None:  # first, for every call of every op asks
        return device.type == "cuda" and has_triton()
    if wanted not in ("torch", "triton"):
        raise ValueError(f"MMSPEC_BACKEND: got {wanted!r}; allowed: torch, triton")
    if wanted == "torch" or not has_triton():
        return False
    return device.type == "cuda" or (device.type == "cpu" and is_interpreted())


def explain_backend(device: torch.device) -> tuple[str, str]:
    """Return what ops on this device run as, "triton" or "torch", and why.

    Raises:
        ValueError: as `use_triton`.
    """
    wanted = os.environ.get("MMSPEC_BACKEND")
    if use_triton(device):
        return "triton", "a CUDA device" if device.type == "cuda" else "MMSPEC_BACKEND=triton, interpreted"
    if wanted == "torch":
        return "torch", "MMSPEC_BACKEND=torch"
    if not has_triton():
        return "torch", "Triton is not installed"
    return "torch", f"Triton has no kernels for {device.type}"


def operator(
    fake: Callable[P, object], mutates: Sequence[str] = ()
) -> Callable[[Callable[P, R_co]], Op[P, R_co]]:
    """Register a function as an op of torch, for torch.compile and export.

    Eager calls go to the function itself: the dispatcher costs 40 us a call, more than most of these kernels.

    Args:
        fake: returns empty tensors of the shapes and dtypes that the function returns, or None.
        mutates: names of the arguments that the function writes to.
    """

    def register(function: Callable[P, R_co]) -> Op[P, R_co]:
        op = torch.library.custom_op(f"{NAMESPACE}::{function.__name__}", function, mutates_args=mutates)
        op.register_fake(fake)

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R_co:
            if torch.compiler.is_compiling():
                result: R_co = op(*args, **kwargs)
                return result
            return function(*args, **kwargs)

        call.op = op  # type: ignore[attr-defined]
        return call  # type: ignore[return-value]

    return register
