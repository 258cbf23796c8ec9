"""Drafts: a `Tree` of candidate tokens after the output, or a `Block` of chains at chosen places.

A chain, or a window of image tokens, is a tree with one path. Drafts do not depend on drafters or rules.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from mmspec.core.distributions import AnyDistribution, Distribution, PointMass
from mmspec.core.indexing import take
from mmspec.core.once import once
from mmspec.core.random_stream import Purpose
from mmspec.core.rows import Rows, named
from mmspec.core.verdict import Fill, Path, Verdict
from mmspec.errors import InputError
from mmspec.kernels import deepest_node, tree_children, tree_paths


class DraftKind(enum.Enum):
    """Kind of a draft: how its candidates were chosen. It decides which acceptance rules are sound."""

    POINT = "point"
    """Deterministic given the committed tokens: top-k, n-gram, search."""
    COUPLED = "coupled"
    """Drawn with the same noise as the target's own tokens: sound for sample-and-match alone."""
    IID = "iid"
    """Siblings drawn independently from the same `q`."""
    WITHOUT_REPLACEMENT = "without_replacement"
    """Siblings drawn one after another from the same `q`, each removed before the next draw."""

    @property
    def is_drawn(self) -> bool:
        """Whether candidates are verified with the distribution that they were drawn from."""
        return self in (DraftKind.IID, DraftKind.WITHOUT_REPLACEMENT)


@dataclass(frozen=True)
class Nodes:
    """Input nodes of one forward pass. Slots are counted from the end of the committed tokens.

    Attributes:
        tokens: [B, n] ids, or [B, n, d] vectors.
        slots: [B, n] the slot to which the keys and values of each node are written.
        depths: [B, m] depth of the token in each slot: its distance from the row's last committed token.
        visible: [B, n or 1, m] the slots that each node attends to, besides all committed tokens.
        deepest: upper bound of the depths, known to the host.
    """

    tokens: Tensor
    slots: Tensor
    depths: Tensor
    visible: Tensor
    deepest: int

    @property
    def extent(self) -> int:
        """Number of slots m."""
        return self.depths.shape[1]

    @property
    def depth(self) -> Tensor:
        """[B, n] depth of each node."""
        return self.depths.gather(1, self.slots)

    def repeat_rows(self, times: int) -> Nodes:
        """Repeat the nodes for `times` copies of the batch; guidance scores each request twice."""
        if times == 1:
            return self
        slots, depths = self.slots.repeat(times, 1), self.depths.repeat(times, 1)
        tokens = self.tokens.repeat(times, *[1] * (self.tokens.dim() - 1))
        return Nodes(tokens, slots, depths, self.visible.repeat(times, 1, 1), self.deepest)


@dataclass(frozen=True)
class Draft(Rows, ABC):
    """The tokens proposed in one round, for every row of the batch: a `Tree` or a `Block`.

    Attributes:
        tokens: [B, n] token ids, or [B, n, d] vectors; in a block [B, L, n] or [B, L, n, d].
        valid: [B, n] or [B, L, n] False for padding, which is scored but never accepted.
        kind: how the candidates were chosen.
        q: [T, n - 1] distributions that the candidates (nodes 1 to n - 1 of each of T lanes) were drawn from;
            of the first sibling, where siblings are drawn without replacement. `PointMass` for POINT and
            COUPLED.
        faulty: [B] True where the drafter's output was not finite and its nodes are therefore invalid.
    """

    tokens: Tensor
    valid: Tensor
    kind: DraftKind
    q: AnyDistribution
    faulty: Tensor

    row_fields = named("tokens", "valid", "q", "faulty")

    @property
    @abstractmethod
    def lanes(self) -> Tree:
        """The T trees that rules verify independently: the tree itself, or the chains of a block."""

    @property
    @abstractmethod
    def nodes(self) -> Nodes:
        """The input nodes [B, n] of the target's forward pass, all lanes of a row side by side.

        Further nodes after these are queries: the target embeds ids from V on with the embeddings in its
        state, and only the drafter reads their logits (`TargetOutput.queried`).
        """

    @property
    def candidates(self) -> Tensor:
        """[B] number of valid candidates."""
        return self.valid[..., 1:].flatten(1).sum(-1)

    @property
    @abstractmethod
    def reach(self) -> int:
        """Upper bound, known to the host, of the tokens that a row can emit in a round with this draft."""

    @abstractmethod
    def first(self, emitted: Tensor) -> Tensor:
        """[T] output index that depth 1 of each lane proposes a token for; `emitted` [B] counts tokens."""

    @abstractmethod
    def verdict(self, path: Path, finite: Tensor) -> Verdict:
        """Build the verdict of the round from the lanes' paths; `finite` [T, n] marks usable numbers."""

    def roots_alone(self, rows: Sequence[int]) -> Self:
        """Return the draft with the candidates of the given rows removed."""
        valid = self.valid.clone()
        valid[list(rows), ..., 1:] = False
        return replace(self, valid=valid)


@dataclass(frozen=True)
class Tree(Draft):
    """A tree of candidates that continue the output.

    Node 0 is the root: the last emitted token, whose keys and values are not cached yet. The logits there
    give the distribution of depth 1. Parents come before children, and siblings in the order they were drawn.

    Attributes:
        parents: [B, n] index of the parent node; the root is its own parent.
        max_depth: upper bound of the depths, known to the host so that shapes stay static.
        max_children: upper bound of the children of a node, also known to the host.
    """

    parents: Tensor
    max_depth: int
    max_children: int

    row_fields = named("parents")

    @classmethod
    def chain(
        cls,
        tokens: Tensor,
        kind: DraftKind,
        q: Distribution | PointMass | None = None,
        valid: Tensor | None = None,
        faulty: Tensor | None = None,
    ) -> Tree:
        """Build a draft with one path: node i is the parent of node i + 1. tokens: [B, n], root included.

        Without `q`, the candidates count as deterministic (`PointMass`).
        """
        rows, nodes = tokens.shape[:2]
        parents = (torch.arange(nodes, device=tokens.device) - 1).clamp_(min=0).expand(rows, nodes)
        if valid is None:
            valid = torch.ones_like(parents, dtype=torch.bool)
        if faulty is None:
            faulty = tokens.new_zeros(rows, dtype=torch.bool)
        q = PointMass(tokens[:, 1:]) if q is None else q
        return cls(tokens, valid, kind, q, faulty, parents, nodes - 1, min(1, nodes - 1))

    def part_of(self, kept: Sequence[Sequence[int]], size: int) -> Tree:
        """Return the subtree of the given candidates of each row.

        Args:
            kept: B lists of nodes, parents before their children.
            size: number of candidates of the new tree; shorter lists are padded.
        """
        index = torch.tensor(
            [[0, *nodes] + [0] * (size - len(nodes)) for nodes in kept], device=self.tokens.device
        )
        column = torch.arange(size + 1, device=index.device).expand(len(kept), -1)
        is_kept = column <= torch.tensor([[len(nodes)] for nodes in kept], device=index.device)
        place = torch.zeros_like(self.parents).scatter_reduce(1, index, column * is_kept, "amax")
        tokens, parents = self.tokens.gather(1, index), place.gather(1, self.parents.gather(1, index))
        valid = self.valid.gather(1, index) & is_kept
        deepest, children = min(self.max_depth, size), min(self.max_children, size)
        point = PointMass(tokens[:, 1:])
        return Tree(tokens, valid, self.kind, point, self.faulty, parents * is_kept, deepest, children)

    @property
    def last_purpose(self) -> Tensor:
        """[B] purpose of the noise for the last token: TARGET, as in plain decoding, without candidates."""
        proposed = (self.valid & (self.parents == 0))[:, 1:].any(-1)
        return torch.where(proposed, Purpose.RESIDUAL, Purpose.TARGET)

    @property
    def is_chain(self) -> bool:
        """True if no node has a sibling, so that node i is at depth i."""
        return self.max_children <= 1 and self.max_depth == self.valid.shape[1] - 1

    @once
    def ancestors(self) -> Tensor:
        """[B, n, n] True where node j is node i or one of its ancestors."""
        rows, nodes = self.valid.shape
        if self.is_chain:
            ones = torch.ones(nodes, nodes, dtype=torch.bool, device=self.tokens.device)
            return ones.tril().expand(rows, nodes, nodes)
        return self._paths[0]

    @once
    def depth(self) -> Tensor:
        """[B, n] number of edges from the root."""
        rows, nodes = self.valid.shape
        if self.is_chain:
            return torch.arange(nodes, device=self.tokens.device).expand(rows, nodes)
        return self._paths[1]

    @once
    def _paths(self) -> tuple[Tensor, Tensor]:
        return tree_paths(self.parents, self.max_depth)

    @property
    def paths(self) -> tuple[Tensor | None, Tensor | None]:
        """Ancestors and depths in the form that kernels take; (None, None) for a chain."""
        return (None, None) if self.is_chain else self._paths

    @once
    def children(self) -> Tensor:
        """[B, n, max_children] indices of the valid children in draw order, -1 where there are fewer."""
        return tree_children(self.parents, self.valid, self.max_children)

    @property
    def lanes(self) -> Tree:
        return self

    @property
    def nodes(self) -> Nodes:
        """The input nodes of the target's forward pass: node i in slot i, attending to its ancestors."""
        rows, count = self.valid.shape
        slots = torch.arange(count, device=self.tokens.device).expand(rows, count)
        return Nodes(self.tokens, slots, self.depth, self.ancestors, self.max_depth)

    @property
    def reach(self) -> int:
        return self.max_depth + 1

    def first(self, emitted: Tensor) -> Tensor:
        return emitted

    def verdict(self, path: Path, finite: Tensor) -> Path:
        steps = torch.arange(path.nodes.shape[1], device=path.nodes.device)
        failed = (steps <= path.accepted[:, None]) & ~finite.gather(1, path.nodes)
        sound = (failed.cumsum(-1) == 0).sum(-1)
        return replace(path, decided=torch.minimum(path.decided, sound), failed=failed.any(-1))

    def deepest(self, passes: Tensor) -> Tensor:
        """[B] the deepest node whose whole path is True in `passes` [B, n]; the root if no child passes."""
        return deepest_node(passes, *self.paths)


@dataclass(frozen=True)
class Block(Draft):
    """Chains at places of the output: L lanes of n nodes, side by side in every row of the batch.

    Several lanes may share a place, each with its own context. Keys stay in their slots until they are
    overwritten.

    Attributes:
        slots: [B, L, n] the slot of each node; slot i is for the token at output index i, and tokens that are
            not in the output yet have slots after those.
        depths: [B, m] the output index of the token in each slot.
        visible: [B, L * n, m] the slots that each node attends to, besides the prompt; [B, 1, m] where all
            nodes attend to the same ones.
        starts: [B, L] output index that depth 1 of each lane proposes a token for: the index after the root's
            for next-token prediction, the root's own for models that predict the token at a node itself.
        is_open: [B, L, n] whether the token after each node may be decided now.
        completes: upper bound, known to the host, of the places from the first one not emitted that are
            complete after this round.
    """

    slots: Tensor
    depths: Tensor
    visible: Tensor
    starts: Tensor
    is_open: Tensor
    completes: int

    @classmethod
    def single(
        cls, tokens: Tensor, starts: Tensor, is_open: Tensor, depths: Tensor, visible: Tensor, **more: Any
    ) -> Self:
        """Build lanes of one node each, which hold no candidate and predict the token at their own place.

        Args:
            tokens: [B, L] or [B, L, d].
            starts, is_open: [B, L].
            depths, visible: see the attributes.
            more: `completes`, and the fields of subclasses.
        """
        slots = starts[:, :, None]
        valid = torch.ones_like(slots, dtype=torch.bool)
        faulty = torch.zeros(len(slots), dtype=torch.bool, device=slots.device)
        q = PointMass(tokens.flatten(0, 1)[:, None][:, 1:])
        candidates = tokens[:, :, None], valid, DraftKind.POINT, q, faulty
        return cls(*candidates, slots, depths, visible, starts, is_open[:, :, None], **more)

    @once
    def lanes(self) -> Tree:
        tokens, valid = self.tokens.flatten(0, 1), self.valid.flatten(0, 1)
        return Tree.chain(tokens, self.kind, self.q, valid)

    @property
    def nodes(self) -> Nodes:
        tokens, slots = self.tokens.flatten(1, 2), self.slots.flatten(1)
        return Nodes(tokens, slots, self.depths, self.visible, self.visible.shape[2] - 1)

    @property
    def reach(self) -> int:
        return self.completes

    def first(self, emitted: Tensor) -> Tensor:
        return self.starts.flatten()

    def verdict(self, path: Path, finite: Tensor) -> Fill:
        rows, steps = len(self.valid), torch.arange(path.nodes.shape[1], device=path.nodes.device)
        is_draft = steps < path.accepted[:, None]
        follows = take(self.is_open.flatten(0, 1), path.last)[:, None]
        asked = is_draft | ((steps == path.accepted[:, None]) & follows)
        failed = asked & ~finite.gather(1, path.nodes)
        decided = asked & (steps < path.decided[:, None]) & (failed.cumsum(-1) == 0)
        places = self.starts.flatten()[:, None] + steps
        places, values, decided, is_draft, failed = (
            each.reshape(rows, -1, *each.shape[2:])
            for each in (places, path.values, decided, is_draft, failed)
        )
        return Fill.of(places, values, decided, is_draft, failed.any(-1))


def check_tree(parents: Sequence[int]) -> list[int]:
    """Check a tree given by its list of parents, and return the depth of each node.

    Raises:
        InputError: a parent does not come before its child.
    """
    if not parents or parents[0] != 0:
        raise InputError(
            "parents", list(parents), "must begin with the root, which is its own parent: parents[0] = 0"
        )
    depths = [0]
    for node, parent in enumerate(parents[1:], start=1):
        if not 0 <= parent < node:
            raise InputError(f"parents[{node}]", parent, f"must be a node before it, from 0 to {node - 1}")
        depths.append(depths[parent] + 1)
    return depths
