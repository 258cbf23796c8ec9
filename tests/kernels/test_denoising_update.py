"""The step of denoising chains around their network: kernel, torch form and float64 give one result."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from mmspec.kernels import denoising_update
from mmspec.kernels.denoising_update import denoising_transition


class Case(NamedTuple):
    """M, d, and what the network and the schedule are."""

    rows: int
    size: int
    branches: int
    learned: bool
    clipped: bool
    dtype: torch.dtype = torch.float32


CASES = [
    Case(1, 1, 1, False, False),
    Case(3, 8, 2, False, False),
    Case(2, 64, 2, True, True),
    Case(17, 16, 2, True, False),
    Case(5, 33, 1, True, True),
    Case(0, 4, 2, True, False),
    Case(6, 16, 2, True, True, torch.bfloat16),
]


def arguments_of(case: Case, device: torch.device) -> tuple[Tensor, ...]:
    """Arguments of `denoising_update`: rows of longer ones, among NaN."""
    generator = torch.Generator().manual_seed(case.rows + case.size)

    def numbers(*size: int) -> Tensor:
        held = torch.full((torch.Size(size).numel() + 512,), float("nan"))
        held[256:-256] = torch.randn(torch.Size(size).numel(), generator=generator)
        return held.to(device)[256:-256].view(size)

    rows, size, branches, learned, clipped, dtype = case
    x, noise = numbers(rows, 3, size)[:, 1], numbers(rows, 2, size)[:, 1]
    output = numbers(branches, rows, 2 * size if learned else size).to(dtype)
    scale, temperature = numbers(rows, 1) * 2, numbers(rows, 1).abs()
    scale[::3] = 1.0
    coefficients = numbers(7 if clipped else 4)
    coefficients[6:] = 0.4
    return x, output, noise, coefficients, scale, temperature


def exact(
    x: Tensor, output: Tensor, noise: Tensor, coefficients: Tensor, scale: Tensor, temperature: Tensor
) -> Tensor:
    """The formulas in float64."""
    x, output, noise, scale, temperature = (each.double() for each in (x, output, noise, scale, temperature))
    a, b, middle, half, *clipped = coefficients.double().tolist()
    size = x.shape[1]
    predicted = output[0, :, :size]
    if len(output) == 2:
        predicted = output[1, :, :size] + scale * (predicted - output[1, :, :size])
    if clipped:
        predicted = (clipped[0] * x + clipped[1] * predicted).clamp(-clipped[2], clipped[2])
    std = torch.exp(middle + half * output[0, :, size:]) if output.shape[2] > size else middle
    return a * x + b * predicted + temperature * std * noise


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel_and_torch_form_compute_the_formulas(case, both, device):
    given = arguments_of(case, device)
    kernel, twin = both(denoising_update, *given)
    assert kernel.shape == twin.shape == given[0].shape and kernel.dtype == twin.dtype == torch.float32
    torch.testing.assert_close(kernel, twin, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(twin.double(), exact(*given), rtol=1e-5, atol=1e-6)


def test_an_unknown_state_stays_unknown_and_others_do_not_notice(both, device):
    given = arguments_of(CASES[2], device)
    given[0][1] = float("nan")
    for result in both(denoising_update, *given):
        assert result[1].isnan().all() and result[0].isfinite().all()


def test_a_transition_has_gradients_and_so_has_an_update(monkeypatch, device):
    monkeypatch.setenv("MMSPEC_BACKEND", "triton")
    x, output, noise, *rest = arguments_of(CASES[3], device)
    output.requires_grad_()
    mean, std = denoising_transition(x, output, *rest)
    (expected,) = torch.autograd.grad((mean + std * noise).sum(), output)
    (own,) = torch.autograd.grad(denoising_update(x, output, noise, *rest).sum(), output)
    assert torch.equal(own, expected) and own.any()
