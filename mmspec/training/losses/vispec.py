"""Loss of a ViSpec head, which learns its target's distributions, on its own guesses too (2509.15235).

ViSpec trains on text with EAGLE's loss first, and then with probabilities and ranks on long answers about
images. Here all are learnt at once, from random weights; each weighs what it is told to.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmspec.compressors.gate import Gate
from mmspec.decoding.cache import RaggedCache
from mmspec.decoding.draft import Nodes
from mmspec.errors import InputError
from mmspec.models.eagle import EagleHead
from mmspec.models.feature_head import HIDDEN
from mmspec.targets import CausalTarget
from mmspec.targets.attention import mask_dtype
from mmspec.training.data.sequences import DrafterBatch
from mmspec.training.losses.eagle import EagleLoss, HeadRows, imitation

__all__ = ["ViSpecLoss", "ranking", "read_guesses"]

RANKS = 10


class ViSpecLoss(EagleLoss):
    """L1 distance of probabilities, ranks of the likeliest tokens, and EAGLE's loss; at two depths.

    The second depth is a step of multi-token prediction: a row is made of the head's own guess of the
    state before it, as the rows of candidates are.

    Args:
        imitation: weight of EAGLE's loss, ViSpec's first stage; 0 leaves the second stage alone.
        probabilities: weight of the mean L1 distance between distributions.
        ranks: weight of `ranking`.

    Raises:
        InputError: the head's compressor chooses at random, and would choose anew at the second depth.
    """

    def __init__(
        self,
        head: EagleHead,
        target: CausalTarget,
        *,
        imitation: float = 1.0,
        probabilities: float = 10.0,
        ranks: float = 0.1,
    ) -> None:
        super().__init__(head, target)
        if isinstance(head.compressor, Gate):
            raise InputError("compressor", head.config.compressor, "one that does not choose at random")
        self.imitation, self.probabilities, self.ranks = imitation, probabilities, ranks

    def forward(self, batch: DrafterBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss, and figures: its parts, and how often the likeliest tokens agree."""
        reading = self.read(batch)
        states = self.noisy(reading, batch.seed)
        first = self.rows(batch.examples, reading, states)
        hidden = self.head(first.rows, first.position_ids)
        guessed = states.index_put(first.at(first.counted), hidden[first.counted].to(states.dtype))
        second = self.rows(batch.examples, reading, guessed)
        again = second.counted & pad(first.counted[:, :-1], (1, 0))  # rows that follow a guess
        predicted = torch.cat([hidden[first.counted], read_guesses(self.head, first, second)[again]])
        true = torch.cat([reading.taps[HIDDEN][first.at(each)] for each in (first.counted, again)])
        logits, distribution = self.target.head(predicted).float(), self.target.head(true).float().softmax(-1)
        imitated, figures = imitation(predicted, true, logits, distribution)
        count = max(1, len(true))
        distance = (distribution - logits.softmax(-1)).abs().sum() / count
        order = ranking(distribution, logits).sum() / count
        loss = self.imitation * imitated + self.probabilities * distance + self.ranks * order
        return loss, figures | {"probabilities": distance, "ranks": order}


def read_guesses(head: EagleHead, first: HeadRows, second: HeadRows) -> Tensor:
    """[B, M, d] the head's states at rows made of its own guesses.

    Such a row sees itself and the rows of true states before it, as the children of a root do in decoding.
    """
    batch, count = first.source.shape
    place = torch.arange(count, device=first.source.device)
    before, own = place < place[:, None], place == place[:, None]
    seen = torch.cat([torch.cat([before | own, before]), torch.cat([torch.zeros_like(own), own])], 1)
    cache = RaggedCache(head.decoder.config, batch, 2 * count, place.device)
    slots, depths = (
        each.expand(batch, -1) for each in (torch.arange(2 * count, device=place.device), place.repeat(2))
    )
    cache.begin_score(slots, 2 * count)
    nodes = Nodes(slots, slots, depths, seen.expand(batch, -1, -1), count - 1)
    mask = cache.attention_mask(nodes, mask_dtype(head.decoder))
    rows = torch.cat([first.rows, second.rows], 1)
    positions = torch.cat([first.position_ids, second.position_ids], -1)
    hidden: Tensor = head(rows, positions, mask, cache)
    return hidden[:, count:]


def ranking(distribution: Tensor, logits: Tensor) -> Tensor:
    """[m] nats of the order in which distributions [m, V] rank their ten likeliest tokens (Plackett-Luce).

    One token after the other is drawn, without replacement and from these ten alone, by logits [m, V].
    """
    scores = logits.gather(-1, distribution.topk(min(RANKS, distribution.shape[-1])).indices)
    left = scores.flip(-1).logcumsumexp(-1).flip(-1)  # over the tokens that are not drawn yet
    return (left - scores).sum(-1)
