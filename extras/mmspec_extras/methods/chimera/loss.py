"""Loss of Chimera (2402.15758): cross-entropy of all levels with the target's distributions."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmspec.heads.model import EMBEDDINGS, HIDDEN
from mmspec.methods.hydra.loss import HydraLoss, same
from mmspec.training.losses.base import Blocks, Reading
from mmspec_extras.methods.chimera.head import GRAM, ChimeraHead


class ChimeraLoss(HydraLoss):
    """Cross-entropy of all levels with the target's distributions.

    Args:
        discount: weight of level i is discount^i.
    """

    head: ChimeraHead

    def logits(self, reading: Reading, blocks: Blocks) -> Tensor:
        states = reading.taps[HIDDEN]
        before = pad(reading.taps[EMBEDDINGS], (0, 0, GRAM - 1, 0))
        trigrams = self.head.encode(before.unfold(1, GRAM, 1).transpose(-1, -2))
        rows, place = torch.cat([states, trigrams], 1), torch.arange(states.shape[1], device=states.device)
        levels, state = [], states[blocks.row, blocks.before]
        for level, ahead in enumerate(blocks.ahead.unbind(1)):
            fused = self.head(rows, place.repeat(2)[None], visible_at(place, level)[None, None])
            at_level = fused[blocks.row, len(place) + ahead]
            levels.append(self.head.decode(state, at_level, level, same))
        decoded = torch.stack(levels, 1)
        return decoded if self.head.lm_heads else self.read_out(decoded)


def visible_at(place: Tensor, level: int) -> Tensor:
    """[2L, 2L] which of the states and trigrams of L tokens each of them sees at a level.

    The trigram of token t sees those from the root's on, token t - level, and the states before the root.
    """
    back = place[:, None] - place  # from each token back to each other
    states = torch.cat([back >= 0, torch.zeros_like(back, dtype=torch.bool)], 1)
    trigrams = torch.cat([back > level, (back >= 0) & (back <= level)], 1)
    return torch.cat([states, trigrams])
