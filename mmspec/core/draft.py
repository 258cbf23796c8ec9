"""Drafts: a `Tree` of candidates behind the output, or a `Block` of chains at chosen places of it.

A chain, or a window of image tokens, is a tree with one path. Knows no drafter and no acceptance rule.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmspec.core.distributions import AnyDistribution, Distribution, PointMass
from mmspec.core.indexing import pick, take
from mmspec.core.once import once
from mmspec.core.random_stream import Purpose
from mmspec.core.rows import Rows, named
from mmspec.core.verdict import Fill, Path, Verdict
from mmspec.errors import InputError
from mmspec.kernels import deepest_node, tree_children, tree_paths


class DraftKind(enum.Enum):
    """Kind of a draft, by how its candidates were chosen; decides which acceptance rules are sound for it."""

    POINT = "point"
    """Deterministic given the committed tokens: top-k, n-gram, search."""
    COUPLED = "coupled"
    """Drawn with the very noise that the target will use: sound for sample-and-match alone."""
    IID = "iid"
    """Siblings drawn independently from the same `q`."""
    WITHOUT_REPLACEMENT = "without_replacement"
    """Siblings drawn one after another from the same `q`, each removed before the next draw."""


@dataclass(frozen=True)
class Nodes:
    """Nodes of one forward, as a target reads them; slots are counted from behind the committed tokens.

    Attributes:
        tokens: [B, n] ids, or [B, n, d] vectors.
        slots: [B, n] where the keys and values of each node are written.
        depths: [B, m] what stands in each slot: how many tokens it is behind the row's committed ones.
        visible: [B, n or 1, m] the slots that each node attends to, besides all committed tokens.
        deepest: the host's upper bound of the depths.
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
        """Repeat the nodes for `times` copies of the batch: guidance scores each request twice."""
        if times == 1:
            return self
        slots, depths = self.slots.repeat(times, 1), self.depths.repeat(times, 1)
        tokens = self.tokens.repeat(times, *[1] * (self.tokens.dim() - 1))
        return Nodes(tokens, slots, depths, self.visible.repeat(times, 1, 1), self.deepest)


@dataclass(frozen=True)
class Draft(Rows, ABC):
    """Values proposed for one round, for every row of the batch: a `Tree` or a `Block`.

    Attributes:
        tokens: [B, n] token ids, or [B, n, d] vectors; of a block [B, L, n] or [B, L, n, d].
        valid: [B, n] or [B, L, n] False for padding, which is scored but never accepted.
        kind: how the candidates were chosen.
        q: [T, n - 1] the distributions that the candidates, nodes 1 to n - 1 of each of T lanes, were really
            drawn from (of the first sibling, where siblings are drawn without replacement); `PointMass` for
            POINT and COUPLED.
        faulty: [B] True where the drafter's numbers were not finite and it gave up (its nodes are invalid).
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
        """The trees that rules judge one by one, T of them: a tree itself, or the chains of a block."""

    @property
    @abstractmethod
    def nodes(self) -> Nodes:
        """The nodes as a target reads them, [B, n] of each row side by side."""

    @property
    def candidates(self) -> Tensor:
        """[B] how many candidates are proposed."""
        return self.valid[..., 1:].flatten(1).sum(-1)

    @property
    @abstractmethod
    def reach(self) -> int:
        """The host's bound on the tokens that a round with this draft can emit in a row."""

    @abstractmethod
    def first(self, emitted: Tensor) -> Tensor:
        """[T] output index that depth 1 of each lane competes for, where rows have emitted so many [B]."""

    @abstractmethod
    def verdict(self, path: Path, finite: Tensor) -> Verdict:
        """Build the round's decision from the paths of all lanes, and [T, n] whether numbers are usable."""

    def roots_alone(self, rows: Sequence[int]) -> Self:
        """Return the draft without the candidates of some rows."""
        valid = self.valid.clone()
        valid[list(rows), ..., 1:] = False
        return replace(self, valid=valid)


@dataclass(frozen=True)
class Tree(Draft):
    """Candidates behind the output.

    Node 0 is the root: the newest emitted token, whose keys and values are not cached yet. Its logits give
    the distribution of depth 1. Parents come before children, siblings in the order they were drawn.

    Attributes:
        parents: [B, n] index of the parent node; the root is its own parent.
        max_depth: upper bound of the depths, known to the host so that shapes stay static.
        max_children: upper bound of the children of a node, likewise.
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

        Without a q, all mass is at the candidates.
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
        """Return the tree of some candidates of each row.

        Args:
            kept: B lists of nodes, parents before their children.
            size: candidates of the tree; shorter lists are padded.
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
        """[B] purpose of the noise that draws the last token: plain decoding's where nothing was proposed."""
        proposed = (self.valid & (self.parents == 0))[:, 1:].any(-1)
        return torch.where(proposed, Purpose.RESIDUAL, Purpose.TARGET)

    @property
    def is_chain(self) -> bool:
        """True if no node has a sibling, so that node i stands at depth i."""
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
        """Ancestors and depths, as kernels take them: nothing for a chain."""
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
        """The nodes as a target reads them: node i in slot i, seeing its ancestors."""
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
        """[B] the deepest node whose whole path is True in `passes` [B, n]; the root, where no child is."""
        return deepest_node(passes, *self.paths)


@dataclass(frozen=True)
class ProbedTree(Tree):
    """Tree with query nodes behind its nodes: the target's logits there are told to the drafter alone.

    A query sees those before it of the same host, the host, and what the host sees. None is judged, and the
    keys of none are kept.

    Attributes:
        queries: [Q, d] embeddings, of the ids from V on.
        vocabulary: V.
        hosts: [B, P] the node that each query stands behind, ascending.
        steps: [B, P] which of the queries it is; those of a host are 0, 1, ...
    """

    queries: Tensor
    vocabulary: int
    hosts: Tensor
    steps: Tensor

    row_fields = named("hosts", "steps")

    @property
    def nodes(self) -> Nodes:
        """The nodes as a target reads them, those of the tree first."""
        plain, more = super().nodes, self.hosts.shape[1]
        count = plain.extent + more
        together = (self.hosts[:, :, None] == self.hosts[:, None]) & (
            self.steps[:, None] <= self.steps[..., None]
        )
        seen = torch.cat([pick(plain.visible, self.hosts), together], 2)
        depths = self.depth.gather(1, self.hosts) + 1 + self.steps
        return Nodes(
            torch.cat([self.tokens, self.vocabulary + self.steps], 1),
            torch.arange(count, device=seen.device).expand(len(seen), -1),
            torch.cat([plain.depths, depths], 1),
            torch.cat([pad(plain.visible, (0, more)), seen], 1),
            self.max_depth + len(self.queries),
        )


@dataclass(frozen=True)
class Block(Draft):
    """Chains at places of the output: L lanes of n nodes, side by side in every row of the batch.

    Several lanes may stand at one place, each with its own context. Keys stay in the slots where they are
    written, until others are written over them.

    Attributes:
        slots: [B, L, n] where each node is written; slot i is for the token at output index i, and what does
            not stand in the output yet has slots behind those.
        depths: [B, m] the output index that each slot stands for.
        visible: [B, L * n, m] the slots that each node attends to, besides the prompt; [B, 1, m] where all
            nodes attend to the same.
        starts: [B, L] output index that depth 1 of each lane competes for: the place after the root's where
            nodes predict the next token, the root's own where they predict their own.
        is_open: [B, L, n] whether the token after each node may be decided now.
        completes: the host's bound on the places, from the first that is not emitted on, that are complete
            after this round.
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
        """Build lanes of one node each, which hold no candidate and predict the places that they stand at.

        Args:
            tokens: [B, L] or [B, L, d] of the nodes.
            starts, is_open: [B, L].
            depths, visible: as the attributes of that name.
            more: `completes`, and what subclasses add.
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
