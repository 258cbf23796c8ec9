"""Rejection by the last transition of denoising chains, behind chains with the same noise."""

from __future__ import annotations

from torch import Tensor

from mmspec.acceptance.chain_rejection import ChainRejection
from mmspec.acceptance.residuals import sampled_distribution
from mmspec.decoding.denoising import Denoising, require_noise
from mmspec.decoding.distribution import Gaussian
from mmspec.decoding.draft import Draft, DraftKind
from mmspec.decoding.random_stream import Purpose, RandomStream
from mmspec.errors import InputError

__all__ = ["LastTransition", "last_transition"]


class LastTransition(ChainRejection):
    """Compares the normal distributions of the last states, behind chains of target and draft."""

    sound_for = frozenset({DraftKind.IID})
    judges = "vectors"

    def compared(
        self, draft: Draft, scores: Denoising, random: RandomStream, emitted: Tensor
    ) -> tuple[Gaussian, Gaussian]:
        q = sampled_distribution(draft)
        if scores.normalize:
            raise InputError("normalize_tokens", True, "False: a normalised state has no normal distribution")
        own = scores.draw(random, emitted[:, None] + draft.depth, Purpose.DRAFT)
        return self.last(scores, own), self.last(q, q.drawn)

    def last(self, distribution: Denoising, chains: Tensor) -> Gaussian:
        """Distributions of the last states of chains that `distribution` drew, as `last_transition`."""
        return last_transition(distribution, chains)


def last_transition(distribution: Denoising, chains: Tensor) -> Gaussian:
    """The normal distributions [T, n] of the last states of chains [T, n, S + 1, d]."""
    process = distribution.process
    require_noise(process)
    mean, std = process.transition(chains[..., -2, :].flatten(0, 1), process.steps - 1)
    shape = (*chains.shape[:2], process.size)
    return Gaussian(mean.view(shape), std.view(shape))
