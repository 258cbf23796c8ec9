"""GSD: candidates are judged by the mass of a group of tokens. Lossy by design."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mmspec.decoding.interfaces import Target
from mmspec.errors import InputError
from mmspec.registry import did_you_mean
from mmspec.verification.groups import (
    check_group_size,
    cluster_codes,
    cluster_ratio,
    rank_ratio,
    window_ratio,
)
from mmspec.verification.neighbours import NOT_FITTED, codebook_of
from mmspec.verification.relaxed_sampling import RelaxedSampling

PARTITIONS = ("rank", "codebook")


@dataclass
class Grouped(RelaxedSampling):
    """Accept x with probability min(1, P(C) / Q(C)) for the group C of x, else draw from norm((p - q)+).

    Grouped speculative decoding (2508.07747). For a true partition the
    acceptance is at least the exact one. No bound is known; the total variation is measured at every place.
    `budget` with relaxation="groups" spends a bounded one on the same groups.

    Args:
        group_size: tokens per group, 1 (exact) or more; of clusters, the mean.
        partition: "rank" puts tokens together that are neighbours in the order of their probability, anew at
            every place; "codebook" clusters the code vectors once, which helps little, as the paper says.
        reference: behave as the released code does: the group of the token of rank r (from below) is ranks
            r - 7 to r + 6, overlapping with others; of these, tokens whose probability differs by less than
            .15 and whose vectors lie within a squared distance of .5; where the ranks would fall below zero
            the test is exact; a token of probability zero may be accepted. Distances are those of the code
            vectors; the released code takes rows of the model's input embedding. Group size and partition
            are ignored, and the total variation is measured at one judged place a round.

    Raises:
        InputError: a value outside its range.
    """

    group_size: int = 14
    partition: str = "rank"
    reference: bool = False
    codebook: Tensor | None = field(default=None, init=False, repr=False)
    clusters: Tensor | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        check_group_size(self.group_size)
        if self.partition not in PARTITIONS:
            raise InputError("partition", self.partition, did_you_mean(self.partition, PARTITIONS))

    def fit(self, target: Target[Any]) -> Grouped:
        if self.partition == "rank" and not self.reference:
            return self
        fitted = copy.copy(self)
        codebook = codebook_of(target).to(target.device)
        if self.reference:
            fitted.codebook = codebook
        else:
            fitted.clusters = cluster_codes(codebook, self.cluster_count(len(codebook)))
        return fitted

    def cluster_count(self, codes: int) -> int:
        """Number of clusters of a codebook of that many codes."""
        return -(-codes // self.group_size)

    @property
    def measures_one_place(self) -> bool:
        return self.reference

    def mass(self, p: Tensor, q: Tensor, allowance: Tensor, only: Tensor | None = None) -> Tensor:
        if self.reference:
            tokens = torch.arange(p.shape[-1], device=p.device).expand(p.shape)
            return self.mass_at(p, q, tokens, allowance)
        if self.partition == "rank":
            return q * rank_ratio(p, q, self.group_size)
        if self.clusters is None:
            raise TypeError(NOT_FITTED)
        return q * cluster_ratio(p, q, self.clusters, self.cluster_count(len(self.clusters)))

    def mass_at(self, p: Tensor, q: Tensor, x: Tensor, allowance: Tensor) -> Tensor:
        if not self.reference:
            return super().mass_at(p, q, x, allowance)
        if self.codebook is None:
            raise TypeError(NOT_FITTED)
        return q.gather(-1, x) * window_ratio(p, q, self.codebook, x)
