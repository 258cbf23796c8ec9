"""Update of a denoising step after the network: guidance, the distribution of the next state, and its draw.

Every schedule is a table of coefficients: the mean is linear in the state and the prediction, and the log of
the standard deviation is linear in the network's variance output. The kernel computes all in one launch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .backend import launcher, operator, rows_together, tl, triton, use_triton_without_gradient

BLOCK = 128


def denoising_transition(
    x: Tensor,
    output: Tensor,
    coefficients: Tensor,
    scale: Tensor | None = None,
    temperature: Tensor | float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of the next states after x, in plain torch and with gradients.

    Args:
        x: [..., M, d] states.
        output: [..., branches, M, d or 2 d] output of the network: a prediction, and v if it predicts the
            standard deviation too. The second branch, if any, is unconditional.
        coefficients: [..., 4 or 7] coefficients of the step: of state and prediction in the mean; m and h,
            where the standard deviation is exp(m + h v), or m without v. The other three, if any, first
            convert and clip the prediction: coefficients of state and prediction, and the clipping limit.
        scale: [M, 1] guidance scale; predictions are u + scale (c - u). None with one branch.
        temperature: [M, 1] factor of the standard deviation.

    Returns:
        Two of [..., M, d].
    """
    size, columns = x.shape[-1], coefficients.unbind(-1)
    if coefficients.dim() > 1:
        columns = tuple(column[..., None, None] for column in columns)
    of_state, of_prediction, middle, half, *clipped = columns
    conditional = output.select(-3, 0)
    learned = output.shape[-1] > size
    predicted = conditional.narrow(-1, 0, size) if learned else conditional
    if scale is not None and output.shape[-3] == 2:
        # lerp is exact at a scale of 1, where guided rows equal unguided ones
        predicted = torch.lerp(output.select(-3, 1).narrow(-1, 0, size), predicted, scale)
    if clipped:
        beside, of, limit = clipped
        predicted = torch.addcmul(beside * x, of, predicted).clamp(-limit, limit)
    mean = torch.addcmul(of_state * x, of_prediction, predicted)
    if learned:
        return mean, torch.addcmul(middle, half, conditional.narrow(-1, size, size)).exp() * temperature
    return mean, (middle * temperature).expand_as(x)


@operator(fake=lambda x, output, noise, coefficients, scale, temperature: x.new_empty(x.shape))
def denoising_update(
    x: Tensor, output: Tensor, noise: Tensor, coefficients: Tensor, scale: Tensor, temperature: Tensor
) -> Tensor:
    """Draw the next states after x: the mean of `denoising_transition` plus its deviation times noise.

    Args:
        x, noise: [M, d] float32 or float64; the result has their dtype.
        output: [branches, M, d or 2 d].
        coefficients: [4 or 7] in that dtype; see `denoising_transition`.
        scale, temperature: [M, 1] in that dtype.

    Returns:
        [M, d].
    """
    if x.dtype == torch.float32 and use_triton_without_gradient(x, output):
        return denoising_update_triton(x, output, noise, coefficients, scale, temperature)
    mean, std = denoising_transition(x, output.to(x.dtype), coefficients, scale, temperature)
    return mean + std * noise


@launcher
def denoising_update_triton(
    x: Tensor, output: Tensor, noise: Tensor, coefficients: Tensor, scale: Tensor, temperature: Tensor
) -> Tensor:
    """Launch `denoising_update`, with the same arguments."""
    rows, size = x.shape
    out = torch.empty(rows, size, dtype=torch.float32, device=x.device)
    x, noise = rows_together(x), rows_together(noise)
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


@triton.jit(do_not_specialize=["rows"])
def _update_kernel(
    x_ptr,  # [rows, SIZE], like `noise_ptr`; rows may be slices of longer ones
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
        # like torch.lerp, exact at both ends
        predicted = tl.where(tl.abs(scale) < 0.5, other + scale * apart, predicted - apart * (1 - scale))
    if CLIPPED:
        token = tl.load(coefficients_ptr + 4) * x + tl.load(coefficients_ptr + 5) * predicted
        limit = tl.load(coefficients_ptr + 6)
        # NaN stays NaN, as in torch.clamp
        predicted = tl.where(token > limit, limit, tl.where(token < -limit, -limit, token))
    mean = tl.load(coefficients_ptr) * x + tl.load(coefficients_ptr + 1) * predicted
    std = tl.load(coefficients_ptr + 2)
    if LEARNED:
        value = tl.load(output_ptr + SIZE, mask=exists, other=0.0).to(tl.float32)
        std = tl.exp(std + tl.load(coefficients_ptr + 3) * value)
    std *= tl.load(temperature_ptr + row, mask=exists, other=0.0)
    tl.store(out_ptr + element, mean + std * noise, mask=exists)
