"""Acceptance rules with a planted bug, which the checks must find."""

import torch

from mmspec.core.indexing import take
from mmspec.core.verdict import Path


def accept_everything(self, draft, scores, random, emitted):
    """Accepts every valid draft token."""
    node = torch.where(draft.valid, draft.depth, 0).argmax(-1)
    return Path.at(draft, node, take(scores.choose(draft, random, emitted), node))


def stale_noise(self, draft, scores, random, emitted):
    """Draws the first place of a block with the noise of an earlier one; greedy decoding has none."""
    stale, right = (scores.choose(draft, random, emitted - shift) for shift in (draft.max_depth, 0))
    choice = torch.cat([stale[:, :1], right[:, 1:]], dim=1)
    matches = draft.valid & (draft.tokens == choice.gather(1, draft.parents))
    matches[:, 0] = True
    reached = (matches[:, None, :] | ~draft.ancestors).all(-1)
    node = torch.where(reached, draft.depth, -1).argmax(-1)
    return Path.at(draft, node, take(choice, node))
