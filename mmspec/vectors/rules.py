"""Acceptance rules for vectors of a denoising head: exact ones by its transitions, and one with a tolerance.

`speculative_sampling` verifies whole chains at once, for any head with noise in every step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmspec.core.distributions import PROPOSALS, Continuous, Gaussian
from mmspec.core.draft import DraftKind, Tree
from mmspec.core.indexing import take
from mmspec.core.interfaces import AcceptanceRule
from mmspec.core.promise import Level, Promise
from mmspec.core.random_stream import Purpose, RandomStream
from mmspec.core.verdict import Path
from mmspec.errors import InputError
from mmspec.registry import require_known
from mmspec.trees.verification import ChainRejection, place_uniforms, sampled_distribution
from mmspec.validation import is_integer, require_number
from mmspec.vectors.denoising import Denoising, require_noise

__all__ = ["CSpD", "LastStep", "Reflection", "SharedNoise"]

#: Sign of the log deviations in the factor of a distribution's density.
VARIANCE_FACTORS = {"none": 0.0, "published": -1.0, "released": 1.0}
MAX_TRIES = 10_000


class Reflection(AcceptanceRule):
    """Follow the draft's chain step by step, and continue with the target's own from the first rejected step.

    Reflection coupling of two Gaussian transitions with the same covariance (De Bortoli et al., 2501.05370):
    with z the noise of the draft's step, D the distance of the means and e = D / |D|, the state of the draft
    is kept with probability exp(-|z + D|^2 / 2 + |z|^2 / 2), and replaced by its mirror image otherwise. The
    rule is exact, and decides every place in the round that verifies it. A step without noise is kept if both
    means are equal.
    """

    sound_for = frozenset({DraftKind.IID})
    chains_only = True
    distribution = Continuous

    def verify(self, draft: Tree, scores: Denoising, random: RandomStream, emitted: Tensor) -> Path:
        q = sampled_distribution(draft)
        steps = scores.process.steps
        u = place_uniforms(draft, random, emitted, steps, scores.dtype)  # [B, K, S]
        kept, mirrored = reflect(scores[:-1], q, u)
        drawn = draft.valid[:, 1:]
        node = (drawn & kept.all(-1)).long().cumprod(-1).sum(-1)
        judged = pad(drawn, (0, 1)).gather(1, node[:, None])
        here = scores.at(node)
        noise, known = here.noise(random, emitted + node, draft.last_purpose), None
        if draft.max_depth:
            at = node.clamp_max(draft.max_depth - 1)
            chain, agrees = take(q.drawn, at), take(kept, at)
            first = agrees.long().cumprod(-1).sum(-1)[:, None]  # [B, 1] the rejected step
            state = torch.arange(steps + 1, device=node.device)
            after = pad(take(mirrored, at), (0, 0, 1, 0))  # [B, S + 1, d] with room for the first state
            chain = torch.where((state == first + 1)[:, :, None], after, chain)
            known = chain, (state <= first + 1) & judged
        return Path.at(draft, node, here.value_of(here.process.run(noise, known)))


def reflect(p: Denoising, q: Denoising, u: Tensor) -> tuple[Tensor, Tensor]:
    """Verify each step of the candidates' chains, given that the earlier steps were kept.

    Args:
        p: [T, k] of the target.
        q: of the draft, with its chains.
        u: [T, k, S].

    Returns:
        [T, k, S] whether the state after the step is kept, and [T, k, S, d] its replacement otherwise.

    Raises:
        InputError: the head predicts deviations, which differ between target and draft.
    """
    if q.drawn is None:
        raise TypeError("candidates of a denoising head are verified with their chains; q.drawn is None")
    if not p.process.has_fixed_noise:
        rule = "needs a flow head; use speculative_sampling for heads that predict their deviations"
        raise InputError("acceptance", "reflection", rule)
    chains = q.drawn.flatten(0, 1)
    (mean, std), (other, _) = p.process.transitions(chains[:, :-1]), q.process.transitions(chains[:, :-1])
    moves = std > 0
    scale = std.where(moves, 1.0)
    z, distance = (chains[:, 1:] - other) / scale, (other - mean) / scale
    z, distance = z.where(moves, 0.0), distance.where(moves, 0.0)
    log_ratio = (z.square() - (z + distance).square()).sum(-1) / 2
    same = ((mean == other) | moves).all(-1)
    kept = same & (u.flatten(0, 1).log() <= log_ratio)
    length = distance.square().sum(-1, keepdim=True).clamp_min(torch.finfo(z.dtype).tiny)
    mirrored = mean + std * (z - 2 * (z * distance).sum(-1, keepdim=True) / length * distance)
    return kept.view(u.shape), mirrored.view(*u.shape, -1)


class LastStep(ChainRejection):
    """Verify the last transition alone, after chains of target and draft with the same noise.

    The target's own chain, run with the noise of the draft, is a sample of the target up to the last state
    but one, for any coupling. The last states are then coupled as two Gaussian distributions (2411.11925,
    without the variance factor and the separate temperature, which both bias it). The rule is exact. With
    many steps the last deviation is small compared with the distance of the means, and hardly any candidate
    is accepted.
    """

    sound_for = frozenset({DraftKind.IID})
    distribution = Continuous

    def compared(
        self, draft: Tree, scores: Denoising, random: RandomStream, emitted: Tensor
    ) -> tuple[Gaussian, Gaussian]:
        q = sampled_distribution(draft)
        if scores.normalize:
            rule = "must be False: a normalised state has no Gaussian distribution"
            raise InputError("normalize_tokens", True, rule)
        own = scores.draw(random, emitted[:, None] + draft.depth, Purpose.DRAFT)
        return self.last(scores, own), self.last(q, q.drawn)

    def last(self, distribution: Denoising, chains: Tensor) -> Gaussian:
        """Distributions [T, n] of the last states of chains [T, n, S + 1, d], for the acceptance test."""
        process = distribution.process
        require_noise(process)
        mean, std = process.transition(chains[..., -2, :].flatten(0, 1), process.steps - 1)
        shape = (*chains.shape[:2], process.size)
        return Gaussian(mean.view(shape), std.view(shape))


@dataclass(frozen=True, kw_only=True)
class CSpD(LastStep):
    """Verify the last transition after chains with the same noise (CSpD, 2411.11925), exactly by default.

    A candidate is accepted with min(1, S p(x) / q(x)), where p and q are the Gaussian distributions of the
    last step, each after its own chain; otherwise the value is drawn from norm((S p - q)+) by rejection. With
    S = 1 this is the rule `last_step`: both densities are evaluated at one point, and given the states before
    it they couple the last ones without changing either. The other options of the paper and its code are off
    by default, and make the result approximate. The schedule needs noise in its last step.

    Args:
        temperature: factor of both deviations in the acceptance test alone, above 0; 1 is exact. The released
            code uses 42, and draws the residual without it.
        variance_factor: S. "none" is 1; "published" the product over all earlier steps of the deviations of
            the draft's chain over those of the target's, which belongs to a ratio of densities at two
            different chains; "released" its inverse. With either, a residual may not exist, so that
            `max_tries` is required.
        max_tries: number of trial draws of a residual, 1 to 10000, after which the value stays zero; the
            released code has 100; no limit, continuing in the next round if None.

    Raises:
        InputError: a value outside its range.
    """

    temperature: float = 1.0
    variance_factor: str = "none"
    max_tries: int | None = None

    def __post_init__(self) -> None:
        require_number(
            "temperature", self.temperature, 0.0, 1e4, "must be above 0 (1 is exact)", open_below=True
        )
        require_known("variance_factor", self.variance_factor, VARIANCE_FACTORS)
        tries = self.max_tries
        if tries is not None and (not is_integer(tries) or not 1 <= tries <= MAX_TRIES):
            rule = f"must be an integer from 1 to {MAX_TRIES:,}, or None for no limit"
            raise InputError("max_tries", tries, rule)
        if tries is None and self.variance_factor != "none":
            rule = (
                f"must be a number with variance_factor={self.variance_factor!r}, "
                "because (S p - q)+ may be zero everywhere"
            )
            raise InputError("max_tries", tries, rule)
        exact = (self.temperature, self.variance_factor, self.max_tries) == (1.0, "none", None)
        object.__setattr__(self, "exactness", Level.EXACT if exact else Level.APPROXIMATE)

    def last(self, distribution: Denoising, chains: Tensor) -> Surrogate:
        last = super().last(distribution, chains)
        log_weight = torch.zeros_like(last.mean[..., 0])
        sign = VARIANCE_FACTORS[self.variance_factor]
        if sign:
            _, std = distribution.process.transitions(chains[..., :-1, :].flatten(0, 1))
            log_weight = sign * std[:, :-1].log().sum((-1, -2)).view_as(log_weight)
        return Surrogate(last.mean, last.std, self, log_weight)


@dataclass(eq=False)
class Surrogate(Gaussian):
    """Weighted Gaussian distributions of last states, which replace p and q in the ratio of CSpD.

    Args:
        mean, std: [T, n, d].
        rule: supplies the temperature and the number of tries.
        log_weight: [T, n] added to the log density.
    """

    rule: CSpD
    log_weight: Tensor

    def __post_init__(self) -> None:
        self.proposals = self.rule.max_tries or PROPOSALS

    def log_density(self, x: Tensor) -> Tensor:
        return super().log_density(x) + self.log_weight

    def log_ratio(self, x: Tensor, q: Self) -> Tensor:
        return Gaussian.log_ratio(self._softened(), x, q._softened())

    def finish(
        self, q: Self, judged: Tensor, random: RandomStream, place: Tensor, purpose: Tensor
    ) -> tuple[Tensor, Tensor]:
        values, filled = super().finish(q, judged, random, place, purpose)
        if self.rule.max_tries is None:
            return values, filled
        return values * filled[:, None], torch.ones_like(filled)

    def _softened(self) -> Self:
        return replace(self, std=self.std * self.rule.temperature)


@dataclass(frozen=True)
class SharedNoise(AcceptanceRule):
    """Draw the target's own value at every node; accept candidates within a tolerance of it.

    Emitted values are always the target's own, drawn with the noise of plain decoding. Only the context that
    they are conditioned on may differ from the emitted one, by the tolerance. At 0 this is plain decoding, up
    to the rounding of forward passes with more nodes.

    Args:
        tolerance: largest root mean square, over the dimensions of a vector, of the difference between a
            draft and the target's own vector, 0 (plain decoding) or more.

    Raises:
        InputError: a negative tolerance.
    """

    tolerance: float = 0.0

    sound_for = frozenset(DraftKind)
    exactness = Level.APPROXIMATE
    bound = "a vector is the target's own draw, given a context off by at most the tolerance"
    chains_only = True
    distribution = Continuous
    measures = "drift"
    is_plain_draw = True  # at the tolerance 0

    def __post_init__(self) -> None:
        require_number("tolerance", self.tolerance, 0.0, 1e4, "must be 0 or more; 0 is plain decoding")

    @property
    def promise(self) -> Promise:
        return Promise(Level.APPROXIMATE if self.tolerance else Level.EXACT)

    def verify(self, draft: Tree, scores: Denoising, random: RandomStream, emitted: Tensor) -> Path:
        return self.measure(draft, scores, random, emitted)[0]

    def measure(
        self, draft: Tree, scores: Denoising, random: RandomStream, emitted: Tensor
    ) -> tuple[Path, Tensor]:
        values = scores.choose(draft, random, emitted)
        gap = (draft.tokens[:, 1:] - values[:, :-1]).square().mean(-1).sqrt()
        near = draft.valid[:, 1:] & (gap <= self.tolerance)
        node = near.long().cumprod(-1).sum(-1)
        path = replace(Path.at(draft, node, take(values, node)), values=values)
        return path, gap if self.tolerance else gap[:, :0]
