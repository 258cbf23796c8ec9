"""Typical acceptance: lossy by design, and labelled so."""

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
    """Accept a candidate if p(x) > min(epsilon, delta exp(-H(p))) (Medusa, 2401.10774, section 2.3.1).

    Candidates that pass are taken without a draw, the one with the deepest accepted path winning; so
    for a token that was accepted the output distribution is a point mass at it, and its total variation to p
    is 1 - p(x), less than 1 - min(epsilon, delta exp(-H(p))).

    Args:
        epsilon: hard threshold, which caps the other where the target is sure.
        delta: entropy-dependent threshold, delta exp(-H). Both defaults are Medusa's own, whose code calls
            them `posterior_threshold` and `posterior_alpha`.
    """

    epsilon: float = 0.09
    delta: float = 0.3

    sound_for = frozenset({DraftKind.POINT})
    exactness = Level.LOSSY
    bound = "TV at most 1 - min(epsilon, delta exp(-H(p))) per token"

    def __post_init__(self) -> None:
        for name in ("epsilon", "delta"):
            require_number(name, getattr(self, name), 0.0, 1.0, "0 to 1")

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
