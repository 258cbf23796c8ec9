"""Sibling draws in a tree: independent, without replacement, or with the target's own noise.

SpecTr's chains and MCSD's trees are drawn independently or without replacement; EAGLE-1 and SpecInfer draw
without replacement. A rule verifies a drawn candidate with the q that it was drawn from. Therefore the shape
of a level must not depend on the tokens drawn there.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from mmspec.core.draft import DraftKind
from mmspec.core.random_stream import Purpose, RandomStream
from mmspec.core.sampling import Sampler
from mmspec.errors import InputError
from mmspec.kernels.redraw import invert_often
from mmspec.registry import did_you_mean

KIND_OF_SAMPLING = {
    "coupled": DraftKind.COUPLED,
    "greedy": DraftKind.POINT,
    "sampled": DraftKind.IID,
    "without_replacement": DraftKind.WITHOUT_REPLACEMENT,
}


def kind_of(sampling: str, allowed: Collection[str] = KIND_OF_SAMPLING.keys()) -> DraftKind:
    """Return the kind of drafts for a value of `sampling`.

    Raises:
        InputError: the value is not one of `allowed`.
    """
    if sampling not in allowed:
        raise InputError("sampling", sampling, did_you_mean(sampling, allowed))
    return KIND_OF_SAMPLING[sampling]


@dataclass(frozen=True)
class SiblingDraws:
    """Level-by-level draws of one round's candidates.

    Noise is keyed by the output index of a place and by that of the round's first place, so that no two
    rounds use the same noise. The nodes of a level share noise, because a rule visits only one of them.
    Independent draws are the exception: equal siblings share their children there, so that each node has its
    own noise.

    Attributes:
        kind: POINT for the most likely tokens; COUPLED for draws with the target's noise; IID; or
            WITHOUT_REPLACEMENT by the Gumbel top-k trick (Kool et al., 1903.06059).
        sampler: settings of the rows; greedy rows get the most likely candidates, which is exact for a
            one-hot p.
        random: of the rows.
        first: [B] output index of level 1.
        vocabulary: V of the target.
        names: [V'] target token of each log-probability; None for the whole vocabulary.
    """

    kind: DraftKind
    sampler: Sampler
    random: RandomStream
    first: Tensor
    vocabulary: int
    names: Tensor | None = None

    def __call__(self, log_p: Tensor, count: int, level: int) -> tuple[Tensor, Tensor]:
        """Draw children of the nodes of a level with log-probabilities log_p [B, w, V'].

        Returns:
            [B, w, count] children in the order of the draws, and the log-probability that the target chooses
            each. With the target's own noise g, known to both, this is the softmax of log_p + g: it is 1 for
            the best where the target's log-probabilities are equal, and exact if they differ by Gumbel noise.
        """
        greedy = self.sampler.is_greedy(log_p)
        if greedy is True or self.kind is DraftKind.POINT:
            said, children = log_p.topk(count)
            return children, said
        place, random = (self.first + (level - 1))[:, None], self.random.at(self.first[:, None])
        if self.kind is DraftKind.IID:
            nodes = log_p.shape[1]
            u = random.uniform(place, Purpose.DRAFT, 2 * count * nodes, torch.float64)
            drawn = invert_often(log_p.exp(), u.view(-1, nodes, count, 2))
            chances = log_p
        else:
            purpose = Purpose.TARGET if self.kind is DraftKind.COUPLED else Purpose.DRAFT
            noise = random.gumbel(place, purpose, self.vocabulary, log_p.dtype)  # [B, 1, V]
            perturbed = log_p + (noise if self.names is None else noise[..., self.names])
            drawn = perturbed.topk(count).indices
            chances = perturbed.log_softmax(-1) if self.kind is DraftKind.COUPLED else log_p
        if greedy is not False:
            drawn = torch.where(greedy, log_p.topk(count).indices, drawn)
            chances = torch.where(greedy, log_p, chances)
        return drawn, chances.gather(-1, drawn)
