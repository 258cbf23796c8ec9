"""Trees of candidates: their shapes, and growth by one level at a time.

A shape chooses nodes by their scores alone, and `TreeGrowth` is given log-probabilities; neither needs a
model. The *pool* holds the root, then the candidates of level 1, then those of level 2, and so on, so parents
come before their children. *Expanded* nodes are those that get children. They are numbered level by level, in
the order in which a head reads them.
"""

from __future__ import annotations

import copy
import functools
import heapq
import math
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from mmspec.core.distributions import Categorical, PointMass
from mmspec.core.draft import DraftKind, Nodes, Tree, check_tree
from mmspec.core.indexing import pick
from mmspec.errors import InputError
from mmspec.kernels import best, tree_paths
from mmspec.registry import did_you_mean
from mmspec.trees.siblings import DRAWN, SiblingDraws, kind_of
from mmspec.validation import MAX_DRAFT_TOKENS, check_draft_tokens, is_integer

MAX_LEVELS = 64
LEVELS = re.compile(r"[1-9]\d{0,3}(x[1-9]\d{0,3})*")
#: Static trees by the ranks along each path: "01" is the second child of the root's first one.
NAMED_TREES = {
    # EAGLE-1's 25 nodes (2401.15077): wide at the top, five deep along the likeliest path
    "eagle": "0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 0000 0001 0002 00000 00001",
    # Medusa's 63 nodes for Vicuna 7B (2401.10774): the best by how often each rank was right
    "medusa": "0 1 2 3 4 5 6 7 8 9 00 01 02 03 04 05 06 07 08 09 10 11 12 13 14 15 16 20 21 22 30 31 40 50 "
    "60 70 80 90 000 001 002 003 004 005 006 007 008 009 010 011 012 020 021 030 040 050 060 070 100 101 "
    "200 0000 0001",
    # for flat distributions, where depth pays little
    "wide": "0 1 2 3 4 5 6 7 8 9 00 01 02 03 04 05 10 11 12 13 20 21 22 30 31 40 50 "
    "000 001 002 003 010 011 020 100 101 200 0000 0001 0010",
}


@dataclass(frozen=True)
class DynamicTree:
    """The likeliest paths by the draft's own confidence (EAGLE-2, 2406.16858, section 4).

    Each level expands its `top_k` best candidates; the best of all candidates are proposed. A score is the
    sum of the log-probabilities along a path, so a child's score never exceeds its parent's. Of equal scores
    the earlier node is taken, which is the parent. Therefore the parent of every proposed node is proposed.

    Args:
        num_draft_tokens: candidates that are proposed, the root not counted.
        depth: the deepest level; level 1 holds the root's children.
        top_k: nodes expanded on each level, and children of each.
        stop_below: probability that the likeliest path to a level needs for another level; 0 adds all levels.
        least: the same for each level except the last, where it is larger; () for `stop_below` alone.

    Raises:
        InputError: a value outside its range, or fewer candidates than are to be proposed.
    """

    num_draft_tokens: int
    depth: int
    top_k: int
    stop_below: float = 0.0
    least: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        check_draft_tokens(self.num_draft_tokens)
        for name in ("depth", "top_k"):
            value = getattr(self, name)
            most = min(MAX_LEVELS, self.num_draft_tokens)
            if not is_integer(value) or not 1 <= value <= most:
                raise InputError(name, value, f"an integer from 1 to {most}")
        candidates = self.top_k + (self.depth - 1) * self.top_k**2
        if self.num_draft_tokens > candidates:
            allowed = f"at most {candidates}, the candidates of depth={self.depth} and top_k={self.top_k}"
            raise InputError("num_draft_tokens", self.num_draft_tokens, allowed)

    @property
    def max_children(self) -> int:
        """Most children that a node can have."""
        return self.top_k

    @property
    def most_together(self) -> int:
        """Most candidates of a level."""
        return self.top_k**2

    def limited(self, nodes: int, least: Callable[[int], Sequence[float]]) -> DynamicTree:
        """Return a tree of at most `nodes` candidates that stops early by level; see `DraftSession.limit`."""
        most = min(nodes, self.num_draft_tokens)
        depth, top_k = min(self.depth, most), min(self.top_k, most)
        most = min(most, top_k + (depth - 1) * top_k**2)
        return DynamicTree(most, depth, top_k, self.stop_below, tuple(least(depth)))

    def stopping_below(self, probability: float) -> DynamicTree:
        """Return a tree that adds no level behind one where every path is less likely than that."""
        return replace(self, stop_below=probability)

    def stops_below(self, level: int) -> float:
        """The probability that the likeliest path to a level needs for another level to be added."""
        return max(self.stop_below, self.least[level - 1] if level <= len(self.least) else 0.0)

    def branch(self, level: int) -> int:
        """Candidates of a level under each node that is expanded."""
        return self.top_k

    def frontier(self, level: int, scores: Tensor) -> Tensor:
        """The candidates of a level that are expanded: scores [B, m] -> indices [B, w]."""
        return best(scores, self.top_k)

    def choose(self, scores: Tensor) -> Tensor:
        """The nodes that are proposed: scores of the pool [B, p] -> ascending [B, n], the root first."""
        return best(scores, self.num_draft_tokens + 1, ascending=True)


class StaticTree:
    """A tree of one shape: the r-th child of a node is the r-th likeliest, or the r-th that was drawn.

    Its methods are those of `DynamicTree`.

    Args:
        parents: as in `Tree.of`: the parent of each node, the root first and its own parent.

    Raises:
        InputError: the parents do not describe a tree in that order, or of the root alone.

    Attributes:
        stop_below: as of `DynamicTree`; a level that was drawn stays whole, so that no rule is biased.
        most_together: most nodes of a level; where equal siblings share their children, all of these may
            have one parent.
        is_full: whether all nodes of a level have the same number of children.
        slots: of each node, its number among the expanded ones; 0 for leaves and the root.
    """

    stop_below = 0.0

    def __init__(self, parents: Sequence[int]) -> None:
        depths = check_tree(parents)
        self.num_draft_tokens = check_draft_tokens(len(parents) - 1)
        self.depth = max(depths)
        children = [[i for i, p in enumerate(parents) if i and p == node] for node in range(len(parents))]
        self.max_children = max(map(len, children))
        self.most_together = max(map(depths.count, range(1, self.depth + 1)))
        # candidates are numbered by (expanded node, rank), expanded nodes in the order of their own numbers
        self._branch, self._frontier, self._chosen = [0], [[0]], [0]
        expanded, pool = [0], 1
        read: list[int] = []  # places of expanded nodes in the pool
        while expanded:
            branch = max(len(children[node]) for node in expanded)
            places = {
                child: index * branch + rank
                for index, node in enumerate(expanded)
                for rank, child in enumerate(children[node])
            }
            self._chosen += [pool + place for place in sorted(places.values())]
            read += [pool + place for node, place in places.items() if children[node]]
            pool += len(expanded) * branch
            expanded = sorted((node for node in places if children[node]), key=places.__getitem__)
            self._branch.append(branch)
            self._frontier.append([places[node] for node in expanded])
        sizes = accumulate(self._branch[1:], operator.mul)
        self.is_full = self.num_draft_tokens == sum(sizes)
        number = {place: index for index, place in enumerate(read)}
        self.slots = tuple(number.get(place, 0) for place in self._chosen)

    @classmethod
    def of_levels(cls, counts: Sequence[int]) -> StaticTree:
        """Build a tree with `counts[i]` children of each node of level i, as in MCSD (2401.06706).

        Raises:
            InputError: more nodes than a draft can have.
        """
        size, total = 1, 0
        for count in counts:
            size *= count
            total += size
            if total > MAX_DRAFT_TOKENS:
                allowed = f"at most {MAX_DRAFT_TOKENS} nodes in all"
                raise InputError("tree", "x".join(map(str, counts)), allowed)
        parents, level = [0], range(1)
        for count in counts:
            start = len(parents)
            parents += [node for node in level for _ in range(count)]
            level = range(start, len(parents))
        return cls(parents)

    @classmethod
    def named(cls, name: str) -> StaticTree:
        """One of `NAMED_TREES`."""
        paths = sorted(NAMED_TREES[name].split(), key=lambda path: (len(path), path))
        number = {path: index for index, path in enumerate(["", *paths])}
        return cls([0, *(number[path[:-1]] for path in paths)])

    def stopping_below(self, probability: float) -> StaticTree:
        cautious = copy.copy(self)
        cautious.stop_below = probability
        return cautious

    def stops_below(self, level: int) -> float:
        return self.stop_below

    def branch(self, level: int) -> int:
        return self._branch[level]

    def frontier(self, level: int, scores: Tensor) -> Tensor:
        return constant(tuple(self._frontier[level]), scores.device).expand(len(scores), -1)

    def choose(self, scores: Tensor) -> Tensor:
        chosen = tuple(place for place in self._chosen if place < scores.shape[1])  # of the levels there are
        return constant(chosen, scores.device).expand(len(scores), -1)


Shape = TypeVar("Shape", DynamicTree, StaticTree, DynamicTree | StaticTree)
TreeShape = DynamicTree | StaticTree
"""A way to grow a tree. Widths depend on the level alone, so that shapes stay static."""


class TreeSizes(Protocol):
    """Sizes of the tree that a head grows where nothing else is asked for."""

    num_draft_tokens: int
    top_k: int
    depth: int


def choose_tree(
    usual: TreeSizes,
    num_draft_tokens: int | None = None,
    depth: int | None = None,
    top_k: int | None = None,
    tree: str | int | Sequence[int] = "dynamic",
) -> TreeShape:
    """Choose the tree that a drafter's arguments ask for; sizes that are not given adapt to those that are.

    Args:
        usual: config of a head, whose sizes are the defaults. Its `hit_rates`, if any, were measured in
            training.
        num_draft_tokens, depth, top_k: of a dynamic tree.
        tree: "dynamic"; or a static tree: one of `NAMED_TREES`, the children of every node of each level as
            "4x2x2", or the parents of its nodes; or "measured", the best static one of `num_draft_tokens`.

    Raises:
        InputError: a value outside its range, or sizes of a dynamic tree beside a static one.
    """
    rates = getattr(usual, "hit_rates", ())
    if tree == "measured" and rates:
        most = check_draft_tokens(usual.num_draft_tokens if num_draft_tokens is None else num_draft_tokens)
        tree, num_draft_tokens = best_first(rates, most), None
    if tree == "dynamic":
        nodes = usual.num_draft_tokens if num_draft_tokens is None else check_draft_tokens(num_draft_tokens)
        most = max(usual.depth, usual.top_k) if num_draft_tokens is None else nodes
        depth = min(usual.depth, most) if depth is None else depth
        top_k = min(usual.top_k, most) if top_k is None else top_k
        sane = all(is_integer(value) and value >= 1 for value in (depth, top_k))
        if num_draft_tokens is None and sane:  # else the tree says what is wrong
            nodes = max(depth, top_k, min(nodes, top_k + (depth - 1) * top_k**2))
        return DynamicTree(nodes, depth, top_k)
    for name, value in (("num_draft_tokens", num_draft_tokens), ("depth", depth), ("top_k", top_k)):
        if value is not None:
            raise InputError(name, value, f"nothing: it says how a dynamic tree grows, and tree is {tree!r}")
    return static_tree(tree, ["dynamic", *NAMED_TREES, *(["measured"] if rates else [])])


def static_tree(tree: str | int | Sequence[int], known: Sequence[str] = tuple(NAMED_TREES)) -> StaticTree:
    """Build the static tree that a name, the children of each level, or a list of parents describes.

    Args:
        tree: a key of `NAMED_TREES`, "4x2x2", or the parents as of `StaticTree`.
        known: names, for the message of the error.

    Raises:
        InputError: no such tree, or one of too many nodes.
    """
    if isinstance(tree, int):  # one level, as the command line reads it
        tree = str(tree)
    if not isinstance(tree, str):
        return StaticTree(tree)
    if LEVELS.fullmatch(tree):
        return StaticTree.of_levels([int(count) for count in tree.split("x")])
    if tree not in NAMED_TREES:
        raise InputError("tree", tree, did_you_mean(tree, known))
    return StaticTree.named(tree)


def drawable(shape: Shape, sampling: str) -> Shape:
    """Return the shape, if siblings can be drawn in it.

    Raises:
        InputError: the shape would depend on what is drawn; or nodes of one level have different numbers of
            children, so that equal siblings cannot share theirs.
    """
    kind = kind_of(sampling)
    if kind in DRAWN and not isinstance(shape, StaticTree):
        allowed = f"a static tree, as 4x2x2, a name or parents, beside sampling={sampling!r}"
        raise InputError("tree", "dynamic", allowed)
    if kind is DraftKind.IID and isinstance(shape, StaticTree) and not shape.is_full:
        allowed = f"children of each level, as 4x2x2, beside sampling={sampling!r}"
        raise InputError("tree", "one of uneven levels", allowed)
    return shape


def best_first(rates: Sequence[Sequence[float]], nodes: int) -> list[int]:
    """Build the tree of largest expected acceptance length (Medusa, 2401.10774, section 3.3): its parents.

    A node's worth is the product of the rates along its path, by head and rank, as if the heads were right
    independently of each other. Nodes are taken in the order of their worth, parents and elder siblings
    first. The tree has fewer than `nodes` candidates where the rates describe no more.
    """
    parents = [0]
    # worth of a candidate and of its parent, in order; its level and rank; its parent
    waiting = [(-rates[0][0], -1.0, 0, 0, 0)] if rates and rates[0] else []
    while waiting and len(parents) <= nodes:
        worth, above, level, rank, parent = heapq.heappop(waiting)
        node = len(parents)
        parents.append(parent)
        if rank + 1 < len(rates[level]):
            heapq.heappush(waiting, (above * rates[level][rank + 1], above, level, rank + 1, parent))
        if level + 1 < len(rates) and rates[level + 1]:
            heapq.heappush(waiting, (worth * rates[level + 1][0], worth, level + 1, 0, node))
    return parents


@functools.cache  # without it, every round would copy the indices to the device
def constant(index: tuple[int, ...], device: torch.device) -> Tensor:
    """Indices as a tensor on a device."""
    return torch.tensor(index, device=device)


def first_equal(values: Tensor) -> Tensor:
    """Find the first entry of each row [B, m] that every entry equals: its index, [B, m]."""
    return (values[:, :, None] == values[:, None]).long().argmax(-1)


def renumber(parents: Tensor, chosen: Tensor) -> Tensor:
    """[B, n] parents of the chosen nodes among themselves; both arguments are by index in the pool."""
    return torch.searchsorted(chosen.contiguous(), parents.gather(1, chosen))


class TreeGrowth:
    """A batch of trees that grow by one level at a time.

    Args:
        shape: how they grow.
        root: [B] the newest tokens.
        names: [V'] target token of each log-probability; None if they are of all V. Only the children are
            mapped to target tokens, which costs less than logits of the whole vocabulary.
        draws: how the children of a node are drawn; None where they are the likeliest. Equal siblings that
            were drawn independently share their children, which belong to the first (SpecTr, 2310.15141).

    Attributes:
        level: of the nodes expanded last; 0 for the root.
        tokens: [B, w] those nodes' tokens.
        scores: [B, w] the log-probabilities of their paths.
        is_grown: whether the deepest level is reached, or no path is likely enough for another level.
    """

    def __init__(
        self,
        shape: TreeShape,
        root: Tensor,
        names: Tensor | None = None,
        draws: SiblingDraws | None = None,
    ) -> None:
        self.shape = shape
        self.names = names
        self.draws = draws
        self._drawn = draws if draws is not None and draws.is_drawn else None
        self._merges = draws is not None and draws.kind is DraftKind.IID
        self._q: list[Tensor] = []  # [B, w * branch, V'] of the candidates of each level, where drawn
        self._ended = torch.zeros_like(root, dtype=torch.bool)  # [B] rows whose paths are too unlikely
        self.level = 0
        self.tokens = root[:, None]
        self.scores = torch.zeros(root.shape, dtype=torch.float32, device=root.device)[:, None]
        place = torch.zeros_like(self.tokens)
        self._place = place  # [B, w] of the nodes expanded last, in the pool
        self._pool = [(self.tokens, place, self.scores)]
        self._pooled = 1
        self._parents: list[Tensor] = []  # of expanded nodes, by their numbers; level 1's are their own
        self.is_grown = False

    def nodes(self, tokens: Tensor) -> Nodes:
        """Return the nodes expanded last, tokens [B, n], for a head that has read those before them."""
        rows, count = tokens.shape
        parents = torch.cat(self._parents, 1)
        # the root's children stand where the root's successor will, at depth 0
        ancestors, depths = tree_paths(parents, len(self._parents))
        slots = torch.arange(parents.shape[1] - count, parents.shape[1], device=tokens.device)
        deepest = len(self._parents) - 1
        return Nodes(tokens, slots.expand(rows, count), depths, ancestors[:, -count:], deepest)

    def grow(self, log_p: Tensor) -> Tensor:
        """Add children of the nodes expanded last, log_p [B, w, V'], and expand the best of them.

        Returns:
            [B, w'] the parent, among the w nodes, of each node that is expanded now; none at the last level.
        """
        self.level += 1
        branch = self.shape.branch(self.level)
        if self._merges:  # equal siblings share children, which need one q, equal to the last bit
            log_p = pick(log_p, first_equal(self._place))
        if self.draws is None:
            log_ps, children = log_p.topk(branch)
        else:
            children = self.draws(log_p, branch, self.level)
            log_ps = log_p.gather(-1, children)
        candidates = children.flatten(1)
        if self.names is not None:
            candidates = self.names[candidates]
        scores = (self.scores[..., None] + log_ps).flatten(1)
        parents = self._place[..., None].expand(-1, -1, branch).flatten(1)
        if self._drawn is not None:
            self._q.append(log_p.exp().repeat_interleave(branch, 1))
            scores = scores.masked_fill(self._ended[:, None], -math.inf)
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
        if self._merges:
            index = first_equal((parents << 32) + candidates).gather(1, index)
        self._place = self._pooled + index
        self._pooled += scores.shape[1]
        return parent

    def _is_hopeless(self, scores: Tensor) -> bool:
        """Whether every path of every row is too unlikely; reads the device only if the shape stops early."""
        least = self.shape.stops_below(self.level)
        if least <= 0:
            return False
        self._ended = scores.amax(-1) < math.log(least)
        return bool(self._ended.all())

    def draft(self) -> tuple[Tree, Tensor]:
        """The proposed tree, and [B, n] the log-probabilities of its paths.

        A row with log-probabilities that are not numbers proposes the root alone.
        """
        tokens, parents, scores = (torch.cat(parts, 1) for parts in zip(*self._pool, strict=True))
        faulty = (scores.isnan() | (scores == math.inf)).any(-1)
        scores = scores.masked_fill(faulty[:, None], -math.inf)
        scores[:, 0] = 0.0
        chosen = self.shape.choose(scores)
        tokens, scores = tokens.gather(1, chosen), scores.gather(1, chosen)
        draft = Tree(
            tokens,
            scores > -math.inf,
            DraftKind.POINT if self.draws is None else self.draws.kind,
            PointMass(tokens[:, 1:]) if self._drawn is None else self._drawn_from(self._drawn, chosen),
            faulty,
            renumber(parents, chosen),
            self.level,
            self.shape.most_together if self._merges else self.shape.max_children,
        )
        return draft, scores

    def _drawn_from(self, draws: SiblingDraws, chosen: Tensor) -> Categorical:
        """The distributions over all V that the chosen nodes [B, n], the root aside, were drawn from."""
        q = pick(torch.cat(self._q, 1), chosen[:, 1:] - 1)
        if self.names is not None:
            q = q.new_zeros(*q.shape[:2], draws.vocabulary).index_copy(2, self.names, q)
        return Categorical(q)
