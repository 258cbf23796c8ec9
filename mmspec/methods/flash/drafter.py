"""Drafter of FLASH: a head over compressed images that predicts a block of tokens in each forward pass.

FLASH (2505.12728), completed: grouped-query attention with a cache, one transform for each offset of a block,
a light bias from each token of a block to the next (DSpark, 2607.05147), and blocks that branch into a tree.
With `block=1` the same weights draft one token in a forward pass of the head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mmspec.core.canvas import Canvas
from mmspec.core.draft import Draft, DraftKind, Nodes, Tree
from mmspec.core.indexing import pick
from mmspec.errors import InputError
from mmspec.heads.feature_session import FeatureDrafter, FeatureSession
from mmspec.methods.flash.head import FlashHead
from mmspec.validation import is_integer

__all__ = ["FlashDrafter"]


class FlashSession(FeatureSession):
    """A head that predicts a block in each of its forward passes, as a chain or as a tree."""

    head: FlashHead
    drafter: FlashDrafter

    def propose(self, canvas: Canvas) -> Draft:
        hidden = self._read_committed(canvas)[:, None]  # [R, w, d] of the nodes that end a block
        is_chain = self.shape.max_children == 1 and not self.shape.stop_below
        return self._chain(canvas.root, hidden) if is_chain else self._tree(canvas, hidden)

    def limit(self, nodes: int, least: Callable[[int], Sequence[float]]) -> None:
        if self.drafter.shape.max_children > 1:  # limiting a chain would cost more than it saves
            super().limit(nodes, least)

    def _chain(self, root: Tensor, hidden: Tensor) -> Draft:
        """Draft the same chain as `_tree` with one child a node, at a third of its operations."""
        tokens, sound, depth = [root], torch.ones_like(root, dtype=torch.bool), self.shape.depth
        paths = [torch.zeros(len(root), dtype=torch.float32, device=root.device)]
        steps, block = torch.arange(depth + 1, device=root.device), self.drafter.block
        for start in range(0, depth, block):
            predicted = self.head.predict(hidden[:, 0], min(block, depth - start))  # [R, K, d]
            for logits in self.read_out(predicted).unbind(1):
                biased = self._biased(logits[:, None], tokens[-1][:, None])[:, 0]
                likeliest = biased.max(-1)
                sound = sound & likeliest.values.isfinite()
                tokens.append(likeliest.indices if self.names is None else self.names[likeliest.indices])
                paths.append(paths[-1] + likeliest.values - biased.logsumexp(-1))
            if start + block < depth:
                read, nodes = torch.stack(tokens[start + 1 :], 1), steps[: start + block]
                reached = (nodes <= nodes[start:, None]).expand(len(root), -1, -1)
                slots, depths = nodes[start:].expand_as(read), nodes.expand(len(root), -1)
                unread = Nodes(read, slots, depths, reached, start + block - 1)
                hidden = self._read(predicted, unread)[:, -1:]
        valid = sound[:, None] | (steps == 0)
        self.likelihoods = torch.stack(paths, 1).masked_fill(~valid, -torch.inf)
        return Tree.chain(torch.stack(tokens, 1), DraftKind.POINT, valid=valid, faulty=~sound)

    def _tree(self, canvas: Canvas, hidden: Tensor) -> Draft:
        """Grow a tree, with a forward pass of the head at the start of every block."""
        growth, root = self.growth(canvas), canvas.root
        base = torch.zeros_like(root)[:, None]  # [B, w] ancestor in `hidden` of each expanded node
        block = self.drafter.block
        last_pass = (self.shape.depth - 1) // block * block  # the level at which it starts
        unread: list[tuple[Tensor, Tensor]] = []  # tokens of expanded nodes, and features before them
        while not growth.is_grown:
            offset = growth.level % block
            if offset == 0:
                if unread:
                    tokens, features = (torch.cat(parts, 1) for parts in zip(*unread, strict=True))
                    hidden = self._read(features, growth.nodes(tokens))[:, -growth.tokens.shape[1] :]
                    base = torch.arange(hidden.shape[1], device=root.device).expand(len(root), -1)
                    unread = []
                ahead = min(block, self.shape.depth - growth.level)
                predicted = self.head.predict(hidden, ahead)  # [R, w, K, d]
                logits = self.read_out(predicted)  # [R, w, K, V']
            guided = self._biased(pick(logits[:, :, offset], self._copied(base)), growth.tokens)
            parent = growth.grow(self._log_probabilities(guided))
            base = base.gather(1, parent)
            if growth.level <= last_pass:
                before = pick(predicted[:, :, offset], self._copied(base))
                unread.append((growth.tokens, before))
        return self.rated(growth)

    def _biased(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """[B, w, V'] guided logits after nodes [B, w]: the head's [R, w, V'] plus the bias of these nodes."""
        return self._guided(logits + self.head.bias(self._copied(tokens)))


class FlashDrafter(FeatureDrafter):
    """Drafts a tree of the likeliest continuations with a head that predicts blocks of hidden states.

    Args:
        model: the trained head.
        num_draft_tokens, top_k: see `HeadDrafter`.
        depth: levels of the tree. Each further block costs a forward pass of the head; tokens of a block if
            None.
        block: tokens in a forward pass of the head, from 1 (autoregressive drafting) to the number that it
            was trained for; head's config if None.

    Raises:
        InputError: a value is out of range.
    """

    session = FlashSession

    def __init__(
        self,
        model: FlashHead,
        num_draft_tokens: int | None = None,
        depth: int | None = None,
        top_k: int | None = None,
        block: int | None = None,
    ) -> None:
        most = model.config.block
        if block is not None and (not is_integer(block) or not 1 <= block <= most):
            rule = f"must be an integer from 1 to {most}, which the head was trained for"
            raise InputError("block", block, rule)
        self.block = most if block is None else block
        super().__init__(model, num_draft_tokens, depth, top_k)
