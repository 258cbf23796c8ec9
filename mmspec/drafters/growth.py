"""A tree of candidates while it grows, for drafters whose head can go on from any node.

Knows nothing of models: it is given log-probabilities, and says which nodes are expanded next and, at last,
what is proposed. *Expanded* nodes are numbered level by level, in the order in which a head reads them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mmspec.decoding.draft import Draft, DraftKind, Nodes
from mmspec.drafters.tree import TreeShape, renumber
from mmspec.kernels import tree_paths

__all__ = ["TreeGrowth"]


class TreeGrowth:
    """A batch of trees that grow by one level at a time.

    Args:
        shape: how they grow.
        root: [B] the newest tokens.
        names: [V'] the target's tokens that the log-probabilities are of; None if they are of all V. A map of
            the few children costs less than logits of the whole vocabulary.

    Attributes:
        level: of the nodes expanded last; 0 for the root.
        tokens: [B, w] those nodes' tokens.
        scores: [B, w] the log-probabilities of their paths.
        is_grown: whether the deepest level is reached, or none of its paths is likely enough for another.
    """

    def __init__(self, shape: TreeShape, root: Tensor, names: Tensor | None = None) -> None:
        self.shape = shape
        self.names = names
        self.level = 0
        self.tokens = root[:, None]
        self.scores = torch.zeros(root.shape, device=root.device)[:, None]
        place = torch.zeros_like(self.tokens)
        self._place = place  # [B, w] of the nodes expanded last, in the pool
        self._pool = [(self.tokens, place, self.scores)]
        self._pooled = 1
        self._parents: list[Tensor] = []  # of the expanded nodes, among themselves; level 1's are themselves
        self.is_grown = False

    def nodes(self, tokens: Tensor) -> Nodes:
        """The nodes expanded last, tokens [B, n], as a head reads them behind those it has read already."""
        rows, count = tokens.shape
        parents = torch.cat(self._parents, 1)
        # the root's children stand where the root's successor will, at depth 0
        ancestors, depths = tree_paths(parents, len(self._parents))
        slots = torch.arange(parents.shape[1] - count, parents.shape[1], device=tokens.device)
        deepest = len(self._parents) - 1
        return Nodes(tokens, slots.expand(rows, count), depths, ancestors[:, -count:], deepest)

    def grow(self, log_p: Tensor) -> Tensor:
        """Add the likeliest children of the nodes expanded last, and expand the best of these.

        Args:
            log_p: [B, w, V or V'] of the tokens after each node.

        Returns:
            [B, w'] the parent, among the w nodes, of each node that is expanded now; of none at the last
            level.
        """
        self.level += 1
        branch = self.shape.branch(self.level)
        likeliest = log_p.topk(branch)
        candidates = likeliest.indices.flatten(1)
        if self.names is not None:
            candidates = self.names[candidates]
        scores = (self.scores[..., None] + likeliest.values).flatten(1)
        parents = self._place[..., None].expand(-1, -1, branch).flatten(1)
        self._pool.append((candidates, parents, scores))
        self.is_grown = self.level == self.shape.depth or self._is_hopeless(scores)
        if self.is_grown:
            return candidates[:, :0]
        index = self.shape.frontier(self.level, scores)
        parent = index // branch
        expanded = sum(parents.shape[1] for parents in self._parents)
        if self.level == 1:
            self._parents.append(torch.arange(index.shape[1], device=index.device).expand_as(index))
        else:
            self._parents.append(parent + (expanded - self.tokens.shape[1]))
        self.tokens, self.scores = candidates.gather(1, index), scores.gather(1, index)
        self._place = self._pooled + index
        self._pooled += scores.shape[1]
        return parent

    def _is_hopeless(self, scores: Tensor) -> bool:
        """True if every path of every row is too unlikely; asks the device only where that can be."""
        least = self.shape.stop_below
        return least > 0 and bool((scores.amax(-1) < math.log(least)).all())

    def draft(self) -> Draft:
        """The proposed tree; the root alone in rows some of whose log-probabilities were not numbers."""
        tokens, parents, scores = (torch.cat(parts, 1) for parts in zip(*self._pool, strict=True))
        faulty = (scores.isnan() | (scores == math.inf)).any(-1)
        scores = scores.masked_fill(faulty[:, None], -math.inf)
        scores[:, 0] = 0.0
        chosen = self.shape.choose(scores)
        return Draft(
            tokens.gather(1, chosen),
            renumber(parents, chosen),
            scores.gather(1, chosen) > -math.inf,
            DraftKind.POINT,
            None,
            self.level,
            self.shape.max_children,
            faulty,
        )
