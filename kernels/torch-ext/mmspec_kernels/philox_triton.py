"""Triton kernels of `philox.py` and their launchers: the same numbers, bit for bit."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 128  # counters for each program


@triton.jit
def encrypt(key_ptr, c0, c1, c2, c3):
    """Philox words of counters under the key at `key_ptr`, which is two int64."""
    seed = (tl.load(key_ptr + 1).to(tl.uint64) << 32) | (tl.load(key_ptr).to(tl.uint64) & 0xFFFFFFFF)
    # int64 counters would silently select the 64-bit variant of the generator, hence the casts.
    return tl.philox(seed, c0.to(tl.uint32), c1.to(tl.uint32), c2.to(tl.uint32), c3.to(tl.uint32))


@triton.jit
def _words_kernel(counters_ptr, key_ptr, out_ptr, size, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    index = tl.minimum(index, size - 1)  # the last program writes its last row several times over
    counter = counters_ptr + 4 * index
    w0, w1, w2, w3 = encrypt(
        key_ptr + 2 * index,
        tl.load(counter),
        tl.load(counter + 1),
        tl.load(counter + 2),
        tl.load(counter + 3),
    )
    out = out_ptr + 4 * index
    tl.store(out, w0.to(tl.int64))
    tl.store(out + 1, w1.to(tl.int64))
    tl.store(out + 2, w2.to(tl.int64))
    tl.store(out + 3, w3.to(tl.int64))


@triton.jit
def _store_uniform(out_ptr, element, count, word):
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    value = (word >> 8).to(dtype) * 5.9604644775390625e-08 + 2.98023223876953125e-08  # 2^-24, 2^-25
    if dtype == tl.float32:
        value = tl.minimum(value, 0.999999940395355224609375)  # 1 - 2^-24: the sum may have rounded to 1
    tl.store(out_ptr + element, value, mask=element < count)


@triton.jit
def _uniform_kernel(key_ptr, position_ptr, stream_ptr, step_ptr, out_ptr, nodes, count, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)  # of [B * n]
    block = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    w0, w1, w2, w3 = encrypt(
        key_ptr + row // nodes * 2,
        block,
        tl.load(position_ptr + row),
        tl.load(stream_ptr + row),
        tl.load(step_ptr + row),
    )
    out_ptr += row * count
    _store_uniform(out_ptr, 4 * block, count, w0)
    _store_uniform(out_ptr, 4 * block + 1, count, w1)
    _store_uniform(out_ptr, 4 * block + 2, count, w2)
    _store_uniform(out_ptr, 4 * block + 3, count, w3)


def philox4x32_triton(counters: Tensor, key: Tensor) -> Tensor:
    """Launch `philox4x32`: counters [..., 4], key [..., 2], both int64 -> [..., 4] int64."""
    leading = torch.broadcast_shapes(counters.shape[:-1], key.shape[:-1])
    counters = counters.expand(*leading, 4).contiguous()
    out = torch.empty_like(counters)
    size = leading.numel()
    if size:
        grid = (triton.cdiv(size, BLOCK),)
        _words_kernel[grid](counters, key.expand(*leading, 2).contiguous(), out, size, BLOCK=BLOCK)
    return out


def philox_uniform_triton(
    key: Tensor, position: Tensor, stream: Tensor, step: Tensor, count: int, dtype: torch.dtype
) -> Tensor:
    """Launch `uniforms`: key [B, 2], position [B, n], stream and step of shapes that broadcast to it."""
    out = torch.empty(*position.shape, count, dtype=dtype, device=position.device)
    if out.numel():
        grid = (position.numel(), triton.cdiv(count, 4 * BLOCK))
        key, position, stream, step = (
            each.contiguous()
            for each in (key, position, stream.expand_as(position), step.expand_as(position))
        )
        _uniform_kernel[grid](key, position, stream, step, out, position.shape[1], count, BLOCK=BLOCK)
    return out
