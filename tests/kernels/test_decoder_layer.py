"""Kernels of decoder layers: the torch forms equal transformers' modules, and the kernels the torch forms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from mmspec.kernels import add_rms_norm, rms_norm, rotate_into_cache, silu_mul

Both = Callable[..., tuple[Any, Any]]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: The interpreter truncates to bfloat16 at every rounding, where a GPU rounds to the nearest.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2**-5, torch.float16: 2**-9}
SIZES = (1, 24, 128, 1000)
#: rows, nodes, heads, key heads, d; whether rows share their angles
CACHED = [(1, 1, 4, 4, 8, True), (3, 5, 6, 2, 24, False), (2, 7, 4, 1, 64, True)]


def numbers(*size: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def norm(size: int, dtype: torch.dtype) -> LlamaRMSNorm:
    module = LlamaRMSNorm(size, eps=1e-5).to(dtype).requires_grad_(False)
    module.weight.copy_(numbers(size, dtype=dtype, seed=1))
    return module


def agree(kernel: Tensor, twin: Tensor) -> None:
    tolerance = TOLERANCES[twin.dtype]
    torch.testing.assert_close(kernel, twin, rtol=tolerance, atol=tolerance / 2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_norms(size: int, dtype: torch.dtype, both: Both, device: torch.device) -> None:
    x, residual = numbers(3, 2, size, dtype=dtype), 3 * numbers(3, 2, size, dtype=dtype, seed=2)
    module = norm(size, dtype)
    expected = residual + x
    total, normed = add_rms_norm(x, residual, module.weight, 1e-5)
    assert torch.equal(total, expected) and torch.equal(normed, module(expected))
    assert torch.equal(rms_norm(x, module.weight, 1e-5), module(x))
    given = [each.to(device) for each in (x, residual, module.weight)]
    (sums, kernel), (twin_sums, twin) = both(add_rms_norm, *given, 1e-5)
    agree(sums, twin_sums)
    agree(kernel, twin)
    if device.type == "cuda" or dtype != torch.bfloat16:
        assert torch.equal(sums, twin_sums)
    agree(*both(rms_norm, given[0], given[2], 1e-5))


def test_a_weight_of_another_dtype_widens_the_norm() -> None:
    x, module = numbers(2, 16, dtype=torch.bfloat16), norm(16, torch.float32)
    assert torch.equal(rms_norm(x, module.weight, 1e-5), module(x))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CACHED, ids=str)
def test_rotation_into_the_cache(
    case: tuple[int, int, int, int, int, bool], dtype: torch.dtype, both: Both, device: torch.device
) -> None:
    rows, nodes, heads, key_heads, size, shared = case
    query = numbers(rows, nodes, heads, size, dtype=dtype)
    key, value = numbers(2, rows, nodes, key_heads, size, dtype=dtype, seed=1)
    angles = numbers(1 if shared else rows, nodes, size // 2, dtype=torch.float32, seed=2).repeat(1, 1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    buffers = numbers(2, rows, nodes + 4, key_heads, size, dtype=dtype, seed=3)
    slots = torch.stack([torch.randperm(nodes + 4)[:nodes] + row * (nodes + 4) for row in range(rows)])
    given = [each.to(device) for each in (query, key, value, cos, sin, slots.flatten())]

    def written() -> tuple[Tensor, Tensor]:
        keys, values = buffers.to(device, copy=True)
        rotated = rotate_into_cache(*given, keys, values)
        return rotated, torch.stack([keys, values])

    (kernel, kernel_buffers), (twin, twin_buffers) = both(written)
    agree(kernel, twin)
    agree(kernel_buffers, twin_buffers)
    assert torch.equal(kernel_buffers[1], twin_buffers[1])

    rotated, rotated_keys = apply_rotary_pos_emb(query, key, cos, sin, unsqueeze_dim=2)
    expected = buffers.clone().flatten(1, 2)
    expected[:, slots.flatten()] = torch.stack([rotated_keys, value]).flatten(1, 2)
    if device.type == "cpu":
        assert torch.equal(twin, rotated) and torch.equal(twin_buffers.flatten(1, 2), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_gated_product(size: int, dtype: torch.dtype, both: Both, device: torch.device) -> None:
    gate, up = 4 * numbers(3, size, dtype=dtype), numbers(3, size, dtype=dtype, seed=1)
    assert torch.equal(silu_mul(gate, up), ACT2FN["silu"](gate) * up)
    agree(*both(silu_mul, gate.to(device), up.to(device)))


def test_gradients_flow_where_they_are_wanted(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    monkeypatch.setenv("MMSPEC_BACKEND", "triton")
    x = numbers(2, 16, dtype=torch.float32).to(device).requires_grad_()
    weight = torch.ones(16, device=device)
    total, normed = add_rms_norm(x, x, weight, 1e-5)
    (total.sum() + normed.square().sum() + silu_mul(x, x).sum()).backward()
    assert x.grad is not None and x.grad.abs().sum() > 0
