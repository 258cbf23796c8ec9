"""GSD: accepts candidates by the probability of a group of tokens. Lossy by design.

Groups are a true partition of the tokens that the target allows. This ensures, by the triangle inequality,
that the group test accepts at least as much as the exact one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmspec.kernels import rank_ratio, rank_ratio_at
from mmspec.trees.relaxed_sampling import RelaxedSampling, check_group_size


@dataclass
class Grouped(RelaxedSampling):
    """Accepts x with probability min(1, P(C) / Q(C)) for the group C of x, else draws from norm((p - q)+).

    Grouped speculative decoding (2508.07747). Groups are tokens that are neighbours in the order of their
    probability, formed anew at every place. For a true partition the acceptance is at least the exact one.
    No bound is known; the total variation is measured at every place. `budget` with relaxation="groups"
    applies a bound to the same groups.

    Args:
        group_size: tokens per group, 1 (exact) or more.

    Raises:
        InputError: a value is out of range.
    """

    group_size: int = 14

    def __post_init__(self) -> None:
        check_group_size(self.group_size)

    def mass(self, p: Tensor, q: Tensor, allowance: Tensor, only: Tensor | None = None) -> Tensor:
        if only is not None:
            return torch.zeros_like(p).scatter(-1, only, self.mass_at(p, q, only, allowance))
        return q * rank_ratio(p, q, self.group_size)

    def mass_at(self, p: Tensor, q: Tensor, x: Tensor, allowance: Tensor) -> Tensor:
        return q.gather(-1, x) * rank_ratio_at(p, q, x, self.group_size)
