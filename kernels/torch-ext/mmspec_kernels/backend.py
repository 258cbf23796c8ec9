"""Backend selection (Triton or torch), kernel launching, and registration of ops with torch."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor

NAMESPACE = __package__.replace(".", "_")
"""Namespace of the ops in `torch.ops`: a copy from the Hub does not collide with an installed package."""

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class Op(Protocol[P, R_co]):
    """A callable op, with the registered custom op as `op`, which torch.compile does not trace into."""

    op: Any

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...


HAS_TRITON = importlib.util.find_spec("triton") is not None  # Triton has wheels for Linux only
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether kernels run in Triton's interpreter, on CPU tensors. Triton checks it at kernel definition."""


class _NoTriton:
    """Replaces Triton where its kernels cannot run: kernels remain Python functions that are never called."""

    @staticmethod
    def jit(function: object = None, **options: object) -> Any:
        return (lambda function: function) if function is None else function

    @staticmethod
    def constexpr(value: object) -> Any:
        return value


triton: Any = _NoTriton
tl: Any = _NoTriton
libdevice: Any = _NoTriton  # the device's own mathematical functions, which torch calls too
if HAS_TRITON and (INTERPRETED or torch.version.cuda or torch.version.hip):
    import triton as installed
    from triton import language
    from triton.language.extra import libdevice as functions

    triton, tl, libdevice = installed, language, functions


def use_triton(device: torch.device) -> bool:
    """Return whether ops on this device run as Triton kernels.

    On CUDA they do, unless `MMSPEC_BACKEND=torch` is set. On the CPU they do if `MMSPEC_BACKEND=triton` and
    `TRITON_INTERPRET=1` are set, which is slow and meant for tests.

    Raises:
        ValueError: the value of `MMSPEC_BACKEND` is unknown.
    """
    wanted = os.environ.get("MMSPEC_BACKEND")
    if wanted is None:  # the common case first: every call of every op runs this
        return device.type == "cuda" and HAS_TRITON
    if wanted not in ("torch", "triton"):
        raise ValueError(f"MMSPEC_BACKEND must be torch or triton; got {wanted!r}")
    if wanted == "torch" or not HAS_TRITON:
        return False
    return device.type == "cuda" or (device.type == "cpu" and INTERPRETED)


def with_row_stride(values: Tensor) -> tuple[Tensor, int]:
    """Return values [B, n, V] and the stride of their rows; copies only if a row is not contiguous."""
    whole = values if values.stride()[1:] == (values.shape[2], 1) else values.contiguous()
    return whole, whole.stride(0)


def use_triton_without_gradient(x: Tensor, *others: Tensor) -> bool:
    """`use_triton` for an op whose kernel has no gradient: False if an argument requires one."""
    # the cheapest check first: reading the environment costs as much as a small op
    if (x.is_cpu and not INTERPRETED) or not use_triton(x.device):
        return False
    return not (torch.is_grad_enabled() and any(each.requires_grad for each in (x, *others)))


def rows_together(x: Tensor) -> Tensor:
    """Return [..., V] with adjacent elements in each row; rows may be slices of longer ones."""
    return x if x.stride(-1) == 1 else x.contiguous()


def planes(rows: Tensor) -> Tensor:
    """View [..., V] as [batch, positions, V] with adjacent elements; copies if two strides do not suffice.

    A slice of positions (`p[:, :-1]`) stays a view, while a reshape to [batch * positions, V] would copy it.
    """
    return rows_together(rows.reshape(-1, *rows.shape[-2:]) if rows.dim() > 1 else rows[None, None])


def launcher(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function to launch kernels on the device of its first argument, a tensor or a list of them.

    Triton launches on the current device and stream, and the layers of a model may be on several devices.
    """

    @functools.wraps(function)
    def launch(*args: P.args, **kwargs: P.kwargs) -> R:
        first: Any = args[0]
        place: Tensor = first[0] if isinstance(first, list) else first
        if place.is_cuda and place.get_device() != torch.cuda.current_device():
            with torch.cuda.device(place.device):
                return function(*args, **kwargs)
        return function(*args, **kwargs)

    return launch


def explain_backend(device: torch.device) -> tuple[str, str]:
    """Return the backend of ops on this device, "triton" or "torch", and the reason for it.

    Raises:
        ValueError: see `use_triton`.
    """
    wanted = os.environ.get("MMSPEC_BACKEND")
    if use_triton(device):
        return "triton", "a CUDA device" if device.type == "cuda" else "MMSPEC_BACKEND=triton, interpreted"
    if wanted == "torch":
        return "torch", "MMSPEC_BACKEND=torch"
    if not HAS_TRITON:
        return "torch", "Triton is not installed"
    return "torch", f"Triton has no kernels for {device.type}"


def operator(
    fake: Callable[P, object], mutates: Sequence[str] = ()
) -> Callable[[Callable[P, R_co]], Op[P, R_co]]:
    """Register a function as an op of torch, for torch.compile and export.

    Eager calls bypass the dispatcher, which costs 40 us per call, more than most of these kernels.

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
