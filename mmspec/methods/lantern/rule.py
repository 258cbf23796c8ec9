"""LANTERN and LANTERN++: relaxed acceptance by the mass of a candidate's codebook neighbours. Lossy."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mmspec.core.interfaces import AnyTarget
from mmspec.kernels import nearby_mass, nearby_prefix
from mmspec.kernels.chain import normalise
from mmspec.trees.neighbours import check_neighbours, fitted, neighbour_table
from mmspec.trees.relaxed_sampling import RelaxedSampling
from mmspec.validation import require_number


@dataclass
class Lantern(RelaxedSampling):
    """Accepts x with probability min(1, (p(x) + c(x)) / q(x)), c(x) the mass of its nearest neighbours.

    LANTERN (2410.03355), LANTERN++ (2502.06352). Neighbours are added nearest first, as long as
    c(x) <= delta, or c(x) <= (lam - 1) p(x). If a deterministic candidate is rejected, x and the added
    neighbours are removed from p, so that one candidate costs a total variation of c(x) <= delta; several
    siblings may cost that much each. If a sampled candidate is rejected, the draw is from norm((p - q)+),
    which is optimal, and the total variation may be as large as that of p and q; use `budget` for a bound. In
    chains of sampled tokens it is measured at one verified place a round.

    Args:
        delta: limit of the added mass, 0 (exact) to 1.
        lam: above 1: limits the added mass to (lam - 1) p(x) instead of `delta` (LANTERN++); `delta` applies
            if None.
        neighbours: largest number of neighbours added, 1 or more; all of them in a smaller codebook.
        metric: distance of codes, "l2" or "cosine".

    Raises:
        InputError: a value is out of range.
    """

    delta: float = 0.1
    lam: float | None = None
    neighbours: int = 100
    metric: str = "l2"
    table: Tensor | None = field(default=None, init=False, repr=False)

    measures_one_place = True

    def __post_init__(self) -> None:
        require_number("delta", self.delta, 0.0, 1.0, "must be between 0 (exact) and 1")
        if self.lam is not None:
            require_number("lam", self.lam, 1.0, 1e6, "must be above 1 and at most 1000000", open_below=True)
        check_neighbours(self.neighbours, self.metric)

    def fit(self, target: AnyTarget) -> Lantern:
        rule = copy.copy(self)
        rule.table = neighbour_table(target, self.neighbours, self.metric)
        return rule

    @property
    def nearest(self) -> Tensor:
        """[K, k] the neighbours of each code."""
        return fitted(self.table)

    def limit(self, p_x: Tensor) -> Tensor:
        """Largest mass that neighbours may add to tokens of probability p_x [...]."""
        return torch.full_like(p_x, self.delta) if self.lam is None else (self.lam - 1) * p_x

    def mass(self, p: Tensor, q: Tensor, allowance: Tensor, only: Tensor | None = None) -> Tensor:
        if only is not None:
            return torch.zeros_like(p).scatter(-1, only, self.mass_at(p, q, only, allowance))
        limit = self.limit(p[..., :1] if self.lam is None else p)
        near = nearby_mass(p, self.nearest, limit)
        return torch.minimum(q, self.raised(p, near))

    def mass_at(self, p: Tensor, q: Tensor, x: Tensor, allowance: Tensor) -> Tensor:
        p_x = p.gather(-1, x)
        near, _ = nearby_prefix(p, self.nearest, x, self.limit(p_x))
        return torch.minimum(q.gather(-1, x), self.raised(p_x, near))

    def raised(self, p: Tensor, near: Tensor) -> Tensor:
        """Add the neighbours' mass: p + c; tokens that the target excludes stay excluded."""
        return p + near.where(p > 0, 0.0)

    def residual(self, p: Tensor, q: Tensor | None, x: Tensor) -> Tensor:
        if q is not None:
            return super().residual(p, q, x)
        ids, leaving = self.leaving(p, x)
        left = p.scatter(-1, x, 0.0)
        left = left.scatter(-1, ids, left.gather(-1, ids).masked_fill(leaving, 0.0))
        return normalise(left, otherwise=p)

    def leaving(self, p: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return [..., k] ids of the neighbours of x [..., 1], and which of them are removed with it."""
        ids = self.nearest[x.clamp_max(len(self.nearest) - 1)].long()
        _, count = nearby_prefix(p, self.nearest, x, self.limit(p.gather(-1, x)))
        leaving = torch.arange(ids.shape[-1], device=ids.device) < count[..., None]
        return ids.flatten(-2), leaving.flatten(-2)


@dataclass
class LanternPlusPlus(Lantern):
    """LANTERN with the limit of LANTERN++: c(x) <= (lam - 1) p(x), among few neighbours."""

    lam: float | None = 5.0
    neighbours: int = 10
