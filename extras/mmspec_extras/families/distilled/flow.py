"""The closed-form flow between normal noise and the code vectors of a distribution (2412.17153, section 3.2).

x_t = (1 - t) c + t e has the velocity (x_t - E[c | x_t]) / t, for a code c drawn from the distribution and
normal noise e. A token is therefore a function of the noise at t = 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["noise_of", "token_of"]

FIRST_TIME = 0.05  # at which codes at usual distances hardly mix
STEPS = 12


def token_of(noise: Tensor, log_p: Tensor, codes: Tensor) -> Tensor:
    """Return the tokens [n] of noise [n, d], given log-probabilities [n, V] and code vectors [V, d]."""
    times = [FIRST_TIME ** (step / STEPS) for step in range(STEPS + 1)]
    return posterior(follow(noise, log_p, codes, times), times[-1], log_p, codes).argmax(-1)


def noise_of(tokens: Tensor, log_p: Tensor, codes: Tensor, random: torch.Generator) -> Tensor:
    """Draw noise [n, d] that `token_of` maps to the tokens [n], from its distribution given them.

    The noise of tokens that are drawn from the log-probabilities is normal.
    """
    around = torch.randn(*tokens.shape, codes.shape[1], generator=random, dtype=codes.dtype, device="cpu")
    start = (1 - FIRST_TIME) * codes[tokens] + FIRST_TIME * around.to(codes.device)
    return follow(start, log_p, codes, [FIRST_TIME ** (1 - step / STEPS) for step in range(STEPS + 1)])


def posterior(x: Tensor, time: float, log_p: Tensor, codes: Tensor) -> Tensor:
    """Return the probabilities [n, V] of the codes, given points [n, d] at a time above 0."""
    scale = (1 - time) / time**2
    nearness = x @ (scale * codes).T - (1 - time) * scale / 2 * codes.square().sum(-1)
    return (log_p + nearness).softmax(-1)


def follow(x: Tensor, log_p: Tensor, codes: Tensor, times: list[float]) -> Tensor:
    """Follow the flow from points [n, d] at the first of the times to the last.

    A step is exact for a constant mean of the codes, and uses the average of those at both ends.
    """
    for now, then in zip(times, times[1:], strict=False):
        ratio, mean = then / now, posterior(x, now, log_p, codes) @ codes
        ahead = posterior(mean + ratio * (x - mean), then, log_p, codes) @ codes
        x = (1 - ratio) * (mean + ahead) / 2 + ratio * x
    return x
