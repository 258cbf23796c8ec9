"""Distributions over the values at the nodes of a draft, with the operations that the loop and the rules use.

Sample-and-match and rejection sampling work with all of them. Rules that read single tokens need
`Categorical`.
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
from mmspec.core.rows import Rows, concat, named, overwrite, select
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

The accelerator checks that they agree when it is built, so each rule can annotate its own kind.
"""

PROPOSALS = 8  # trial draws per round when a residual distribution is sampled by rejection
TOKEN_BYTES = 4  # size of a token id in `Pairs`


class Distribution(ABC):
    """Batch of distributions at [T, n] nodes, or at [T] nodes."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Data type of the uniforms that densities are compared with."""

    @abstractmethod
    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Return the distributions with `change` applied to each tensor [T, n, ...]."""

    def __getitem__(self, nodes: slice) -> Self:
        """Return the distributions at a range of nodes."""
        return self.map(lambda each: each[:, nodes])

    def at(self, node: Tensor) -> Self:
        """Return the distributions at one node [T] of each row, as [T]."""
        return self.map(lambda each: take(each, node))

    def flat(self) -> Self:
        """Flatten distributions [T, n] to [T * n], the nodes of each row in order."""
        return self.map(lambda each: each.flatten(0, 1))

    @classmethod
    @abstractmethod
    def stack(cls, parts: Sequence[Self]) -> Self:
        """Stack n distributions [T] to distributions [T, n]."""

    @abstractmethod
    def sample(self, random: RandomStream, place: Tensor, purpose: Purpose | Tensor) -> Tensor:
        """Draw a value from each, with noise keyed by the output indices `place` [T, n] or [T]."""

    def candidate(self, random: RandomStream, place: Tensor, purpose: Purpose) -> tuple[Tensor, Self]:
        """Draw a value from each, and return it with the distribution q that a rule verifies it against."""
        return self.sample(random, place, purpose), self

    def choose(self, draft: Tree, random: RandomStream, first: Tensor) -> Tensor:
        """Draw the target's own value after each node, with noise keyed by output index.

        Nodes at the same depth share their noise, because they compete for the same output index. A path
        along these values therefore emits the output of plain decoding with the same noise.

        Args:
            first: [T] output index of depth 1.
        """
        return self.sample(random, first[:, None] + draft.depth, Purpose.TARGET)

    @abstractmethod
    def verify_chain(
        self, q: AnyDistribution, draft: Tree, u: Tensor, random: RandomStream, emitted: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Verify a chain by rejection sampling (2211.17192, algorithm 1); self is p.

        A candidate x is accepted with probability min(1, p(x) / q(x)).

        Args:
            q: [T, n - 1] distributions of the same kind, from which the candidates were drawn.
            u: [T, n - 1] uniforms, one for each acceptance test.
            emitted: [T] output index of depth 1.

        Returns:
            [T] the last accepted node; the value after it, drawn from norm((p - q)+) if a candidate was
            rejected and from p otherwise; and [T] whether that value could be drawn in this round.
        """

    @abstractmethod
    def is_finite(self) -> Tensor:
        """Return where a value can be drawn: False where the parameters are NaN or infinite."""


class Categorical(Distribution, Rows):
    """Categorical distributions over V tokens.

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
        return self._merged(other, lambda own, new: concat(own, new, counts))

    def overwritten(self, slots: Sequence[int], other: Categorical, counts: tuple[int, int]) -> Categorical:
        return self._merged(other, lambda own, new: overwrite(own, slots, new, counts))

    def _merged(self, other: Categorical, merge: Callable[[Tensor, Tensor], Tensor]) -> Categorical:
        """Merge the rows of both."""
        return Categorical(merge(self.p, other.p))

    def compact(self, count: int) -> Categorical:
        """Return distributions with mass on `count` tokens in the representation that takes less memory.

        If more tokens have mass, the result is another distribution: apply `Sampler.within_top_k` before
        drawing.
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
    """Sparse categorical distributions over V tokens: k pairs of token and probability.

    Args:
        tokens: [T, n, k] int32 token ids.
        shares: [T, n, k] their probabilities.
        vocabulary: V.
    """

    def __init__(self, tokens: Tensor, shares: Tensor, vocabulary: int) -> None:
        self.tokens, self.shares, self.vocabulary = tokens, shares, vocabulary

    @classmethod
    def of(cls, p: Tensor, count: int) -> Pairs:
        """Keep the `count` most likely tokens of distributions [T, n, V], normalised."""
        shares, tokens = p.topk(count, dim=-1)
        total = shares.sum(-1, keepdim=True).clamp_min(torch.finfo(p.dtype).tiny)
        return cls(tokens.int(), shares / total, p.shape[-1])

    @property
    def p(self) -> Tensor:
        """[T, n, V] probabilities, computed on every access to save memory."""
        zeros = self.shares.new_zeros(*self.shares.shape[:-1], self.vocabulary)
        return zeros.scatter_add(-1, self.tokens.long(), self.shares)  # rows of smaller k end in zeros

    def map(self, change: Callable[[Tensor], Tensor]) -> Pairs:
        return Pairs(change(self.tokens), change(self.shares), self.vocabulary)

    def _merged(self, other: Categorical, merge: Callable[[Tensor, Tensor], Tensor]) -> Categorical:
        if not isinstance(other, Pairs):
            return super()._merged(other, merge)
        most = max(each.shares.shape[-1] for each in (self, other))
        one, two = (each.map(lambda part: pad(part, (0, most - part.shape[-1]))) for each in (self, other))
        tokens, shares = merge(one.tokens, two.tokens), merge(one.shares, two.shares)
        return Pairs(tokens, shares, self.vocabulary)


@dataclass(frozen=True)
class PointMass(Rows):
    """Distributions of deterministic candidates: all mass is at the candidate.

    Attributes:
        values: [T, n] ids, or [T, n, d] vectors.
    """

    row_fields = named("values")

    values: Tensor

    def map(self, change: Callable[[Tensor], Tensor]) -> PointMass:
        """Return the distributions with `change` applied to the values, as in `Distribution.map`."""
        return PointMass(change(self.values))


class Scores(Categorical):
    """Distributions given by logits of a target or a draft model: p = softmax(warped logits).

    Args:
        logits: [T, n, V] warped logits; with `warping`, raw logits [B, m, V], or [2B, m, V] under guidance.
        greedy: whether p is one-hot at the arg-max (temperature 0) and the logits are not scaled: one value
            for all rows, or [T, 1, 1].
        warping: guidance, temperature and truncation. Applied when a rule reads the logits, otherwise fused
            with the draw.
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
        """[T, n, V] logits after guidance and processors, before temperature and truncation."""
        return warp_logits(self.raw, self.warping.guidance()).view(*self.shape, self.raw.shape[-1])

    @once
    def p(self) -> Tensor:
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
        """Draw a token at every node; the arguments are those of `sample_tokens`."""
        if is_fused(self.raw):
            key, step = (None, 0) if self.greedy is True else (random.keys, random.step_of(purpose))
            tokens, self._finite = sample_tokens(self.raw, self.warping, key, place, purpose, step, node)
        else:  # `logits` is kept for rules that read it as well
            vocabulary = self.raw.shape[-1]
            noise = None if self.greedy is True else random.gumbel(place, purpose, vocabulary, self.dtype)
            tokens, self._finite = race(self.logits, noise, node, self.greedy)
        return tokens

    def is_finite(self) -> Tensor:
        return self.logits.amax(-1).isfinite() if self._finite is None else self._finite


class Continuous(Distribution):
    """Base of distributions over vectors: dataclasses whose tensor fields have the nodes in front."""

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
        """[T, n] log p(x) / q(x) of candidates x, drawn from distributions q of the same kind; p is self."""

    @property
    @abstractmethod
    def uniforms(self) -> int:
        """Number of uniforms that one draw takes."""

    @abstractmethod
    def propose(self, q: AnyDistribution, u: Tensor) -> tuple[Tensor, Tensor]:
        """Draw m trial values from p [T], given uniforms [T, m, uniforms].

        Returns:
            [T, m, d] the values, and [T, m] their log q / p.
        """

    def finish(
        self, q: AnyDistribution, judged: Tensor, random: RandomStream, place: Tensor, purpose: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Draw the value after the last accepted node: from norm((p - q)+) by rejection sampling, or from p.

        A value y ~ p, which is self, is kept with probability 1 - min(1, q(y) / p(y)). Each round makes a
        fixed number of trials. If all fail, the place stays open: the next round rejects the same candidate
        again and draws with fresh noise.

        Args:
            q: [T] of the candidate that was rejected there.
            judged: [T] True where a candidate was rejected; the value is drawn from p elsewhere.
            place: [T] output index.
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
        judged = pad(drawn, (0, 1)).gather(1, node[:, None])[:, 0]  # False past the last candidate
        refused = q.at(node.clamp_max(draft.max_depth - 1))
        return node, *self.at(node).finish(refused, judged, random, emitted + node, draft.last_purpose)


@dataclass(eq=False)
class Gaussian(Continuous):
    """Gaussian distributions of vectors with diagonal covariance.

    Args:
        mean, std: [T, n, d], or [T, d].
    """

    mean: Tensor
    std: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.mean.dtype

    def log_density(self, x: Tensor) -> Tensor:
        """Log density of vectors x [..., d] -> [...]."""
        z = (x - self.mean) / self.std
        return -(z.square() / 2 + self.std.log() + math.log(2 * math.pi) / 2).sum(-1)

    def draw(self, u: Tensor) -> Tensor:
        """Draw a vector from each, given uniforms [..., 2 d] -> [..., d]."""
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
