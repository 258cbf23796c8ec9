"""Draws of the siblings of a tree: independently, without replacement, or with the target's own noise.

SpecTr's chains and MCSD's trees are drawn independently or without replacement; EAGLE-1 and SpecInfer draw
without. A rule judges a drawn candidate by the q that it was drawn from. Therefore the shape of a level must
not depend on what was drawn there.
"""

from __future__ import annotations

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
DRAWN = (DraftKind.IID, DraftKind.WITHOUT_REPLACEMENT)


def kind_of(sampling: str) -> DraftKind:
    """Find the kind of drafts that a way of sampling makes.

    Raises:
        InputError: no such way.
    """
    if sampling not in KIND_OF_SAMPLING:
        raise InputError("sampling", sampling, did_you_mean(sampling, KIND_OF_SAMPLING))
    return KIND_OF_SAMPLING[sampling]


@dataclass(frozen=True)
class SiblingDraws:
    """Draws of one round's candidates, level by level.

    Noise is keyed by the output index of a place and by that of the round's first, so that no round uses it
    again. The nodes of a level share noise, since a rule visits only one of them. Independent draws are the
    exception: there equal siblings share their children, so each node has noise of its own.

    Attributes:
        kind: POINT for the likeliest; COUPLED by the target's noise; IID; or WITHOUT_REPLACEMENT by the
            Gumbel top-k trick (Kool et al., 1903.06059).
        sampler: of the rows; greedy ones get the likeliest candidates, which is exact as p is one-hot there.
        random: of the rows.
        first: [B] output index that level 1 competes for.
        vocabulary: V of the target.
        names: [V'] target token of each log-probability; None if they are of all V.
    """

    kind: DraftKind
    sampler: Sampler
    random: RandomStream
    first: Tensor
    vocabulary: int
    names: Tensor | None = None

    def __call__(self, log_p: Tensor, count: int, level: int) -> Tensor:
        """Draw children of the nodes of a level, log_p [B, w, V'] -> [B, w, count] in order of the draws."""
        greedy = self.sampler.is_greedy(log_p)
        if greedy is True or self.kind is DraftKind.POINT:
            return log_p.topk(count).indices
        place, random = (self.first + (level - 1))[:, None], self.random.at(self.first[:, None])
        if self.kind is DraftKind.IID:
            nodes = log_p.shape[1]
            u = random.uniform(place, Purpose.DRAFT, 2 * count * nodes, torch.float64)
            drawn = invert_often(log_p.exp(), u.view(-1, nodes, count, 2))
        else:
            purpose = Purpose.TARGET if self.kind is DraftKind.COUPLED else Purpose.DRAFT
            noise = random.gumbel(place, purpose, self.vocabulary, log_p.dtype)  # [B, 1, V]
            drawn = (log_p + (noise if self.names is None else noise[..., self.names])).topk(count).indices
        return drawn if greedy is False else torch.where(greedy, log_p.topk(count).indices, drawn)

    @property
    def is_drawn(self) -> bool:
        """Whether candidates are judged by the distribution that they were drawn from."""
        return self.kind in DRAWN
