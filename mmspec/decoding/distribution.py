"""Distributions of the values at the nodes of a draft, with the few operations that loop and rules use.

Matching and rejection are general over all of them. Rules that look at single tokens take `Categorical`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from mmspec.decoding.indexing import pick, take
from mmspec.decoding.once import once
from mmspec.decoding.random_stream import Purpose, RandomStream, box_muller

if TYPE_CHECKING:
    from mmspec.decoding.draft import Draft

__all__ = ["Categorical", "Distribution", "Gaussian", "Scores", "draw", "keep_first", "normalise", "residual"]

PROPOSALS = 8  # of a residual that is drawn by rejection, in each round


class Distribution(ABC):
    """Distributions at [T, n] nodes, or [T] of them."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Number format, in which uniforms are compared with."""

    @abstractmethod
    def __getitem__(self, nodes: slice) -> Self:
        """Those at a range of nodes."""

    @abstractmethod
    def at(self, node: Tensor) -> Self:
        """Those at one node [T] of each row."""

    @classmethod
    @abstractmethod
    def stack(cls, parts: Sequence[Self]) -> Self:
        """Put distributions [T] side by side, as those of n nodes."""

    @abstractmethod
    def sample(self, random: RandomStream, place: Tensor, purpose: Purpose | Tensor) -> Tensor:
        """Draw a value from each, for output indices [T, n] or [T] that key the noise."""

    def candidate(self, random: RandomStream, place: Tensor, purpose: Purpose) -> tuple[Tensor, Self]:
        """Draw a value from each, and return it with the q that a rule judges it by."""
        return self.sample(random, place, purpose), self

    def choose(self, draft: Draft, random: RandomStream, first: Tensor) -> Tensor:
        """Draw the target's own value after each node, with noise keyed by output index.

        Nodes at one depth share their noise: it belongs to the output index that they compete for. A walk
        along these values therefore emits what plain decoding emits with the same noise.

        Args:
            first: [T] output index that depth 1 competes for.
        """
        return self.sample(random, first[:, None] + draft.depth, Purpose.TARGET)

    @abstractmethod
    def judge(self, x: Tensor, q: Any, u: Tensor) -> tuple[Tensor, Tensor]:
        """Judge candidates by min(1, p(x) / q(x)) (2211.17192, algorithm 1); self is p.

        Args:
            x: candidates, drawn from q.
            q: distributions of the same kind.
            u: uniforms.

        Returns:
            Whether each was really drawn from q, and whether it is accepted.
        """

    @abstractmethod
    def finish(
        self, q: Any, judged: Tensor, random: RandomStream, place: Tensor, purpose: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Draw what follows the last accepted node; self is p [T].

        Args:
            q: [T] of the candidate that was refused there.
            judged: [T] True where one was: norm((p - q)+) is drawn from then, and p itself elsewhere.
            place: [T].
            purpose: [T] of the noise.

        Returns:
            The values, and [T] whether each could be drawn in this round.
        """

    @abstractmethod
    def is_finite(self) -> Tensor:
        """False where the numbers are NaN or infinite, so that nothing can be drawn."""


class Categorical(Distribution):
    """Distributions over V tokens.

    Args:
        p: [T, n, V] probabilities.
    """

    def __init__(self, p: Tensor) -> None:
        self._p = p

    @property
    def p(self) -> Tensor:
        """[T, n, V] probabilities."""
        return self._p

    @property
    def dtype(self) -> torch.dtype:
        return self.p.dtype

    def __getitem__(self, nodes: slice) -> Categorical:
        return Categorical(self.p[:, nodes])

    def at(self, node: Tensor) -> Categorical:
        return Categorical(take(self.p, node))

    @classmethod
    def stack(cls, parts: Sequence[Categorical]) -> Categorical:
        return Categorical(torch.stack([part.p for part in parts], 1))

    def mass(self, x: Tensor) -> Tensor:
        """Probability of one token at each node."""
        return self.p.gather(-1, x[..., None])[..., 0]

    def sample(self, random: RandomStream, place: Tensor, purpose: Purpose | Tensor) -> Tensor:
        return draw(self.p, random, place, purpose)

    def judge(self, x: Tensor, q: Categorical, u: Tensor) -> tuple[Tensor, Tensor]:
        p_x, q_x = self.mass(x), q.mass(x)
        return q_x > 0, (u * q_x <= p_x) & (p_x > 0)

    def finish(
        self, q: Categorical, judged: Tensor, random: RandomStream, place: Tensor, purpose: Tensor
    ) -> tuple[Tensor, Tensor]:
        final = torch.where(judged[:, None], residual(self.p, q.p), self.p)
        return draw(final, random, place, purpose), torch.ones_like(judged)

    def is_finite(self) -> Tensor:
        return self.p.amax(-1).isfinite()


class Scores(Categorical):
    """Warped logits of a target; p = softmax(logits).

    Args:
        logits: [T, n, V] float32 (float64 for float64 models).
        greedy: p is one-hot at the arg-max (temperature 0), and `logits` are not warped: in all rows or none,
            or [T, 1, 1] where.
    """

    def __init__(self, logits: Tensor, greedy: bool | Tensor) -> None:
        self.logits, self.greedy = logits, greedy

    @once
    def _p(self) -> Tensor:  # computed where a rule asks for it
        if self.greedy is False:
            return self.logits.softmax(-1)
        likeliest = torch.zeros_like(self.logits).scatter(-1, self.logits.argmax(-1, keepdim=True), 1.0)
        if self.greedy is True:
            return likeliest
        return torch.where(self.greedy, likeliest, self.logits.softmax(-1))

    def candidate(self, random: RandomStream, place: Tensor, purpose: Purpose) -> tuple[Tensor, Self]:
        """Draw a value from each, and return it with the q that a rule judges it by."""
        return self.sample(random, place, purpose), self

    def choose(self, draft: Draft, random: RandomStream, first: Tensor) -> Tensor:
        if self.greedy is True:
            return self.logits.argmax(-1)
        vocabulary = self.logits.shape[-1]
        index = first[:, None] + torch.arange(draft.max_depth + 1, device=first.device)
        noise = random.gumbel(index, Purpose.TARGET, vocabulary, self.logits.dtype)
        if not draft.is_chain:
            noise = pick(noise, draft.depth)
        if isinstance(self.greedy, Tensor):
            noise = noise.masked_fill(self.greedy, 0.0)
        return (self.logits + noise).argmax(-1)

    def is_finite(self) -> Tensor:
        return self.logits.amax(-1).isfinite()


class Gaussian(Distribution):
    """Normal distributions of vectors, with a variance for each dimension.

    Args:
        mean, std: [T, n, d].
    """

    def __init__(self, mean: Tensor, std: Tensor) -> None:
        self.mean, self.std = mean, std

    @property
    def dtype(self) -> torch.dtype:
        return self.mean.dtype

    def __getitem__(self, nodes: slice) -> Gaussian:
        return Gaussian(self.mean[:, nodes], self.std[:, nodes])

    def at(self, node: Tensor) -> Gaussian:
        return Gaussian(take(self.mean, node), take(self.std, node))

    @classmethod
    def stack(cls, parts: Sequence[Gaussian]) -> Gaussian:
        return Gaussian(torch.stack([p.mean for p in parts], 1), torch.stack([p.std for p in parts], 1))

    def log_density(self, x: Tensor) -> Tensor:
        """Log density of a vector under each, [..., d] -> [...]."""
        z = (x - self.mean) / self.std
        return -(z.square() / 2 + self.std.log() + math.log(2 * math.pi) / 2).sum(-1)

    def sample(self, random: RandomStream, place: Tensor, purpose: Purpose | Tensor) -> Tensor:
        keys = place if place.dim() == 2 else place[:, None]
        if isinstance(purpose, Tensor):
            purpose = purpose.view(keys.shape)
        noise = random.normal(keys, purpose, self.mean.shape[-1], self.mean.dtype).view_as(self.mean)
        return self.mean + self.std * noise

    def judge(self, x: Tensor, q: Gaussian, u: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ones_like(u, dtype=torch.bool), u.log() <= self.log_density(x) - q.log_density(x)

    def finish(
        self, q: Gaussian, judged: Tensor, random: RandomStream, place: Tensor, purpose: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Draw from p, or from norm((p - q)+) by rejection: y ~ p stays with 1 - min(1, q(y) / p(y)).

        A round makes a fixed number of proposals. Where all of them fail, the place stays open; the next
        round meets the same refused candidate again, and goes on with other noise.
        """
        size, dtype = self.mean.shape[-1], self.mean.dtype
        plain = self.sample(random, place, purpose)
        u = random.uniform(place[:, None], Purpose.RETRY, PROPOSALS * (2 * size + 1), dtype)
        u = u.view(len(place), PROPOSALS, -1)
        p, q = (Gaussian(each.mean[:, None], each.std[:, None]) for each in (self, q))
        y = p.mean + p.std * box_muller(u[..., 1:])  # [T, proposals, d]
        stays = u[..., 0] < -torch.expm1((q.log_density(y) - p.log_density(y)).clamp_max(0.0))
        return keep_first(y, stays, judged, plain)

    def is_finite(self) -> Tensor:
        return (self.mean.isfinite() & self.std.isfinite()).all(-1)


def keep_first(y: Tensor, stays: Tensor, judged: Tensor, plain: Tensor) -> tuple[Tensor, Tensor]:
    """Take the first proposal y [T, proposals, d] that stays [T, proposals]; `plain` where not judged [T].

    Returns:
        The values [T, d], and [T] whether each could be drawn.
    """
    drawn = take(y, stays.long().argmax(-1))
    return torch.where(judged[:, None], drawn, plain), stays.any(-1) | ~judged


def normalise(weights: Tensor, otherwise: Tensor) -> Tensor:
    """Divide weights [..., V] by their sum; `otherwise` where all are zero (q = p rounds to nothing left)."""
    total = weights.sum(-1, keepdim=True)
    return torch.where(total > 0, weights / total.clamp_min(torch.finfo(weights.dtype).tiny), otherwise)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """Residual distribution norm((p - q)+), [..., V]: what min(p, q) leaves of p (2211.17192)."""
    return normalise((p - q).clamp_min(0.0), otherwise=p)


def draw(p: Tensor, random: RandomStream, place: Tensor, purpose: Purpose | Tensor) -> Tensor:
    """Draw one token from p [..., V] for each output index [...], by the Gumbel-max trick."""
    keys = place if place.dim() == 2 else place[:, None]
    if isinstance(purpose, Tensor):
        purpose = purpose.view(keys.shape)
    noise = random.gumbel(keys, purpose, p.shape[-1], p.dtype).view(p.shape)
    return (p.log() + noise).argmax(-1)
