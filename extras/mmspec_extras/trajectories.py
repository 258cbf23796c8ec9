"""Policy optimisation of masked models on the states of their own decoding: CJ-GRPO (2509.23924).

A masked model that is trained on randomly masked outputs never sees the states of its decoding. Here each
token is learnt in the state in which a forward pass decided it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mmspec.core.distributions import Scores
from mmspec.core.draft import Block
from mmspec.core.interfaces import TargetOutput
from mmspec.core.random_stream import RandomStream
from mmspec.core.verdict import Fill, Measured, Verdict
from mmspec.places.policies import PlaceRule, Places


@dataclass(frozen=True)
class Recorder(PlaceRule):
    """The decisions of another rule, and a record of them.

    Attributes:
        rule: the other rule.
        fills: its decisions, one for each forward pass.
    """

    rule: PlaceRule = field(kw_only=True)
    fills: list[Fill] = field(default_factory=list, compare=False)

    def choose(self, places: Places) -> Tensor:
        return self.rule.choose(places)

    def decide(
        self, draft: Block, output: TargetOutput, scores: Scores, random: RandomStream, first: Tensor
    ) -> tuple[Verdict, Measured]:
        fill, measured = self.rule.decide(draft, output, scores, random, first)
        if isinstance(fill, Fill):
            self.fills.append(fill)
        return fill, measured


def trajectories(fills: Sequence[Fill]) -> tuple[Tensor, Tensor]:
    """Return the tokens [B, N] of a batch, and the forward pass that decided each, from 0; -1 for none.

    Args:
        fills: decisions of all forward passes, in which no row has left the batch.
    """
    shape = len(fills[0].places), 1 + max(int(fill.places.amax()) for fill in fills)
    tokens, step = (fills[0].places.new_full(shape, -1) for _ in range(2))
    for number, fill in enumerate(fills):
        row, at = fill.decided.nonzero(as_tuple=True)
        place = fill.places[row, at]
        tokens[row, place], step[row, place] = fill.values[row, at], number
    return tokens, step


def advantages(rewards: Tensor) -> Tensor:
    """Return the advantages [P, G] of G outputs for each of P prompts: rewards minus their mean, scaled."""
    centred = rewards - rewards.mean(1, keepdim=True)
    return centred / (centred.square().mean(1, keepdim=True).sqrt() + 1e-4)


def trajectory_loss(
    new: Tensor,
    old: Tensor,
    base: Tensor,
    advantage: Tensor,
    row: Tensor,
    step: Tensor,
    *,
    clip: float = 0.5,
    kl: float = 0.04,
) -> Tensor:
    """Return the loss of n decided tokens: the mean of each forward pass, of these means, and of the rows.

    Args:
        new: [n] log-probabilities of the tokens in the states in which they were decided.
        old: [n] the same under the model that decided them.
        base: [n] the same under the model before the training.
        advantage: [n] of the output that contains the token.
        row: [n] number of that output.
        step: [n] forward pass that decided the token.
        clip: largest change of a ratio of probabilities that is rewarded.
        kl: weight of the divergence from `base` (the estimator exp(d) - d - 1).
    """
    ratio, apart = (new - old).exp(), base - new
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
    each = kl * (apart.exp() - apart - 1) - gain
    passes, of = torch.stack([row, step]).unique(dim=1, return_inverse=True)
    by_pass = mean_by(each, of, passes.shape[1])
    rows, of = passes[0].unique(return_inverse=True)
    return mean_by(by_pass, of, len(rows)).mean()


def mean_by(values: Tensor, group: Tensor, count: int) -> Tensor:
    """[count] means of the values [n] of each group [n]."""
    total = values.new_zeros(count).index_add(0, group, values)
    return total / group.bincount(minlength=count)
