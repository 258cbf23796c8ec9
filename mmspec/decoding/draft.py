"""Drafts: trees of candidate tokens that follow the output, and chains at chosen places of it.

A chain, or a window of image tokens, is a tree with one path. Knows no drafter and no acceptance rule.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from mmspec.decoding.distribution import AnyDistribution, Distribution
from mmspec.decoding.indexing import take
from mmspec.decoding.once import once
from mmspec.decoding.rows import Rows, named
from mmspec.errors import InputError
from mmspec.kernels import deepest_node, tree_children, tree_paths

if TYPE_CHECKING:
    from mmspec.decoding.denoising import StepAnnealing
    from mmspec.decoding.verdict import Verdict


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
    MASKED = "masked"
    """No candidates: each node is a mask and predicts its own place; a rule chooses the places to decide."""


CANDIDATES = frozenset(DraftKind) - {DraftKind.MASKED}
"""Kinds of draft that hold candidates, whichever way they came about."""


class Progress(NamedTuple):
    """Progress of decoding in any order, where rows decide as many places as they will in each round.

    Attributes:
        iteration, iterations: forwards before this one, and of the whole output.
        before, after: places that are decided before and after this round; [T, 1, 1] where chains differ.
        annealing: of the steps of a denoising head; None for as many in every forward.
        caching: settings by which the target reuses features of earlier forwards, in its own type, or None.
    """

    iteration: int
    iterations: int
    before: int | Tensor
    after: int | Tensor
    annealing: StepAnnealing | None = None
    caching: Any = None


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
class Draft(Rows):
    """Candidates for one round, for every row of the batch.

    Node 0 is the root: the newest emitted token, whose keys and values are not cached yet. Its
    logits give the distribution of depth 1.

    Attributes:
        tokens: [B, n] token ids, or [B, n, d] vectors; parents before children, siblings in the order they
            were drawn.
        parents: [B, n] index of the parent node; the root is its own parent.
        valid: [B, n] False for padding, which is scored but never accepted.
        kind: how the candidates were chosen.
        q: for sampled kinds: the distributions that the tokens in the slots were really drawn from
            (of the first sibling, where siblings are drawn without replacement). None for POINT and COUPLED.
        max_depth: upper bound of the depths, known to the host so that shapes stay static.
        max_children: upper bound of the children of a node, likewise.
        faulty: [B] True where the drafter's numbers were not finite and it gave up (its nodes are invalid).
        moves: whether accepted nodes move to the end of the committed tokens; else they stay where they are.
        progress: of the output, for drafts of places in any order; else None.
    """

    tokens: Tensor
    parents: Tensor
    valid: Tensor
    kind: DraftKind
    q: AnyDistribution | None
    max_depth: int
    max_children: int
    faulty: Tensor
    progress: Progress | None = field(default=None, kw_only=True)

    moves: ClassVar[bool] = True
    row_fields = named("tokens", "parents", "valid", "q", "faulty")

    @classmethod
    def chain(
        cls,
        tokens: Tensor,
        kind: DraftKind,
        q: Distribution | None = None,
        valid: Tensor | None = None,
        faulty: Tensor | None = None,
    ) -> Draft:
        """Build a draft with one path: node i is the parent of node i + 1. tokens: [B, n], root included."""
        rows, nodes = tokens.shape[:2]
        parents = (torch.arange(nodes, device=tokens.device) - 1).clamp_(min=0).expand(rows, nodes)
        if valid is None:
            valid = torch.ones_like(parents, dtype=torch.bool)
        if faulty is None:
            faulty = tokens.new_zeros(rows, dtype=torch.bool)
        return cls(tokens, parents, valid, kind, q, nodes - 1, min(1, nodes - 1), faulty)

    @classmethod
    def tree(
        cls, tokens: Tensor, parents: Sequence[int], kind: DraftKind, q: Distribution | None = None
    ) -> Draft:
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

    def roots_alone(self, rows: Sequence[int]) -> Self:
        """Return the draft without the candidates of some rows."""
        valid = self.valid.clone()
        valid[list(rows), 1:] = False
        return replace(self, valid=valid)

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
    def nodes(self) -> Nodes:
        """The nodes as a target reads them: node i in slot i, seeing its ancestors."""
        rows, count = self.valid.shape
        slots = torch.arange(count, device=self.tokens.device).expand(rows, count)
        return Nodes(self.tokens, slots, self.depth, self.ancestors, self.max_depth)

    @property
    def rows(self) -> int:
        """Number of rows B of the batch."""
        return len(self.valid)

    @property
    def reach(self) -> int:
        """The host's bound on the tokens that a round with this draft can emit in a row."""
        return self.max_depth + 1

    def first(self, emitted: Tensor) -> Tensor:
        """[B] output index that depth 1 competes for, where rows have emitted that many tokens [B]."""
        return emitted

    def deepest(self, passes: Tensor) -> Tensor:
        """[B] the deepest node whose whole path is True in `passes` [B, n]; the root, where no child is."""
        return deepest_node(passes, *self.paths)

    def may_follow(self, verdict: Verdict) -> Tensor:
        """[B] whether the token after the last accepted node may be decided now."""
        return torch.ones_like(verdict.filled)

    def roll_back(self, verdict: Verdict) -> Verdict:
        """Refuse the chains that were drafted behind a candidate which this round refused."""
        return verdict


@dataclass(frozen=True)
class Cells(Draft):
    """Chains at chosen places of the output, several side by side in every row of the batch.

    What `Draft` holds for each of B rows, this holds for each of T = B * L chains, those of a row one after
    another. Keys stay in the slots where they are written, until others are written over them.

    Attributes:
        slots: [T, n] where each node is written; slot i is for the token at output index i, and what does not
            stand in the output yet has slots behind those.
        depths: [B, m] the output index that each slot stands for.
        starts: [T] output index that depth 1 competes for: the place after the root's where nodes predict
            the next token, the root's own where they predict their own.
        visible: [B, L * n, m] the slots that each node attends to, besides the prompt; [B, 1, m] where all
            nodes attend to the same.
        follows: [T, n] whether the token after each node may be decided now.
        completes: the host's bound on the places, from the first that is not emitted on, that are complete
            after this round.
        ordered: whether each chain was drafted behind the candidates of those before it in the row, and falls
            with them.
    """

    slots: Tensor
    depths: Tensor
    starts: Tensor
    visible: Tensor
    follows: Tensor
    completes: int
    ordered: bool = field(default=False, kw_only=True)

    moves: ClassVar[bool] = False

    @property
    def rows(self) -> int:
        return len(self.visible)

    @classmethod
    def of(cls, chains: Draft, **where: Any) -> Cells:
        """Build cells of T chains and the attributes that chains alone do not have."""
        return cls(**({each.name: getattr(chains, each.name) for each in fields(Draft)} | where))

    @property
    def reach(self) -> int:
        return self.completes

    @property
    def nodes(self) -> Nodes:
        """The nodes as a target reads them, those of a row side by side."""
        rows, _, extent = self.visible.shape
        count = self.slots.numel() // max(rows, 1)
        tokens = self.tokens.view(rows, count, *self.tokens.shape[2:])
        slots = self.slots.view(rows, count)
        return Nodes(tokens, slots, self.depths, self.visible, extent - 1)

    def first(self, emitted: Tensor) -> Tensor:
        return self.starts

    def may_follow(self, verdict: Verdict) -> Tensor:
        return take(self.follows, verdict.last)

    def roll_back(self, verdict: Verdict) -> Verdict:
        if not self.ordered:
            return verdict
        whole = (verdict.accepted == self.max_depth).long().view(self.rows, -1)
        stands = torch.nn.functional.pad(whole[:, :-1], (1, 0), value=1).cumprod(-1).bool().flatten()
        return replace(verdict, accepted=verdict.accepted * stands, filled=verdict.filled & stands)


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
