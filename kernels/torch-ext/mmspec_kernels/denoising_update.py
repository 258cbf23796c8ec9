"""A step of denoising chains around their network: guidance, the distribution of the next state, its draw.

Every schedule is a table of coefficients: the mean is linear in the state and in the prediction, and the
logarithm of the deviation is linear in what the network says of the variance.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .backend import is_interpreted, operator, use_triton

INTERPRETED = is_interpreted()  # kernels read it once as well; asking again would cost as much as an op


def denoising_transition(
    x: Tensor,
    output: Tensor,
    coefficients: Tensor,
    scale: Tensor | None = None,
    temperature: Tensor | float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of the states that follow x, in plain torch and with gradients.

    Args:
        x: [..., M, d] states.
        output: [..., branches, M, d or 2 d] of the network: a prediction, and v where it predicts the
            deviation too. The second branch, if there is one, is unconditional.
        coefficients: [..., 4 or 7] of the step: those of state and prediction in the mean; m and h, where the
            deviation is exp(m + h v), or m itself without a v. The other three, if any, first turn the
            prediction into another one: coefficients of state and prediction, and the largest number allowed.
        scale: [M, 1] of the guidance; predictions are u + scale (c - u). None with one branch.
        temperature: [M, 1], factor of the deviation.

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
    """Draw the states that follow x: the mean of `denoising_transition` plus its deviation times noise.

    Args:
        x, noise: [M, d] float32 or float64; the result has their dtype.
        output: [branches, M, d or 2 d].
        coefficients: [4 or 7] in that dtype, as of `denoising_transition`.
        scale, temperature: [M, 1] in that dtype.

    Returns:
        [M, d].
    """
    if _use_triton(x, output):
        from .denoising_update_triton import denoising_update_triton

        return denoising_update_triton(x, output, noise, coefficients, scale, temperature)
    mean, std = denoising_transition(x, output.to(x.dtype), coefficients, scale, temperature)
    return mean + std * noise


def _use_triton(x: Tensor, output: Tensor) -> bool:
    """Return whether the kernel computes this: it has no gradient and no float64."""
    if (x.is_cpu and not INTERPRETED) or not use_triton(x.device):
        return False
    wants_gradient = torch.is_grad_enabled() and (x.requires_grad or output.requires_grad)
    return x.dtype == torch.float32 and not wants_gradient
