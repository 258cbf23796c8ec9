"""Rejection of sampled chains: the algorithm of speculative sampling, over any distributions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mmspec.acceptance.residuals import last_purpose, sampled_distribution
from mmspec.decoding.distribution import Distribution
from mmspec.decoding.draft import Draft, DraftKind
from mmspec.decoding.interfaces import AcceptanceRule
from mmspec.decoding.random_stream import Purpose, RandomStream
from mmspec.decoding.verdict import Verdict

__all__ = ["ChainRejection"]


class ChainRejection(AcceptanceRule):
    """Accept x ~ q with probability min(1, p(x) / q(x)), else draw from norm((p - q)+).

    Leviathan et al., 2211.17192, algorithm 1; Chen et al., 2302.01318. One candidate per place; all
    places are judged at once, because a decision depends on its own place only. Where nothing was proposed,
    this is plain decoding.
    """

    sound_for = frozenset({DraftKind.IID, DraftKind.WITHOUT_REPLACEMENT})
    chains_only = True
    judges = "any"

    def verify(self, draft: Draft, scores: Distribution, random: RandomStream, emitted: Tensor) -> Verdict:
        if not draft.max_depth:
            return Verdict.root(draft, scores.choose(draft, random, emitted)[:, 0])
        scores, q = self.compared(draft, scores, random, emitted)
        steps = torch.arange(draft.max_depth, device=emitted.device)
        u = random.uniform(emitted[:, None] + steps, Purpose.ACCEPT, 1, scores.dtype)[..., 0]
        node, next_token, filled = scores.verify_chain(q, draft, u, random, emitted, last_purpose(draft))
        return replace(Verdict.at(draft, node, next_token), filled=filled)

    def compared(
        self, draft: Draft, scores: Any, random: RandomStream, emitted: Tensor
    ) -> tuple[Distribution, Distribution]:
        """Distributions p and q at every node that candidates are judged by; arguments as of `verify`."""
        return scores, sampled_distribution(draft)
