"""COOL-SD: multiplies the exact ratio by a factor that falls from place to place. Lossy by design."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmspec.trees.relaxed_sampling import RelaxedSampling
from mmspec.validation import require_number


@dataclass(frozen=True)
class Cool(RelaxedSampling):
    """Accepts x with probability min(1, omega_i p(x) / q(x)), else draws from norm((p - q)+).

    Annealed relaxation (COOL-SD, 2601.09212, section 3): omega_i = max(1, omega exp(-nu i - mu)) at place i
    of the draft, counted from 0. Early places are relaxed more, because tokens accepted there are used more
    often. The residual distribution is optimal. The total variation of a place is the sum of
    (min(q, omega_i p) - p)+; it is reported, and has no bound.

    Args:
        omega: factor at place 0 if mu is 0 (delta in the paper); 1 is the exact rule.
        nu: rate at which the factor falls; 0 relaxes all places alike. The paper uses 0.7 for chains of a few
            tokens.
        mu: decrease of the exponent at all places.

    Raises:
        InputError: a value is out of range.
    """

    omega: float = 2.0
    nu: float = 0.7
    mu: float = 0.0

    def __post_init__(self) -> None:
        require_number("omega", self.omega, 1.0, 1e6, "must be between 1 (exact) and 1,000,000")
        require_number("nu", self.nu, 0.0, 1e3, "must be between 0 (no annealing) and 1000")
        require_number("mu", self.mu, -1e1, 1e3, "must be between -10 and 1000")

    def allowance(self, depth: Tensor) -> Tensor:
        return (self.omega * torch.exp(-self.nu * depth - self.mu)).clamp_min(1.0)

    def mass(self, p: Tensor, q: Tensor, allowance: Tensor, only: Tensor | None = None) -> Tensor:
        return torch.minimum(q, allowance * p)
