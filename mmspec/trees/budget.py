"""Delta-budget rule: relaxed acceptance with a bounded distance to the target at every token."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mmspec.core.interfaces import AnyTarget
from mmspec.core.promise import Level, Promise
from mmspec.errors import InputError
from mmspec.kernels import nearby_mass, nearby_prefix, rank_ratio, rank_ratio_at
from mmspec.registry import did_you_mean
from mmspec.trees.neighbours import check_neighbours, fitted, neighbour_table
from mmspec.trees.relaxed_sampling import RelaxedSampling, check_group_size
from mmspec.validation import require_number

RELAXATIONS = ("neighbours", "groups", "omega")
BISECTIONS = 20


@dataclass
class Budget(RelaxedSampling):
    """Relaxed acceptance with a total variation of at most delta per token.

    A relaxation would accept the mass A <= q. With o = (A - p)+ and O = sum o, the rule accepts
    min(p, q) + s o, where s = min(1, delta / O), and draws from norm((p - q)+) otherwise. The total variation
    is then s O <= delta, and the acceptance rate 1 - TV(p, q) + s O is the largest for that total variation
    (see `relaxed_sampling`). Siblings in a tree share the delta of their place.

    Args:
        delta: largest total variation per token, 0 (exact) to 1.
        relaxation: which candidates the budget favours. "neighbours": those whose neighbours in the codebook
            have mass, A = min(q, p + mass of the neighbours), as in LANTERN; "groups": those in groups of
            tokens of similar probability with more mass than the draft gives them, as in GSD; "omega": all
            alike, A = min(q, omega p), with the omega of each place that spends exactly delta, as in COOL-SD.
        neighbours: with `relaxation="neighbours"`: number of neighbours in the codebook, 1 or more.
        metric: with `relaxation="neighbours"`: distance of codes, "l2" or "cosine".
        group_size: with `relaxation="groups"`: tokens per group, 1 (exact) or more.

    Raises:
        InputError: a value outside its range.
    """

    delta: float = 0.1
    relaxation: str = "neighbours"
    neighbours: int = 100
    metric: str = "l2"
    group_size: int = 14
    table: Tensor | None = field(default=None, init=False, repr=False)

    exactness = Level.BOUNDED
    bound = "TV at most delta per token"

    def __post_init__(self) -> None:
        require_number("delta", self.delta, 0.0, 1.0, "must be from 0 (exact) to 1")
        if self.relaxation not in RELAXATIONS:
            raise InputError("relaxation", self.relaxation, did_you_mean(self.relaxation, RELAXATIONS))
        check_neighbours(self.neighbours, self.metric)
        check_group_size(self.group_size)

    @property
    def promise(self) -> Promise:
        return Promise(Level.BOUNDED, self.delta) if self.delta else Promise()

    def fit(self, target: AnyTarget) -> Budget:
        if self.relaxation != "neighbours":
            return self
        rule = copy.copy(self)
        rule.table = neighbour_table(target, self.neighbours, self.metric)
        return rule

    def allowance(self, depth: Tensor) -> Tensor:
        return torch.full_like(depth, self.delta)

    def remaining(self, allowance: Tensor, tv: Tensor) -> Tensor:
        return (allowance - tv[:, None]).clamp_min(0.0)

    def mass(self, p: Tensor, q: Tensor, allowance: Tensor, only: Tensor | None = None) -> Tensor:
        exact = torch.minimum(p, q)
        surplus = (self.favoured(p, q, allowance, only) - p).clamp_min(0.0).where(p > 0, 0.0)
        total = surplus.sum(-1, keepdim=True).clamp_min(torch.finfo(p.dtype).tiny)
        return exact + (allowance / total).clamp_max(1.0) * surplus

    def favoured(self, p: Tensor, q: Tensor, allowance: Tensor, only: Tensor | None) -> Tensor:
        """[..., V] A: the mass that the relaxation accepts without a budget; at most q."""
        if self.relaxation == "groups" and only is not None:  # q is zero elsewhere
            return q.scatter(-1, only, q.gather(-1, only) * rank_ratio_at(p, q, only, self.group_size))
        if self.relaxation == "groups":
            return q * rank_ratio(p, q, self.group_size)
        if self.relaxation == "omega":
            return torch.minimum(q, p / self.inverse_omega(p, q, allowance))
        table = fitted(self.table)
        if only is None:
            return torch.minimum(q, p + nearby_mass(p, table))
        return torch.minimum(q, p.scatter_add(-1, only, nearby_prefix(p, table, only)[0]))

    def inverse_omega(self, p: Tensor, q: Tensor, allowance: Tensor) -> Tensor:
        """[..., 1] 1 / omega by bisection: the smallest omega found that spends the allowance, if any."""
        spends, saves = torch.zeros_like(allowance), torch.ones_like(allowance)
        for _ in range(BISECTIONS):
            middle = (spends + saves) / 2
            surplus = (torch.minimum(q, p / middle) - p).clamp_min(0.0).sum(-1, keepdim=True)
            enough = surplus >= allowance
            spends, saves = torch.where(enough, middle, spends), torch.where(enough, saves, middle)
        return spends.clamp_min(torch.finfo(p.dtype).tiny)
