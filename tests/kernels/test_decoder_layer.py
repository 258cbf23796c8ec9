"""Kernels of decoder layers: the torch forms equal transformers' modules, and the kernels the torch forms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.activations import ACT2FN
from transformers.models.chameleon.modeling_chameleon import ChameleonLayerNorm
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from mmspec.families.llamagen.modeling import rotate_pairs
from mmspec.kernels import add_rms_norm, gelu_mul, rms_norm, rotate_into_cache, silu_mul
from mmspec.kernels.rotary_cache import NORMS

Both = Callable[..., tuple[Any, Any]]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: The interpreter truncates to bfloat16 at every rounding, where a GPU rounds to the nearest.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2**-5, torch.float16: 2**-9}
SIZES = (1, 24, 128, 1000)
#: rows, nodes, heads, key heads, d; whether rows share their angles
CACHED = [(1, 1, 4, 4, 8, True), (3, 5, 6, 2, 24, False), (2, 7, 4, 1, 64, True)]


def numbers(*size: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def norm(size: int, dtype: torch.dtype, centered: bool = False) -> Any:
    made = GemmaRMSNorm if centered else LlamaRMSNorm
    module = made(size, eps=1e-5).to(dtype).requires_grad_(False)
    module.weight.copy_(numbers(size, dtype=dtype, seed=1))
    return module


def agree(kernel: Tensor, twin: Tensor, roundings: int = 1) -> None:
    tolerance = TOLERANCES[twin.dtype] * roundings
    torch.testing.assert_close(kernel, twin, rtol=tolerance, atol=tolerance / 2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("centered", [False, True])
def test_norms(centered: bool, size: int, dtype: torch.dtype, both: Both, device: torch.device) -> None:
    x, residual = numbers(3, 2, size, dtype=dtype), 3 * numbers(3, 2, size, dtype=dtype, seed=2)
    module = norm(size, dtype, centered)
    expected, how = residual + x, (1e-5, centered)
    total, normed = add_rms_norm(x, residual, module.weight, *how)
    assert torch.equal(total, expected) and torch.equal(normed, module(expected))
    assert torch.equal(rms_norm(x, module.weight, *how), module(x))
    given = [each.to(device) for each in (x, residual, module.weight)]
    (sums, kernel), (twin_sums, twin) = both(add_rms_norm, *given, *how)
    agree(sums, twin_sums)
    agree(kernel, twin)
    if device.type == "cuda" or dtype != torch.bfloat16:
        assert torch.equal(sums, twin_sums)
    agree(*both(rms_norm, given[0], given[2], *how))


def test_a_weight_of_another_dtype_widens_the_norm() -> None:
    x, module = numbers(2, 16, dtype=torch.bfloat16), norm(16, torch.float32)
    assert torch.equal(rms_norm(x, module.weight, 1e-5), module(x))


def rotated_heads(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, weights: list[Tensor], kind: str, pairs: bool
) -> tuple[Tensor, Tensor]:
    """Queries and keys as modules of transformers and of LlamaGen norm and rotate them."""
    made: dict[str, Callable[[int, int], Any]] = {
        "rms": lambda heads, size: Qwen3RMSNorm(size, eps=1e-5),
        "centered": lambda heads, size: GemmaRMSNorm(size, eps=1e-5),
        "layer": lambda heads, size: ChameleonLayerNorm((heads, size)),
    }
    normed = []
    for index, x in enumerate((query, key)):
        if kind != "none":
            module = made[kind](*x.shape[2:]).to(x.dtype).requires_grad_(False)
            module.weight.copy_(weights[index])
            if kind == "layer":
                module.bias.copy_(weights[index + 2])
            x = module(x)
        normed.append(x)
    if pairs:
        return tuple(rotate_pairs(x.transpose(1, 2), cos, sin).transpose(1, 2) for x in normed)
    return apply_rotary_pos_emb(*normed, cos, sin, unsqueeze_dim=2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("case", CACHED, ids=str)
@pytest.mark.every(12)
def test_rotation_into_the_cache(
    case: tuple[int, int, int, int, int, bool],
    pairs: bool,
    kind: str,
    dtype: torch.dtype,
    both: Both,
    device: torch.device,
) -> None:
    rows, nodes, heads, key_heads, size, shared = case
    merged = numbers(rows, nodes, (heads + 2 * key_heads) * size, dtype=dtype)
    split = [heads * size, key_heads * size, key_heads * size]
    angles = numbers(1 if shared else rows, nodes, size // 2, dtype=torch.float32, seed=2)
    angles = angles if pairs else angles.repeat(1, 1, 2)
    cos, sin = (each if pairs else each.to(dtype) for each in (angles.cos(), angles.sin()))
    shapes = [(size,)] * 2 if kind in ("rms", "centered") else [(heads, size), (key_heads, size)] * 2
    weights = [] if kind == "none" else [numbers(*one, dtype=dtype, seed=4 + len(one)) for one in shapes]
    buffers = numbers(2, rows, nodes + 4, key_heads, size, dtype=dtype, seed=3)
    slots = torch.stack([torch.randperm(nodes + 4)[:nodes] + row * (nodes + 4) for row in range(rows)])
    parts = [each.unflatten(2, (-1, size)) for each in merged.to(device).split(split, 2)]
    given = [*parts, *(each.to(device) for each in (cos, sin, slots.flatten()))]

    def written() -> tuple[Tensor, Tensor]:
        keys, values = buffers.to(device, copy=True)
        how = [each.to(device) for each in weights], kind, 1e-5, pairs
        return rotate_into_cache(*given, keys, values, *how), torch.stack([keys, values])

    (kernel, kernel_buffers), (twin, twin_buffers) = both(written)
    roundings = 1 if kind == "none" else 4
    agree(kernel, twin, roundings)
    agree(kernel_buffers, twin_buffers, roundings)
    assert torch.equal(kernel_buffers[1], twin_buffers[1])

    query, key, value = (each.cpu() for each in parts)
    rotated, rotated_keys = rotated_heads(query, key, cos, sin, weights, kind, pairs)
    expected = buffers.clone().flatten(1, 2)
    expected[:, slots.flatten()] = torch.stack([rotated_keys, value]).flatten(1, 2)
    if device.type == "cpu":
        assert torch.equal(twin, rotated) and torch.equal(twin_buffers.flatten(1, 2), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["silu", "gelu_pytorch_tanh"])
def test_gated_products(name: str, size: int, dtype: torch.dtype, both: Both, device: torch.device) -> None:
    product = silu_mul if name == "silu" else gelu_mul
    gate, up = (4 * numbers(3, 2, 2 * size, dtype=dtype)).chunk(2, -1)  # halves of a merged projection
    assert torch.equal(product(gate, up), ACT2FN[name](gate) * up)
    gate, up = (4 * numbers(3, 2, 2 * size, dtype=dtype)).to(device).chunk(2, -1)
    agree(*both(product, gate, up))
    agree(*both(product, gate[0, 0], up[0, 0]))


def test_the_tanh_form_keeps_small_tails(both: Both, device: torch.device) -> None:
    """1 + tanh(u) loses all digits for negative u; the kernel does not compute it."""
    gate = torch.linspace(-9, 9, 400, device=device)
    kernel, _ = both(gelu_mul, gate, torch.ones_like(gate))
    u = 0.7978845608028654 * (gate.double() + 0.044715 * gate.double() ** 3)
    expected = gate.double() / (1 + (-2 * u).exp())
    torch.testing.assert_close(kernel.double(), expected, rtol=1e-5, atol=1e-30)


def test_gradients_flow_where_they_are_wanted(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    monkeypatch.setenv("MMSPEC_BACKEND", "triton")
    x = numbers(2, 16, dtype=torch.float32).to(device).requires_grad_()
    weight = torch.ones(16, device=device)
    total, normed = add_rms_norm(x, x, weight, 1e-5)
    (total.sum() + normed.square().sum() + silu_mul(x, x).sum()).backward()
    assert x.grad is not None and x.grad.abs().sum() > 0
