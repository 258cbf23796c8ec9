"""CSpD: continuous speculative decoding, exact as a reference and with each of its biases as a switch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from mmspec.acceptance.last_transition import LastTransition, last_transition
from mmspec.decoding.denoising import Denoising
from mmspec.decoding.distribution import Gaussian
from mmspec.decoding.draft import Draft
from mmspec.decoding.random_stream import RandomStream
from mmspec.decoding.verdict import Verdict
from mmspec.errors import InputError
from mmspec.registry import did_you_mean
from mmspec.validation import is_integer, require_number

__all__ = ["CSpD"]

#: Sign of the log deviations that a distribution's density is multiplied by.
VARIANCE_FACTORS = {"none": 0.0, "published": -1.0, "released": 1.0}
MAX_TRIES = 10_000


@dataclass(frozen=True, kw_only=True)
class CSpD(LastTransition):
    """Judge the last transition behind chains with the same noise (CSpD, 2411.11925), exactly by default.

    A candidate is accepted with min(1, S p(x) / q(x)), p and q the normal distributions of the last step,
    each behind its own chain; else the value is drawn from norm((S p - q)+) by rejection. With S = 1 this is
    the rule `last_step`: both densities are taken at one point, and given the states before it they couple
    the last ones without changing either. What the paper and its code do beside this is off unless it is
    asked for, and makes the result approximate. The schedule needs noise in its last step.

    Args:
        temperature: factor of both deviations in the acceptance test alone; 1 is exact. The released code has
            42, and draws the residual without it.
        variance_factor: S. "none" is 1; "published" the product over all earlier steps of the deviations of
            the draft's chain over those of the target's, which belongs to a ratio of densities at two
            different chains; "released" its inverse. With either, a residual may not exist, so that
            `max_tries` must be given.
        rollback: whether candidates that were drafted behind a refused one are given up. False replaces the
            refused one and keeps them, so that speed does not depend on acceptance; for cells alone.
        max_tries: proposals of a residual, after which the value is left at zero; the released code has 100.
            None goes on in the next round.

    Raises:
        InputError: a value outside its range.
    """

    temperature: float = 1.0
    variance_factor: str = "none"
    rollback: bool = True
    max_tries: int | None = None

    def __post_init__(self) -> None:
        require_number("temperature", self.temperature, 0.0, 1e4, "above 0; 1 is exact", open_below=True)
        if self.variance_factor not in VARIANCE_FACTORS:
            known = did_you_mean(self.variance_factor, VARIANCE_FACTORS)
            raise InputError("variance_factor", self.variance_factor, known)
        if not isinstance(self.rollback, bool):
            raise InputError("rollback", self.rollback, "True or False")
        tries = self.max_tries
        if tries is not None and (not is_integer(tries) or not 1 <= tries <= MAX_TRIES):
            raise InputError("max_tries", tries, f"an integer from 1 to {MAX_TRIES:,}, or None for no limit")
        if tries is None and self.variance_factor != "none":
            allowed = (
                f"a number with variance_factor={self.variance_factor!r}: (S p - q)+ may be zero everywhere"
            )
            raise InputError("max_tries", tries, allowed)
        settings = self.temperature, self.variance_factor, self.rollback, self.max_tries
        exact = settings == (1.0, "none", True, None)
        object.__setattr__(self, "exactness", "exact" if exact else "lossy")

    @property
    def promise(self) -> str:
        return "exact" if self.exactness == "exact" else "approximate"

    def verify(self, draft: Draft, scores: Denoising, random: RandomStream, emitted: Tensor) -> Verdict:  # type: ignore[override]
        if not self.rollback and draft.max_depth > 1:
            allowed = "True: a causal model reads what follows a refused vector behind that vector"
            raise InputError("rollback", False, allowed)
        return super().verify(draft, scores, random, emitted)

    def last(self, distribution: Denoising, chains: Tensor) -> Surrogate:
        last = last_transition(distribution, chains)
        log_weight = torch.zeros_like(last.mean[..., 0])
        sign = VARIANCE_FACTORS[self.variance_factor]
        if sign:
            _, std = distribution.process.transitions(chains[..., :-1, :].flatten(0, 1))
            log_weight = sign * std[:, :-1].log().sum((-1, -2)).view_as(log_weight)
        return Surrogate(self, last.mean, last.std, log_weight)


class Surrogate(Gaussian):
    """Normal distributions of last states, with weights: what takes the place of p and q in a ratio of CSpD.

    Args:
        rule: its temperature and its number of tries.
        mean, std: [T, n, d].
        log_weight: [T, n] added to the log density.
    """

    def __init__(self, rule: CSpD, mean: Tensor, std: Tensor, log_weight: Tensor) -> None:
        super().__init__(mean, std)
        self.rule, self.log_weight = rule, log_weight

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        return self.mean, self.std, self.log_weight

    def log_density(self, x: Tensor) -> Tensor:
        return super().log_density(x) + self.log_weight

    def judge(self, x: Tensor, q: Self, u: Tensor) -> tuple[Tensor, Tensor]:
        return Gaussian.judge(self._softened(), x, q._softened(), u)

    def finish(
        self, q: Self, judged: Tensor, random: RandomStream, place: Tensor, purpose: Tensor
    ) -> tuple[Tensor, Tensor]:
        tries = self.rule.max_tries
        if tries is None:
            return super().finish(q, judged, random, place, purpose)
        values, filled = self.refill(q, judged, random, place, purpose, tries)
        return values * filled[:, None], torch.ones_like(filled)

    def _softened(self) -> Self:
        return type(self)(self.rule, self.mean, self.std * self.rule.temperature, self.log_weight)

    def _map(self, change: Callable[[Tensor], Tensor]) -> Self:
        return type(self)(self.rule, *map(change, self.parameters))
