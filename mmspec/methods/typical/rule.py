"""Typical acceptance of Medusa (2401.10774). Lossy by design."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmspec.core.distributions import Scores
from mmspec.core.draft import DraftKind, Tree
from mmspec.core.indexing import take
from mmspec.core.interfaces import AcceptanceRule
from mmspec.core.promise import Level
from mmspec.core.random_stream import RandomStream
from mmspec.core.verdict import Path
from mmspec.trees.verification import end_at
from mmspec.validation import require_number


@dataclass(frozen=True)
class Typical(AcceptanceRule):
    """Accepts a candidate if p(x) > min(epsilon, delta exp(-H(p))) (Medusa, 2401.10774, section 2.3.1).

    Candidates that pass are accepted without a draw, and the deepest accepted path wins. The output
    distribution of an accepted token is therefore a point mass, with a total variation to p of 1 - p(x),
    which is less than 1 - min(epsilon, delta exp(-H(p))).

    Args:
        epsilon: hard threshold, 0 to 1, which caps the other one where the target's entropy is low
            (`posterior_threshold` of Medusa's code).
        delta: factor of the entropy-dependent threshold delta exp(-H), 0 to 1 (`posterior_alpha` of Medusa's
            code).
    """

    epsilon: float = 0.09
    delta: float = 0.3

    sound_for = frozenset({DraftKind.POINT})
    exactness = Level.LOSSY
    bound = "TV at most 1 - min(epsilon, delta exp(-H(p))) per token"

    def __post_init__(self) -> None:
        for name in ("epsilon", "delta"):
            require_number(name, getattr(self, name), 0.0, 1.0, "must be between 0 and 1")

    def verify(self, draft: Tree, scores: Scores, random: RandomStream, emitted: Tensor) -> Path:
        p = scores.p
        threshold = self.threshold(p).gather(1, draft.parents)
        p_x = p.gather(1, draft.parents[:, :, None].expand_as(p)).gather(-1, draft.tokens[:, :, None])[..., 0]
        node = draft.deepest(draft.valid & (p_x > threshold))
        return end_at(draft, node, take(p, node), random, emitted)

    def threshold(self, p: Tensor) -> Tensor:
        """[..., V] -> [...] the probability that a candidate must exceed."""
        entropy = torch.special.entr(p).sum(-1)
        return (self.delta * torch.exp(-entropy)).clamp_max(self.epsilon)
