"""Triton kernel of `denoising_update.py` and its launcher: all that follows the network in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 128


@triton.jit(do_not_specialize=["rows"])
def _update_kernel(
    x_ptr,  # [rows, SIZE], as `noise_ptr`: rows may be parts of longer ones
    output_ptr,  # [branches, rows, SIZE or 2 SIZE]
    noise_ptr,
    coefficients_ptr,  # [4 or 7]
    scale_ptr,  # [rows]
    temperature_ptr,  # [rows]
    out_ptr,  # [rows, SIZE]
    rows,
    x_stride,
    noise_stride,
    SIZE: tl.constexpr,
    GUIDED: tl.constexpr,
    LEARNED: tl.constexpr,
    CLIPPED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    WIDTH: tl.constexpr = 2 * SIZE if LEARNED else SIZE  # of a row of `output`
    element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row, column = element // SIZE, element % SIZE
    exists = row < rows
    x = tl.load(x_ptr + row * x_stride + column, mask=exists, other=0.0)
    noise = tl.load(noise_ptr + row * noise_stride + column, mask=exists, other=0.0)
    output_ptr += row * WIDTH + column
    predicted = tl.load(output_ptr, mask=exists, other=0.0).to(tl.float32)
    if GUIDED:
        scale = tl.load(scale_ptr + row, mask=exists, other=0.0)
        other = tl.load(output_ptr + rows * WIDTH, mask=exists, other=0.0).to(tl.float32)
        apart = predicted - other
        # as torch.lerp, exact at both ends
        predicted = tl.where(tl.abs(scale) < 0.5, other + scale * apart, predicted - apart * (1 - scale))
    if CLIPPED:
        token = tl.load(coefficients_ptr + 4) * x + tl.load(coefficients_ptr + 5) * predicted
        limit = tl.load(coefficients_ptr + 6)
        # a NaN stays one, as in torch.clamp
        predicted = tl.where(token > limit, limit, tl.where(token < -limit, -limit, token))
    mean = tl.load(coefficients_ptr) * x + tl.load(coefficients_ptr + 1) * predicted
    std = tl.load(coefficients_ptr + 2)
    if LEARNED:
        value = tl.load(output_ptr + SIZE, mask=exists, other=0.0).to(tl.float32)
        std = tl.exp(std + tl.load(coefficients_ptr + 3) * value)
    std *= tl.load(temperature_ptr + row, mask=exists, other=0.0)
    tl.store(out_ptr + element, mean + std * noise, mask=exists)


def denoising_update_triton(
    x: Tensor, output: Tensor, noise: Tensor, coefficients: Tensor, scale: Tensor, temperature: Tensor
) -> Tensor:
    """Launch `denoising_update`; arguments as there."""
    rows, size = x.shape
    out = torch.empty(rows, size, dtype=torch.float32, device=x.device)
    x, noise = (each if each.stride(1) == 1 else each.contiguous() for each in (x, noise))
    if out.numel():
        _update_kernel[(triton.cdiv(rows * size, BLOCK),)](
            x,
            output.contiguous(),
            noise,
            coefficients.contiguous(),
            scale.contiguous(),
            temperature.contiguous(),
            out,
            rows,
            x.stride(0),
            noise.stride(0),
            SIZE=size,
            GUIDED=len(output) == 2,
            LEARNED=output.shape[-1] > size,
            CLIPPED=len(coefficients) > 4,
            BLOCK=BLOCK,
        )
    return out
