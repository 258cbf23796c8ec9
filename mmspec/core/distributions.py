"""Distributions of the values at the nodes of a draft, with the few operations that loop and rules use.

Matching and rejection are general over all of them. Rules that look at single tokens take `Categorical`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmspec.core.indexing import take
from mmspec.core.once import once
from mmspec.core.random_stream import Purpose, RandomStream, box_muller
from mmspec.core.rows import Rows, concat, named, select
from mmspec.kernels import Warping, sample_tokens, verify_chain, warp_logits
from mmspec.kernels.sampling import is_fused, race
from mmspec.open_types import Keywords

if TYPE_CHECKING:
    from mmspec.core.draft import Tree

__all__ = [
    "AnyDistribution",
    "Categorical",
    "Continuous",
    "Distribution",
    "Gaussian",
    "Pairs",
    "PointMass",
    "Scores",
    "draw",
]

AnyDistribution: TypeAlias = Any
"""A `Distribution` of the kind that target, drafter and rule share: `Categorical`, `Denoising` or `Gaussian`.

That they share one is checked when an accelerator is built, so that each rule names its own kind.
"""

PROPOSALS = 8  # of a residual that is drawn by rejection, in each round
TOKEN_BYTES = 4  # of an id in `Pairs`


class Distribution(ABC):
    """Distributions at [T, n] nodes, or [T] of them."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Number format of the uniforms that densities are compared with."""

    @abstractmethod
    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Return the distributions of which each tensor [T, n, ...] is changed."""

    def __getitem__(self, nodes: slice) -> Self:
        """Return the distributions at a range of nodes."""
        return self.map(lambda each: each[:, nodes])

    def at(self, node: Tensor) -> Self:
        """Return the distributions at one node [T] of each row, as [T]."""
        return self.map(lambda each: take(each, node))

    def flat(self) -> Self:
        """Return distributions [T, n] as [T * n], the nodes of each row one after another."""
        return self.map(lambda each: each.flatten(0, 1))

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

    def choose(self, draft: Tree, random: RandomStream, first: Tensor) -> Tensor:
        """Draw the target's own value after each node, with noise keyed by output index.

        Nodes at one depth share their noise: it belongs to the output index that they compete for. A walk
        along these values therefore emits what plain decoding emits with the same noise.

        Args:
            first: [T] output index that depth 1 competes for.
        """
        return self.sample(random, first[:, None] + draft.depth, Purpose.TARGET)

    @abstractmethod
    def verify_chain(
        self, q: AnyDistribution, draft: Tree, u: Tensor, random: RandomStream, emitted: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Judge a chain by min(1, p(x) / q(x)), and draw what follows (2211.17192, algorithm 1); self is p.

        Args:
            q: [T, n - 1] distributions of the same kind, that the candidates were drawn from.
            u: [T, n - 1] uniforms that the candidates are judged with.
            emitted: [T] output index that depth 1 competes for.

        Returns:
            [T] the last accepted node; the value after it, drawn from norm((p - q)+) where a candidate was
            refused and from p elsewhere; and [T] whether that could be drawn in this round.
        """

    @abstractmethod
    def is_finite(self) -> Tensor:
        """Return where a value can be drawn: False where numbers are NaN or infinite."""


class Categorical(Distribution, Rows):
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

    def map(self, change: Callable[[Tensor], Tensor]) -> Categorical:
        return Categorical(change(self.p))

    @classmethod
    def stack(cls, parts: Sequence[Categorical]) -> Categorical:
        return Categorical(torch.stack([part.p for part in parts], 1))

    def part(self, rows: Sequence[int], count: int | None = None) -> Categorical:
        return self.map(lambda each: select(each, rows, count))

    def joined(self, other: Categorical, counts: tuple[int, int]) -> Categorical:
        return Categorical(concat(self.p, other.p, counts))

    def compact(self, count: int) -> Categorical:
        """Return distributions in which `count` tokens have mass in the form that takes less memory.

        Where more have mass, the result is another distribution: draw behind `Sampler.within_top_k`.
        """
        tokens, size = self.p.shape[-1], self.p.itemsize
        return Pairs.of(self.p, count) if count * (TOKEN_BYTES + size) < tokens * size else self

    def sample(self, random: RandomStream, place: Tensor, purpose: Purpose | Tensor) -> Tensor:
        return draw(self.p, random, place, purpose)

    def verify_chain(
        self, q: Categorical, draft: Tree, u: Tensor, random: RandomStream, emitted: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        purpose = draft.last_purpose
        step = random.step_of(purpose)
        node, token = verify_chain(
            self.p, q.p, draft.tokens, draft.valid, u, random.keys, emitted, purpose, step
        )
        return node, token, torch.ones_like(node, dtype=torch.bool)

    def is_finite(self) -> Tensor:
        return self.p.amax(-1).isfinite()


class Pairs(Categorical):
    """Distributions over V tokens of which k have mass, as pairs of token and probability.

    Args:
        tokens: [T, n, k] int32 token ids.
        shares: [T, n, k] their probabilities.
        vocabulary: V.
    """

    def __init__(self, tokens: Tensor, shares: Tensor, vocabulary: int) -> None:
        self.tokens, self.shares, self.vocabulary = tokens, shares, vocabulary

    @classmethod
    def of(cls, p: Tensor, count: int) -> Pairs:
        """Keep the `count` likeliest tokens of distributions [T, n, V], normalised."""
        shares, tokens = p.topk(count, dim=-1)
        total = shares.sum(-1, keepdim=True).clamp_min(torch.finfo(p.dtype).tiny)
        return cls(tokens.int(), shares / total, p.shape[-1])

    @property
    def p(self) -> Tensor:
        """[T, n, V] probabilities, made anew each time: what keeps pairs wants to keep nothing larger."""
        zeros = self.shares.new_zeros(*self.shares.shape[:-1], self.vocabulary)
        return zeros.scatter_add(-1, self.tokens.long(), self.shares)  # rows of a smaller k end in zeros

    def map(self, change: Callable[[Tensor], Tensor]) -> Pairs:
        return Pairs(change(self.tokens), change(self.shares), self.vocabulary)

    def joined(self, other: Categorical, counts: tuple[int, int]) -> Any:  # pairs, if both are
        if not isinstance(other, Pairs):
            return super().joined(other, counts)
        most = max(each.shares.shape[-1] for each in (self, other))
        one, two = (each.map(lambda part: pad(part, (0, most - part.shape[-1]))) for each in (self, other))
        tokens, shares = concat(one.tokens, two.tokens, counts), concat(one.shares, two.shares, counts)
        return Pairs(tokens, shares, self.vocabulary)


@dataclass(frozen=True)
class PointMass(Rows):
    """Distributions of candidates that no draw of the draft's own decided: all mass is at the candidate.

    Attributes:
        values: [T, n] ids, or [T, n, d] vectors.
    """

    row_fields = named("values")

    values: Tensor

    def map(self, change: Callable[[Tensor], Tensor]) -> PointMass:
        """Return the distributions of which the values are changed, as of `Distribution`."""
        return PointMass(change(self.values))


class Scores(Categorical):
    """Distributions of a target, or of a draft model, given by its logits; p = softmax(warped logits).

    Args:
        logits: [T, n, V] warped; with `warping`, as the model gave them, [B, m, V], or [2B, m, V] under
            guidance.
        greedy: p is one-hot at the arg-max (temperature 0), and logits are not scaled: in all rows or none,
            or [T, 1, 1] where.
        warping: what is promised of the logits; done where a rule asks for them, and on the way to tokens
            otherwise.
        shape: T and n.
    """

    def __init__(
        self,
        logits: Tensor,
        greedy: bool | Tensor,
        warping: Warping | None = None,
        shape: Sequence[int] | None = None,
    ) -> None:
        self.raw, self.greedy = logits, greedy
        self.warping = Warping((float(not greedy),)) if warping is None else warping
        self.shape = logits.shape[:2] if shape is None else shape
        self._finite: Tensor | None = None

    @once
    def logits(self) -> Tensor:
        """[T, n, V] warped logits, float32 (float64 for float64 models)."""
        return warp_logits(self.raw, self.warping).view(*self.shape, self.raw.shape[-1])

    @once
    def own_logits(self) -> Tensor:
        """[T, n, V] logits behind guidance and processors, before temperature and truncation."""
        guided = Warping((0.0,), guidance_scale=self.warping.guidance_scale)
        return warp_logits(self.raw, guided).view(*self.shape, self.raw.shape[-1])

    @once
    def p(self) -> Tensor:  # computed where a rule asks for it
        if self.greedy is False:
            return self.logits.softmax(-1)
        likeliest = torch.zeros_like(self.logits).scatter(-1, self.logits.argmax(-1, keepdim=True), 1.0)
        if self.greedy is True:
            return likeliest
        return torch.where(self.greedy, likeliest, self.logits.softmax(-1))

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.raw.dtype == torch.float64 else torch.float32

    def sample(self, random: RandomStream, place: Tensor, purpose: Purpose | Tensor) -> Tensor:
        if isinstance(purpose, Tensor):
            return super().sample(random, place, purpose)
        return self._draw(random, place, purpose)

    def choose(self, draft: Tree, random: RandomStream, first: Tensor) -> Tensor:
        index = first[:, None] + torch.arange(draft.max_depth + 1, device=first.device)
        return self._draw(random, index, Purpose.TARGET, None if draft.is_chain else draft.depth)

    def _draw(
        self, random: RandomStream, place: Tensor, purpose: Purpose, node: Tensor | None = None
    ) -> Tensor:
        """Draw a token at every node; arguments as of `sample_tokens`."""
        if is_fused(self.raw):
            key, step = (None, 0) if self.greedy is True else (random.keys, random.step_of(purpose))
            tokens, self._finite = sample_tokens(self.raw, self.warping, key, place, purpose, step, node)
        else:  # warped once, for rules that ask for the logits as well
            vocabulary = self.raw.shape[-1]
            noise = None if self.greedy is True else random.gumbel(place, purpose, vocabulary, self.dtype)
            tokens, self._finite = race(self.logits, noise, node, self.greedy)
        return tokens

    def is_finite(self) -> Tensor:
        return self.logits.amax(-1).isfinite() if self._finite is None else self._finite


class Continuous(Distribution):
    """Distributions of vectors: dataclasses, whose tensors are those of the nodes."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    proposals = PROPOSALS

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        changed: Keywords = {name: change(held) for name, held in self._tensors().items()}
        return replace(self, **changed)

    @classmethod
    def stack(cls, parts: Sequence[Self]) -> Self:
        held = [part._tensors() for part in parts]
        stacked: Keywords = {name: torch.stack([each[name] for each in held], 1) for name in held[0]}
        return replace(parts[0], **stacked)

    def _tensors(self) -> dict[str, Tensor]:
        held = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in held.items() if isinstance(value, Tensor)}

    @abstractmethod
    def log_ratio(self, x: Tensor, q: AnyDistribution) -> Tensor:
        """[T, n] log p(x) / q(x) of candidates x, drawn from distributions q of the same kind; self is p."""

    @property
    @abstractmethod
    def uniforms(self) -> int:
        """Number of uniforms that a proposal takes."""

    @abstractmethod
    def propose(self, q: AnyDistribution, u: Tensor) -> tuple[Tensor, Tensor]:
        """Draw proposals from p [T] by uniforms [T, m, uniforms].

        Returns:
            [T, m, d] the proposals, and [T, m] their log q / p.
        """

    def finish(
        self, q: AnyDistribution, judged: Tensor, random: RandomStream, place: Tensor, purpose: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Draw what follows the last accepted node: from norm((p - q)+) by rejection, or from p.

        Self is p [T]; y ~ p stays with 1 - min(1, q(y) / p(y)). A round makes a fixed number of proposals.
        Where all of them fail, the place stays open; the next round meets the same refused candidate again,
        and goes on with other noise.

        Args:
            q: [T] of the candidate that was refused there.
            judged: [T] True where one was, and p itself is not drawn from.
            place: [T].
            purpose: [T] of the noise.

        Returns:
            The values, and [T] whether each could be drawn in this round.
        """
        plain = self.sample(random, place, purpose)
        u = random.uniform(place[:, None], Purpose.RETRY, self.proposals * (self.uniforms + 1), self.dtype)
        u = u.view(len(place), self.proposals, -1)
        y, log_ratio = self.propose(q, u[..., 1:])
        stays = u[..., 0] < -torch.expm1(log_ratio.clamp_max(0.0))
        drawn = take(y, stays.long().argmax(-1))
        return torch.where(judged[:, None], drawn, plain), stays.any(-1) | ~judged

    def verify_chain(
        self, q: AnyDistribution, draft: Tree, u: Tensor, random: RandomStream, emitted: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        drawn = draft.valid[:, 1:]
        passes = u.log() <= self[:-1].log_ratio(draft.tokens[:, 1:], q)
        node = (drawn & passes).long().cumprod(-1).sum(-1)
        judged = pad(drawn, (0, 1)).gather(1, node[:, None])[:, 0]  # past the end: False
        refused = q.at(node.clamp_max(draft.max_depth - 1))
        return node, *self.at(node).finish(refused, judged, random, emitted + node, draft.last_purpose)


@dataclass(eq=False)
class Gaussian(Continuous):
    """Normal distributions of vectors, with a variance for each dimension.

    Args:
        mean, std: [T, n, d], or [T, d].
    """

    mean: Tensor
    std: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.mean.dtype

    def log_density(self, x: Tensor) -> Tensor:
        """Log density of a vector under each, [..., d] -> [...]."""
        z = (x - self.mean) / self.std
        return -(z.square() / 2 + self.std.log() + math.log(2 * math.pi) / 2).sum(-1)

    def draw(self, u: Tensor) -> Tensor:
        """Draw a vector from each, by uniforms [..., 2 d] -> [..., d]."""
        return self.mean + self.std * box_muller(u)

    def sample(self, random: RandomStream, place: Tensor, purpose: Purpose | Tensor) -> Tensor:
        keys = place if place.dim() == 2 else place[:, None]
        if isinstance(purpose, Tensor):
            purpose = purpose.view(keys.shape)
        return self.draw(random.uniform(keys, purpose, self.uniforms, self.dtype).view(*place.shape, -1))

    def log_ratio(self, x: Tensor, q: Self) -> Tensor:
        return self.log_density(x) - q.log_density(x)

    @property
    def uniforms(self) -> int:
        return 2 * self.mean.shape[-1]

    def propose(self, q: Self, u: Tensor) -> tuple[Tensor, Tensor]:
        p, q = (one.map(lambda each: each[:, None]) for one in (self, q))
        y = p.draw(u)
        return y, q.log_density(y) - p.log_density(y)

    def is_finite(self) -> Tensor:
        return (self.mean.isfinite() & self.std.isfinite()).all(-1)


def draw(p: Tensor, random: RandomStream, place: Tensor, purpose: Purpose | Tensor) -> Tensor:
    """Draw one token from p [..., V] for each output index [...], by the Gumbel-max trick."""
    keys = place if place.dim() == 2 else place[:, None]
    if isinstance(purpose, Tensor):
        purpose = purpose.view(keys.shape)
    noise = random.gumbel(keys, purpose, p.shape[-1], p.dtype).view(p.shape)
    return (p.log() + noise).argmax(-1)
