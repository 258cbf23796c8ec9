"""Drafter of Chimera (2402.15758): a tree whose nodes are read as trigrams in the context of all tokens."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmspec.core.canvas import Canvas
from mmspec.core.draft import Draft, Nodes
from mmspec.core.indexing import pick, take
from mmspec.heads.drafter import LevelDrafter
from mmspec.heads.feature_session import FeatureDrafter, FeatureSession
from mmspec_extras.methods.chimera.head import GRAM, ChimeraHead


class ChimeraSession(FeatureSession):
    """Trigrams, an encoder and decoders that draft for one batch.

    The cache holds the target's states. The row of the root, which no state replaces yet, and those of the
    candidates are never committed.

    Attributes:
        summary: [R, 2, d] embeddings of the two tokens before those of `tokens`.
    """

    head: ChimeraHead
    summary: Tensor

    def propose(self, canvas: Canvas) -> Draft:
        growth, root = self.growth(canvas), canvas.root[:, None]
        grams = self._read_newest(canvas)  # [R, w, 3, d] of the nodes that are expanded
        state = take(self.features, self._copied(self.accepted))[:, None]
        nodes = Nodes(root, root * 0, root * 0, (root == root)[:, None], 0)
        while True:
            fused = self._read_rows(self.head.encode(grams), nodes)
            logits = self._guided(self.head.decode(state, fused, growth.level, self.read_out))
            parent = growth.grow(self._log_probabilities(logits))
            if growth.is_grown:
                return self.rated(growth)
            newest = self.target.embed(self._copied(growth.tokens))[:, :, None]
            grams = torch.cat([pick(grams, self._copied(parent))[:, :, 1:], newest], 2)
            nodes = after_root(growth.nodes(growth.tokens))

    def _read_newest(self, canvas: Canvas) -> Tensor:
        """Read the states of the newly committed tokens; return the trigram [R, 1, 3, d] of the root."""
        self._read_committed(canvas)
        tokens = self.tokens.scatter(1, self.accepted[:, None], canvas.root[:, None])
        line = torch.cat([self.summary, self.target.embed(self._copied(tokens))], 1)
        place = self._copied(self.accepted)[:, None] + torch.arange(GRAM, device=line.device)
        gram = pick(line, place)
        self.summary = gram[:, 1:]
        return gram[:, None]


def after_root(nodes: Nodes) -> Nodes:
    """Nodes of a tree whose root was read as the first of them."""
    return replace(
        nodes,
        slots=nodes.slots + 1,
        depths=pad(nodes.depths + 1, (1, 0)),
        visible=pad(nodes.visible, (1, 0), value=True),
        deepest=nodes.deepest + 1,
    )


class ChimeraDrafter(LevelDrafter, FeatureDrafter):
    """Drafts a tree with a decoder for each level, each of which reads the path so far.

    Args: see `LevelDrafter`.
    """

    session = ChimeraSession
