"""Routing of Arbitrage (2512.05033): a step is accepted whole, or written anew by the target. Lossy."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mmspec.core.distributions import Scores
from mmspec.core.draft import DraftKind, Tree
from mmspec.core.indexing import take
from mmspec.core.interfaces import AcceptanceRule
from mmspec.core.promise import Level
from mmspec.core.random_stream import RandomStream
from mmspec.core.verdict import Path
from mmspec.validation import require_number


@dataclass(frozen=True)
class StepMargin(AcceptanceRule):
    """Accepts a drafted step if its tokens are nearly as likely as the target's likeliest ones.

    The margin of a step is the mean over its tokens of max log p - log p(token). It stands for the advantage
    of a step of the target's own, which the paper (2512.05033) predicts with a trained reward model.

    Args:
        advantage: largest margin of an accepted step, in nats per token; 0 accepts steps of the likeliest
            tokens alone.

    Raises:
        InputError: the advantage is out of range.
    """

    advantage: float = 0.1

    sound_for = frozenset(DraftKind)
    exactness = Level.LOSSY
    bound = "mean log-probability of a drafted step at most `advantage` below that of the likeliest tokens"
    chains_only = True
    judges_whole = True
    keeps_greedy = False

    def __post_init__(self) -> None:
        require_number("advantage", self.advantage, 0.0, 1e3, "must be between 0 and 1000 nats per token")

    def verify(self, draft: Tree, scores: Scores, random: RandomStream, emitted: Tensor) -> Path:
        log_p, valid = scores.logits.log_softmax(-1)[:, :-1], draft.valid[:, 1:]
        margin = log_p.amax(-1) - log_p.gather(-1, draft.tokens[:, 1:, None])[..., 0]
        count = valid.sum(-1)
        node = count * (margin.where(valid, 0.0).sum(-1) <= self.advantage * count)
        return Path.at(draft, node, take(scores.choose(draft, random, emitted), node))
