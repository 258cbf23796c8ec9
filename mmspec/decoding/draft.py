"""Draft: a tree of candidate tokens. A chain, or a window of image tokens, is a tree with one path.

Knows no drafter and no acceptance rule.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from mmspec.errors import InputError


class DraftKind(enum.Enum):
    """Kind of a draft, by how its tokens were chosen; decides which acceptance rules are sound for it."""

    POINT = "point"
    """Deterministic given the committed tokens: top-k, n-gram, search."""
    COUPLED = "coupled"
    """Drawn with the very noise that the target will use: sound for sample-and-match alone."""
    IID = "iid"
    """Siblings drawn independently from the same `q`."""
    WITHOUT_REPLACEMENT = "without_replacement"
    """Siblings drawn one after another from the same `q`, each removed before the next draw."""


@dataclass(frozen=True)
class Draft:
    """Candidates for one round, for every row of the batch.

    Node 0 is the root: the newest emitted token, whose keys and values are not cached yet. Its
    logits give the distribution of depth 1.

    Attributes:
        tokens: [B, n] token ids, parents before children, siblings in the order they were drawn.
        parents: [B, n] index of the parent node; the root is its own parent.
        valid: [B, n] False for padding, which is scored but never accepted.
        kind: how the candidates were chosen.
        q: [B, n, V] for sampled kinds: the distribution that the token in the slot was really drawn
            from (of the first sibling, where siblings are drawn without replacement). None for
            POINT and COUPLED.
        max_depth: upper bound of the depths, known to the host so that shapes stay static.
        max_children: upper bound of the children of a node, likewise.
        faulty: [B] True where the drafter's numbers were not finite and it gave up (its nodes are invalid).
    """

    tokens: Tensor
    parents: Tensor
    valid: Tensor
    kind: DraftKind
    q: Tensor | None
    max_depth: int
    max_children: int
    faulty: Tensor

    @classmethod
    def chain(
        cls,
        tokens: Tensor,
        kind: DraftKind,
        q: Tensor | None = None,
        valid: Tensor | None = None,
        faulty: Tensor | None = None,
    ) -> Draft:
        """Build a draft with one path: node i is the parent of node i + 1. tokens: [B, n], root included."""
        rows, nodes = tokens.shape
        parents = (torch.arange(nodes, device=tokens.device) - 1).clamp_(min=0).expand(rows, nodes)
        if valid is None:
            valid = torch.ones_like(tokens, dtype=torch.bool)
        if faulty is None:
            faulty = tokens.new_zeros(rows, dtype=torch.bool)
        return cls(tokens, parents, valid, kind, q, nodes - 1, min(1, nodes - 1), faulty)

    @classmethod
    def tree(cls, tokens: Tensor, parents: Sequence[int], kind: DraftKind, q: Tensor | None = None) -> Draft:
        """Build a draft whose tree is the same in every row.

        Args:
            tokens: [B, n] token ids, the root first.
            parents: n parent indices; parents[0] = 0 and parents[i] < i.
            kind, q: as the attributes of that name.

        Raises:
            InputError: the parents do not describe a tree in that order.
        """
        depths = check_tree(parents)
        if len(parents) != tokens.shape[1]:
            raise InputError("parents", len(parents), f"one parent for each of the {tokens.shape[1]} nodes")
        children = [sum(1 for i, p in enumerate(parents) if i and p == node) for node in range(len(parents))]
        return cls(
            tokens,
            torch.tensor(parents, device=tokens.device).expand(tokens.shape),
            torch.ones_like(tokens, dtype=torch.bool),
            kind,
            q,
            max_depth=max(depths),
            max_children=max(children),
            faulty=tokens.new_zeros(len(tokens), dtype=torch.bool),
        )

    @property
    def is_chain(self) -> bool:
        """True if no node has a sibling, so that node i stands at depth i."""
        return self.max_children <= 1 and self.max_depth == self.tokens.shape[1] - 1

    @cached_property
    def ancestors(self) -> Tensor:
        """[B, n, n] True where node j is node i or one of its ancestors."""
        rows, nodes = self.tokens.shape
        if self.is_chain:
            ones = torch.ones(nodes, nodes, dtype=torch.bool, device=self.tokens.device)
            return ones.tril().expand(rows, nodes, nodes)
        reached = torch.eye(nodes, dtype=torch.bool, device=self.tokens.device).expand(rows, nodes, nodes)
        jump = self.parents
        # Pointer doubling: after k rounds every node knows its 2^k nearest ancestors.
        for _ in range(self.max_depth.bit_length()):
            reached = reached | reached.gather(1, jump[:, :, None].expand(-1, -1, nodes))
            jump = jump.gather(1, jump)
        return reached

    @cached_property
    def depth(self) -> Tensor:
        """[B, n] number of edges from the root."""
        rows, nodes = self.tokens.shape
        if self.is_chain:
            return torch.arange(nodes, device=self.tokens.device).expand(rows, nodes)
        return self.ancestors.sum(-1) - 1

    @cached_property
    def children(self) -> Tensor:
        """[B, n, max_children] indices of the valid children in draw order, -1 where there are fewer."""
        rows, nodes = self.tokens.shape
        index = torch.arange(nodes, device=self.tokens.device)
        is_child = (self.parents[:, None, :] == index[None, :, None]) & self.valid[:, None, :] & (index > 0)
        rank = is_child.cumsum(-1) - 1
        slot = torch.where(is_child, rank, self.max_children)
        table = torch.full((rows, nodes, self.max_children + 1), -1, device=self.tokens.device)
        return table.scatter(2, slot, index.expand(rows, nodes, nodes))[:, :, : self.max_children]

    def repeat_rows(self, times: int) -> Draft:
        """Repeat the draft for `times` copies of the batch: guidance scores each request twice."""
        if times == 1:
            return self
        return replace(
            self,
            tokens=self.tokens.repeat(times, 1),
            parents=self.parents.repeat(times, 1),
            valid=self.valid.repeat(times, 1),
            q=None,
        )


def check_tree(parents: Sequence[int]) -> list[int]:
    """Check a tree given by parents, and return the depths of its nodes.

    Raises:
        InputError: a parent does not come before its child, so the tree is cyclic or unordered.
    """
    if not parents or parents[0] != 0:
        raise InputError(
            "parents", list(parents), "the root comes first and is its own parent: parents[0] = 0"
        )
    depths = [0]
    for node, parent in enumerate(parents[1:], start=1):
        if not 0 <= parent < node:
            raise InputError(f"parents[{node}]", parent, f"a parent comes before its child: 0 to {node - 1}")
        depths.append(depths[parent] + 1)
    return depths
