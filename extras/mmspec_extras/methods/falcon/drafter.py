"""Drafter of Falcon (2412.12639): blocks of k tokens, which branch into a tree.

The levels of a block are a product of its k distributions. The next block is read after each candidate that
ends one: the LSTM continues from the state of that candidate's path, and the block's k rows see each other
and the rows of the path. Siblings therefore never depend on each other.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mmspec.core.canvas import Canvas
from mmspec.core.draft import Draft, Nodes
from mmspec.core.indexing import pick, take
from mmspec.heads.feature_session import FeatureDrafter, FeatureSession
from mmspec_extras.methods.falcon.head import STATE, FalconHead


class Ends(NamedTuple):
    """The w nodes that end a block, which the head has read.

    Attributes:
        predicted: [R, w, k, d] hidden states of the k tokens from each on.
        state: [R, w, STATE, d] state of the LSTM after each.
        seen: [B, w, m] slots of the drafted rows on its path.
        depths: [m] of these slots.
    """

    predicted: Tensor
    state: Tensor
    seen: Tensor
    depths: Tensor


class FalconSession(FeatureSession):
    """A head that drafts blocks for one batch.

    Attributes:
        summary: [R, STATE + k - 1, d] state of the LSTM after the committed tokens, then the last k - 1 rows.
    """

    head: FalconHead
    summary: Tensor

    def propose(self, canvas: Canvas) -> Draft:
        growth, ends = self.growth(canvas), self._read_newest(canvas)
        while True:
            logits = self.read_out(ends.predicted)  # [R, w, k, V']
            width = torch.arange(logits.shape[1], device=logits.device)
            base = width.expand(len(canvas.root), -1)  # [B, w] the end before each node
            path = base.new_zeros(*base.shape, 0)  # [B, w, i] tokens of the block up to each node
            for offset in range(logits.shape[2]):
                guided = self._guided(pick(logits[:, :, offset], self._copied(base)))
                parent = growth.grow(self._log_probabilities(guided))
                if growth.is_grown:
                    return self.rated(growth)
                base = base.gather(1, parent)
                path = torch.cat([pick(path, parent), growth.tokens[..., None]], 2)
            ends = self._read_blocks(ends, base, path, growth.level)

    def _read_newest(self, canvas: Canvas) -> Ends:
        """Read the newly committed tokens, and the k - 1 rows before them, which see them too."""
        self.prepare()
        lag = self.head.config.block - 1
        tokens = self.tokens.scatter(1, self.accepted[:, None], canvas.root[:, None])
        pairs = self.head.fuse(self.target.embed(self._copied(tokens)), self.features)
        state, recent = self.summary.split([STATE, lag], 1)
        made, states = [recent], list[Tensor]()
        for pair in pairs.split(1, 1):  # one by one, because the state after `accepted` is kept
            row, state = self.head.run(pair, state)
            made.append(row)
            states.append(state)
        rows, accepted = torch.cat(made, 1), self._copied(self.accepted)
        slots = torch.arange(rows.shape[1], device=rows.device).expand(len(tokens), -1)
        visible = (slots <= lag + self.accepted[:, None])[:, None].expand(-1, rows.shape[1], -1)
        self.state.cache.commit(None, torch.full_like(accepted, -lag))  # `recent` is written again
        hidden = self._read_rows(rows, Nodes(slots, slots, slots, visible, rows.shape[1] - 1))
        self._keep(accepted + lag, tokens.shape[1])
        block = accepted[:, None] + torch.arange(lag + 1, device=rows.device)  # ends at the root
        state = take(torch.stack(states, 1), accepted)
        self.summary = torch.cat([state, pick(rows, block[:, 1:])], 1)
        seen = torch.zeros(len(tokens), 1, 0, dtype=torch.bool, device=rows.device)
        return Ends(pick(hidden, block)[:, None], state[:, None], seen, slots[0, :0])

    def _read_blocks(self, before: Ends, base: Tensor, path: Tensor, level: int) -> Ends:
        """Read blocks that end at a level: tokens [B, w, k], each after one of the ends before it [B, w]."""
        copied, (batch, width, block) = self._copied(base), path.shape
        pairs = self.head.fuse(self.target.embed(self._copied(path)), pick(before.predicted, copied))
        rows, state = self.head.run(pairs.flatten(0, 1), pick(before.state, copied).flatten(0, 1))
        own = torch.eye(width, dtype=torch.bool, device=path.device).repeat_interleave(block, 1)
        seen = torch.cat([pick(before.seen, base), own.expand(batch, -1, -1)], 2)
        own_depths = torch.arange(level - block, level, device=path.device).repeat(width)
        depths = torch.cat([before.depths, own_depths])
        slots = torch.arange(len(before.depths), len(depths), device=path.device).expand(batch, -1)
        visible = seen.repeat_interleave(block, 1)
        nodes = Nodes(path.flatten(1), slots, depths.expand(batch, -1), visible, level - 1)
        hidden = self._read_rows(rows.unflatten(0, (-1, width)).flatten(1, 2), nodes)
        return Ends(hidden.unflatten(1, (width, block)), state.unflatten(0, (-1, width)), seen, depths)


class FalconDrafter(FeatureDrafter):
    """Drafts a tree of the likeliest continuations with a head that predicts blocks of hidden states.

    Args: see `HeadDrafter`. Each block of levels takes one forward pass of the head.
    """

    session = FalconSession
