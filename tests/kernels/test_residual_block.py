"""The two ops of a residual block with adaptive LayerNorm: kernel, torch form and float64 give one result."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from mmspec.kernels import gated_linear, modulated_linear
from mmspec.kernels.residual_block import MAX_ROWS

EPS = 1e-6
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


class Shape(NamedTuple):
    """Leading shapes of the result and of x, K and N, and the weights' dtype."""

    leading: tuple[int, ...]
    x_leading: tuple[int, ...]
    width: int
    size: int
    dtype: torch.dtype = torch.float32


SHAPES = [
    Shape((1,), (1,), 16, 5),
    Shape((3,), (3,), 80, 32),
    Shape((2, 5), (1, 5), 112, 112),  # guided: both branches have the states of one
    Shape((2, 17), (2, 17), 130, 33),
    Shape((3, 2, 4), (3, 1, 4), 48, 64),  # all steps at once
    Shape((4, 4), (4, 1), 64, 40),
    Shape((0, 4), (0, 4), 16, 16),
    Shape((2, 9), (1, 9), 64, 64, torch.float16),
    Shape((2, 20), (2, 20), 64, 64, torch.bfloat16),
]


class Arguments(NamedTuple):
    x: Tensor
    residual: Tensor
    scale: Tensor
    shift: Tensor
    gate: Tensor
    weight: Tensor
    bias: Tensor


def arguments_of(shape: Shape, device: torch.device, guard: float = float("nan")) -> Arguments:
    """Arguments of both ops, each part of a larger tensor that is `guard` elsewhere."""
    generator = torch.Generator().manual_seed(sum(shape.leading) + shape.width)

    def numbers(*size: int, dtype: torch.dtype = shape.dtype, offset: float = 0.0) -> Tensor:
        count = torch.Size(size).numel()
        held = torch.full((count + 2048,), guard, dtype=dtype)
        held[1024 : 1024 + count] = torch.randn(count, generator=generator).to(dtype) + offset
        return held.to(device)[1024 : 1024 + count].view(size)

    leading, x_leading, width, size, dtype = shape
    # far from 0, where a variance by the mean of squares would be lost
    x = numbers(*x_leading, width, dtype=torch.float32, offset=30.0)
    residual = numbers(*x_leading, size, dtype=torch.float32)
    scale, shift = numbers(*leading, 2 * width).chunk(2, -1)
    gate = numbers(*leading, 2 * size)[..., size:]
    weight, bias = numbers(size, width).div_(width**0.5), numbers(size)
    return Arguments(x, residual, scale, shift, gate, weight, bias)


def block(given: Arguments, activate: bool = True) -> tuple[Tensor, Tensor]:
    """Both ops: what the first gives, and x + gate * of the same."""
    hidden = modulated_linear(given.x, given.scale, given.shift, given.weight, given.bias, EPS, activate)
    rows = (torch.addcmul(given.shift, given.scale, given.x)).to(given.weight.dtype)
    return hidden, gated_linear(given.residual, rows, given.gate, given.weight, given.bias)


def exact(given: Arguments, activate: bool = True) -> tuple[Tensor, Tensor]:
    """As `block`, in float64."""
    rows = torch.addcmul(given.shift, given.scale, given.x).to(given.weight.dtype).double()
    x, residual, scale, shift, gate, weight, bias = (each.double() for each in given)
    centered = x - x.mean(-1, keepdim=True)
    normed = centered / (centered.square().mean(-1, keepdim=True) + EPS).sqrt()
    hidden = (normed * scale + shift) @ weight.T + bias
    if activate:
        hidden = hidden * torch.sigmoid(hidden)
    return hidden, residual + gate * (rows @ weight.T + bias)


def error(one: Tensor, other: Tensor) -> float:
    """Relative error; a NaN is infinitely wrong."""
    if not one.numel():
        return 0.0
    found = float((one.double() - other.double()).norm() / other.double().norm())
    return found if found == found else float("inf")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernels_and_torch_forms_compute_their_formulas(shape, both, device):
    given = arguments_of(shape, device)
    for activate in (True, False):
        kernel, twin = both(block, given, activate)
        for one, other, truth in zip(kernel, twin, exact(given, activate), strict=True):
            assert (one.shape, one.dtype) == (other.shape, other.dtype) and other.shape == truth.shape
            for left, right in ((one, other), (one, truth), (other, truth)):
                assert error(left, right) < TOLERANCE[shape.dtype]
        hidden, residual = twin
        assert hidden.dtype == shape.dtype and residual.dtype == torch.float32


def test_many_rows_float64_and_gradients_take_the_torch_form(monkeypatch, device):
    monkeypatch.setenv("MMSPEC_BACKEND", "triton")
    many = arguments_of(Shape((MAX_ROWS + 1,), (MAX_ROWS + 1,), 16, 16), device)
    few = arguments_of(Shape((2,), (2,), 16, 16), device)
    trained = few._replace(weight=few.weight.requires_grad_())
    doubles = Arguments(*(each.detach().double() for each in few))

    def forbidden(*_: Any) -> Any:
        raise AssertionError("launched")

    module = pytest.importorskip("mmspec.kernels.residual_block")
    monkeypatch.setattr(module, "modulated_linear_triton", forbidden)
    monkeypatch.setattr(module, "gated_linear_triton", forbidden)
    for given in (many, doubles):
        assert error(block(given)[0], exact(given)[0]) < 1e-5
    (block(trained)[0].sum() + block(trained)[1].sum()).backward()
    assert trained.weight.grad.any()
    with torch.no_grad(), pytest.raises(AssertionError, match="launched"):
        block(trained)
