"""COOL-SD: the exact ratio times an omega that falls from place to place. Lossy by design."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor

from mmspec.accelerator import Accelerator
from mmspec.trees.jacobi import JacobiDrafter, WindowOptions
from mmspec.trees.relaxed_sampling import RelaxedSampling
from mmspec.validation import require_number


@dataclass(frozen=True)
class Cool(RelaxedSampling):
    """Accept x with probability min(1, omega_i p(x) / q(x)), else draw from norm((p - q)+).

    Annealed relaxation (COOL-SD, 2601.09212): omega_i = omega exp(-nu i - mu), at least 1, at place i of the
    draft, counted from 0. An early place is relaxed more than a later one, as what is accepted there is used
    more often. The residual is the best one, and the total variation of a place is the sum of
    (min(q, omega_i p) - p)+, which is reported and not bounded.

    Args:
        omega: the factor at the first place, where mu is 0 (the paper's delta); 1 is the exact rule.
        nu: how fast it falls; 0 relaxes all places alike. The paper has .7 for its chains of a few tokens.
        mu: shifts the whole sequence of factors.

    Raises:
        InputError: a value outside its range.
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


def cool(
    omega: float = 2.0, nu: float = 0.7, mu: float = 0.0, **window: Unpack[WindowOptions]
) -> Accelerator:
    """COOL-SD's annealed relaxation (2601.09212) on a Jacobi window; lossy."""
    return Accelerator("cool", JacobiDrafter(**window), Cool(omega, nu, mu))
