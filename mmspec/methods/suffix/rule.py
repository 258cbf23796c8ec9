"""Suffix acceptance: joint verification of a run of draft tokens (SJD-SV, 2609.13245). Lossy."""

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
from mmspec.kernels.chain import residual
from mmspec.trees.verification import end_at, place_uniforms, sampled_distribution
from mmspec.validation import require_number


@dataclass(frozen=True)
class Suffix(AcceptanceRule):
    """Accepts a run of draft tokens by the product of its ratios, even if its first token was rejected.

    SJD-SV (2609.13245): our reading of its description, not checked against the paper. A run is a stretch
    of the draft on which p(x) does not fall. Where u > p(x) / q(x), the rule accepts the longest part of the
    run from x on whose product of p / q is at least u and at least `confidence`. If no part of several tokens
    passes, x is replaced by a draw from norm((p - q)+).

    A token that would be rejected may thus be accepted with those after it, so that the output distribution
    differs from the target's. The difference has no closed form per place and is not measured. Where p(x)
    falls from token to token, the rule equals speculative sampling.

    Args:
        confidence: least product of the ratios of a run, 0 to 1.

    Raises:
        InputError: a value is out of range.
    """

    confidence: float = 0.8

    sound_for = frozenset({DraftKind.IID, DraftKind.WITHOUT_REPLACEMENT})
    exactness = Level.LOSSY
    chains_only = True

    def __post_init__(self) -> None:
        require_number("confidence", self.confidence, 0.0, 1.0, "must be between 0 and 1")

    def verify(self, draft: Tree, scores: Scores, random: RandomStream, emitted: Tensor) -> Path:
        q, p = sampled_distribution(draft).p, scores.p
        u = place_uniforms(draft, random, emitted, 1, p.dtype)[..., 0]  # [B, K]
        x = draft.tokens[:, 1:, None]
        p_x, q_x = p[:, :-1].gather(-1, x)[..., 0], q.gather(-1, x)[..., 0]
        drawn = draft.valid[:, 1:] & (q_x > 0)
        node = self.count_accepted(p_x.where(drawn, 0.0), q_x.where(drawn, 1.0), u)
        p_node = take(p, node)
        judged = torch.nn.functional.pad(drawn, (0, 1)).gather(1, node[:, None])
        left = residual(p_node, take(q, node.clamp_max(draft.max_depth - 1))) if draft.max_depth else p_node
        return end_at(draft, node, torch.where(judged, left, p_node), random, emitted)

    def count_accepted(self, p_x: Tensor, q_x: Tensor, u: Tensor) -> Tensor:
        """Return [B] numbers of accepted tokens, from their probabilities and uniforms [B, K]."""
        steps = p_x.shape[1]
        step = torch.arange(steps, device=p_x.device)
        alone = (u * q_x <= p_x) & (p_x > 0)
        falls = torch.ones_like(alone)
        falls[:, 1:] = (p_x[:, 1:] < p_x[:, :-1]) | (p_x[:, :-1] == 0)
        run = falls.long().cumsum(-1)
        ratio = p_x.clamp_min(torch.finfo(p_x.dtype).tiny).log() - q_x.log()
        total = ratio.cumsum(-1)
        product = (total[:, None, :] - (total - ratio)[:, :, None]).exp()  # [B, K, K] from first to last
        joint = (run[:, :, None] == run[:, None, :]) & (step > step[:, None]) & ~alone[:, :, None]
        joint = joint & (u[:, :, None] <= product) & (product >= self.confidence) & (p_x > 0)[:, None, :]
        onward = torch.cat([(step + alone)[:, :, None], torch.where(joint, step + 1, 0)], -1).amax(-1)
        onward = torch.nn.functional.pad(onward, (0, 1), value=steps)  # [B, K + 1] next place from each
        for _ in range(steps.bit_length()):
            onward = onward.gather(1, onward)
        return onward[:, 0]
