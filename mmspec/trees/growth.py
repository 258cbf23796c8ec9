"""Candidate trees: their shapes, and level-by-level growth.

A shape selects nodes by their scores alone, and `TreeGrowth` takes log-probabilities; neither needs a model.
The *pool* holds the root, then the candidates of level 1, level 2 and so on, so that parents come before
their children. *Expanded* nodes are those that get children. They are numbered level by level, in the order
in which a head processes them.
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
from mmspec.trees.siblings import SiblingDraws, kind_of
from mmspec.validation import MAX_DRAFT_TOKENS, check_draft_tokens, is_integer

MAX_LEVELS = 64
LEVELS = re.compile(r"[1-9]\d{0,3}(x[1-9]\d{0,3})*")
#: Static trees, each node given by the ranks along its path: "01" is the second child of the root's first
#: child.
NAMED_TREES = {
    # EAGLE-1's 25 nodes (2401.15077): wide at the top, five deep along the most likely path
    "eagle": "0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 0000 0001 0002 00000 00001",
    # Medusa's 63 nodes for Vicuna 7B (2401.10774): optimised for the measured hit rate of each rank
    "medusa": "0 1 2 3 4 5 6 7 8 9 00 01 02 03 04 05 06 07 08 09 10 11 12 13 14 15 16 20 21 22 30 31 40 50 "
    "60 70 80 90 000 001 002 003 004 005 006 007 008 009 010 011 012 020 021 030 040 050 060 070 100 101 "
    "200 0000 0001",
    # for flat distributions, where depth helps little
    "wide": "0 1 2 3 4 5 6 7 8 9 00 01 02 03 04 05 10 11 12 13 20 21 22 30 31 40 50 "
    "000 001 002 003 010 011 020 100 101 200 0000 0001 0010",
}


@dataclass(frozen=True)
class DynamicTree:
    """Tree of the most likely paths by the drafter's confidence (EAGLE-2, 2406.16858, section 4).

    Each level expands its `top_k` best candidates, and the best of all candidates form the draft. A score is
    the sum of the log-probabilities along a path, so that a child's score never exceeds its parent's. Of
    equal scores the earlier node, which is the parent, is selected. Therefore the parent of every selected
    node is selected.

    Args:
        num_draft_tokens: number of candidates of the draft, without the root.
        depth: the deepest level; level 1 holds the root's children.
        top_k: nodes expanded on each level, and children of each.
        stop_below: smallest probability of the most likely path at which another level is added; 0 adds all
            levels.
        least: the same for each level except the last, where it exceeds `stop_below`; may be ().

    Raises:
        InputError: a value outside its range, or more draft tokens than candidates.
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
                raise InputError(name, value, f"must be an integer from 1 to {most}")
        candidates = self.top_k + (self.depth - 1) * self.top_k**2
        if self.num_draft_tokens > candidates:
            rule = f"must be at most {candidates}, the limit of depth={self.depth}, top_k={self.top_k}"
            raise InputError("num_draft_tokens", self.num_draft_tokens, rule)

    @property
    def max_children(self) -> int:
        """Largest number of children of a node."""
        return self.top_k

    @property
    def most_together(self) -> int:
        """Largest number of candidates of a level."""
        return self.top_k**2

    def limited(self, nodes: int, least: Callable[[int], Sequence[float]]) -> DynamicTree:
        """Return a tree of at most `nodes` candidates with early stops; see `DraftSession.limit`."""
        most = min(nodes, self.num_draft_tokens)
        depth, top_k = min(self.depth, most), min(self.top_k, most)
        most = min(most, top_k + (depth - 1) * top_k**2)
        return DynamicTree(most, depth, top_k, self.stop_below, tuple(least(depth)))

    def stopping_below(self, probability: float) -> DynamicTree:
        """Return a tree that adds no level after one whose paths are all less likely than `probability`."""
        return replace(self, stop_below=probability)

    def stops_below(self, level: int) -> float:
        """Smallest probability of the most likely path to a level at which another level is added."""
        return max(self.stop_below, self.least[level - 1] if level <= len(self.least) else 0.0)

    def branch(self, level: int) -> int:
        """Number of candidates of a level under each expanded node."""
        return self.top_k

    def frontier(self, level: int, scores: Tensor) -> Tensor:
        """Select the candidates of a level to expand: scores [B, m] -> indices [B, w]."""
        return best(scores, self.top_k)

    def choose(self, scores: Tensor) -> Tensor:
        """Select the nodes of the draft: scores of the pool [B, p] -> ascending [B, n], the root first."""
        return best(scores, self.num_draft_tokens + 1, ascending=True)


class StaticTree:
    """A tree of fixed shape: the r-th child of a node is its r-th most likely token, or its r-th draw.

    The methods are those of `DynamicTree`.

    Args:
        parents: the parent of each node; the root comes first and is its own parent.

    Raises:
        InputError: the parents do not form a tree in that order, or the tree is the root alone.

    Attributes:
        stop_below: see `DynamicTree`; a drawn level is kept whole, so that no rule is biased.
        most_together: largest number of nodes of a level; equal siblings that share children may give all of
            them to one parent.
        is_full: whether all nodes of a level have the same number of children.
        slots: number of each node among the expanded ones; 0 for leaves and the root.
        parents: parent of each node of a draft, the root first; nodes are ordered by level, parent and rank.
        ranks: level and rank of each candidate of a draft, both from 0.
    """

    stop_below = 0.0

    def __init__(self, parents: Sequence[int]) -> None:
        depths = check_tree(parents)
        self.num_draft_tokens = check_draft_tokens(len(parents) - 1)
        self.depth = max(depths)
        children = [[i for i, p in enumerate(parents) if i and p == node] for node in range(len(parents))]
        self.max_children = max(map(len, children))
        self.most_together = max(map(depths.count, range(1, self.depth + 1)))
        # candidates are numbered by (expanded node, rank), and expanded nodes in ascending order
        self._branch, self._frontier, self._chosen = [0], [[0]], [0]
        expanded, pool = [0], 1
        ordered, ranks = [0], list[tuple[int, int]]()
        read: list[int] = []  # places of expanded nodes in the pool
        while expanded:
            branch = max(len(children[node]) for node in expanded)
            places = {
                child: index * branch + rank
                for index, node in enumerate(expanded)
                for rank, child in enumerate(children[node])
            }
            self._chosen += [pool + place for place in sorted(places.values())]
            ordered += sorted(places, key=places.__getitem__)
            ranks += [(len(self._branch) - 1, place % branch) for place in sorted(places.values())]
            read += [pool + place for node, place in places.items() if children[node]]
            pool += len(expanded) * branch
            expanded = sorted((node for node in places if children[node]), key=places.__getitem__)
            self._branch.append(branch)
            self._frontier.append([places[node] for node in expanded])
        sizes = accumulate(self._branch[1:], operator.mul)
        self.is_full = self.num_draft_tokens == sum(sizes)
        named = {node: index for index, node in enumerate(ordered)}
        self.parents, self.ranks = tuple(named[parents[node]] for node in ordered), tuple(ranks)
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
                rule = f"must have at most {MAX_DRAFT_TOKENS} nodes"
                raise InputError("tree", "x".join(map(str, counts)), rule)
        parents, level = [0], range(1)
        for count in counts:
            start = len(parents)
            parents += [node for node in level for _ in range(count)]
            level = range(start, len(parents))
        return cls(parents)

    @classmethod
    def named(cls, name: str) -> StaticTree:
        """Build one of `NAMED_TREES`."""
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
        chosen = tuple(place for place in self._chosen if place < scores.shape[1])  # of grown levels
        return constant(chosen, scores.device).expand(len(scores), -1)


Shape = TypeVar("Shape", DynamicTree, StaticTree, DynamicTree | StaticTree)
TreeShape = DynamicTree | StaticTree
"""Shape of a growing tree. Widths depend on the level alone, so that tensor shapes stay static."""


class TreeSizes(Protocol):
    """Default sizes of a head's tree."""

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
    """Choose the tree for a drafter's arguments; missing sizes adapt to the given ones.

    Args:
        usual: config of a head, whose sizes are the defaults. Its `hit_rates`, if any, were measured in
            training.
        num_draft_tokens, depth, top_k: sizes of a dynamic tree.
        tree: "dynamic"; or a static tree: one of `NAMED_TREES`, the number of children per node of each level
            such as "4x2x2", or the parents of its nodes; or "measured", the best static one of
            `num_draft_tokens`.

    Raises:
        InputError: a value outside its range, or sizes of a dynamic tree together with a static one.
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
        if num_draft_tokens is None and sane:  # DynamicTree raises otherwise
            nodes = max(depth, top_k, min(nodes, top_k + (depth - 1) * top_k**2))
        return DynamicTree(nodes, depth, top_k)
    for name, value in (("num_draft_tokens", num_draft_tokens), ("depth", depth), ("top_k", top_k)):
        if value is not None:
            rule = f"cannot be combined with tree={tree!r}; it is a size of a dynamic tree"
            raise InputError(name, value, rule)
    return static_tree(tree, ["dynamic", *NAMED_TREES, *(["measured"] if rates else [])])


def static_tree(tree: str | int | Sequence[int], known: Sequence[str] = tuple(NAMED_TREES)) -> StaticTree:
    """Build a static tree from a name, the numbers of children per level, or a list of parents.

    Args:
        tree: a key of `NAMED_TREES`, "4x2x2", or the parents as in `StaticTree`.
        known: names for the error message.

    Raises:
        InputError: the tree does not exist, or has too many nodes.
    """
    if isinstance(tree, int):  # one level, parsed as a number by the command line
        tree = str(tree)
    if not isinstance(tree, str):
        return StaticTree(tree)
    if LEVELS.fullmatch(tree):
        return StaticTree.of_levels([int(count) for count in tree.split("x")])
    if tree not in NAMED_TREES:
        raise InputError("tree", tree, did_you_mean(tree, known))
    return StaticTree.named(tree)


@functools.cache  # graphs know trees by their identity
def smaller_trees(shape: TreeShape) -> tuple[TreeShape, ...]:
    """Return a tree, and smaller ones down to a single candidate; a static tree has no smaller ones.

    Each has half the levels of the one before, which a drafter computes one after the other, and a quarter of
    its candidates, which the target computes together.
    """
    if not isinstance(shape, DynamicTree) or shape.num_draft_tokens == 1:
        return (shape,)
    depth = -(-shape.depth // 2)
    nodes = max(depth, -(-shape.num_draft_tokens // 4))
    top_k = min(shape.top_k, nodes)
    nodes = min(nodes, top_k + (depth - 1) * top_k**2)
    smaller = replace(shape, num_draft_tokens=nodes, depth=depth, top_k=top_k)
    return shape, *smaller_trees(smaller)


def drawable(shape: Shape, sampling: str) -> Shape:
    """Return the shape, checking that siblings can be drawn in it.

    Raises:
        InputError: the shape would depend on the drawn tokens; or nodes of one level have different numbers
            of children, so that equal siblings cannot share them.
    """
    kind = kind_of(sampling)
    if kind.is_drawn and not isinstance(shape, StaticTree):
        rule = f"must be static (4x2x2, a name or parents) with sampling={sampling!r}"
        raise InputError("tree", "dynamic", rule)
    if kind is DraftKind.IID and isinstance(shape, StaticTree) and not shape.is_full:
        rule = f"must give children per level, such as 4x2x2, with sampling={sampling!r}"
        raise InputError("tree", "one of uneven levels", rule)
    return shape


def best_first(rates: Sequence[Sequence[float]], nodes: int) -> list[int]:
    """Build the tree of largest expected acceptance length (Medusa, 2401.10774, section 3.3): its parents.

    The expected gain of a node is the product of the rates along its path, by head and rank, as if the heads
    were correct independently. Nodes are added in the order of their gain, parents and elder siblings first.
    The tree has fewer than `nodes` candidates if the rates describe fewer.
    """
    parents = [0]
    # gain of a candidate (negative) and of its parent; its level and rank; its parent
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


@functools.cache  # avoids copying the indices to the device in every round
def constant(index: tuple[int, ...], device: torch.device) -> Tensor:
    """Return indices as a tensor on a device."""
    return torch.tensor(index, device=device)


def first_equal(values: Tensor) -> Tensor:
    """[B, m] index of the first equal entry in each row [B, m]."""
    return (values[:, :, None] == values[:, None]).long().argmax(-1)


@functools.cache
def fixed(shape: TreeShape) -> StaticTree | None:
    """Return the static tree that a shape always has, which a chain is too; None if it depends on scores."""
    if shape.stop_below or isinstance(shape, DynamicTree) and (shape.top_k > 1 or shape.least):
        return None
    return shape if isinstance(shape, StaticTree) else StaticTree.of_levels([1] * shape.num_draft_tokens)


def draft_at_once(
    shape: StaticTree, root: Tensor, log_p: Tensor, names: Tensor | None
) -> tuple[Tree, Tensor]:
    """Draft a static tree of the likeliest tokens of heads that do not see each other's tokens.

    The tree is that of `TreeGrowth`, which needs an operation or more for each level.

    Args:
        shape: the tree.
        root: [B] the newest tokens.
        log_p: [B, D, V'] log-probabilities of each level; D is at least the depth of the tree.
        names: [V'] target token of each of them; None for the whole vocabulary.

    Returns:
        The draft, and [B, n] the log-probabilities of its paths; see `TreeGrowth.draft`.
    """
    width, device = shape.max_children, root.device
    said, children = (each.flatten(1) for each in log_p.topk(width))
    index = constant(tuple(level * width + rank for level, rank in shape.ranks), device)
    parents = constant(shape.parents, device)
    candidates = children[:, index]
    tokens = torch.cat([root[:, None], candidates if names is None else names[candidates]], 1)
    scores = torch.cat([torch.zeros_like(said[:, :1]), said[:, index]], 1)
    at, total = parents, scores
    for _ in range(1, shape.depth):
        total = total + scores[:, at]
        at = parents[at]
    faulty = (total.isnan() | (total == math.inf)).any(-1)
    total = total.masked_fill(faulty[:, None], -math.inf)
    total[:, 0] = 0.0
    draft = Tree(
        tokens,
        total > -math.inf,
        DraftKind.POINT,
        PointMass(tokens[:, 1:]),
        faulty,
        parents.expand(len(root), -1),
        shape.depth,
        width,
    )
    return draft, total


def renumber(parents: Tensor, chosen: Tensor) -> Tensor:
    """[B, n] parents of the chosen nodes, renumbered among them; the arguments index the pool."""
    return torch.searchsorted(chosen.contiguous(), parents.gather(1, chosen))


class TreeGrowth:
    """A batch of trees that grow level by level.

    Args:
        shape: shape of the trees.
        root: [B] the newest tokens.
        draws: how the children of a node are chosen. Only these are mapped to target tokens, which costs less
            than logits of the whole vocabulary. Equal siblings that were drawn independently share their
            children, which belong to the first (SpecTr, 2310.15141).

    Attributes:
        level: level of the nodes expanded last; 0 for the root.
        tokens: [B, w] tokens of those nodes.
        scores: [B, w] log-probabilities of their paths.
        is_grown: whether the deepest level is reached, or no path is likely enough for another level.
    """

    def __init__(self, shape: TreeShape, root: Tensor, draws: SiblingDraws) -> None:
        self.shape, self.draws = shape, draws
        self._merges = draws.kind is DraftKind.IID
        self._q: list[Tensor] = []  # [B, w * branch, V'] q of the candidates of each level, if drawn
        self._ended = torch.zeros_like(root, dtype=torch.bool)  # [B] rows whose paths are too unlikely
        self.level = 0
        self.tokens = root[:, None]
        self.scores = torch.zeros(root.shape, dtype=torch.float32, device=root.device)[:, None]
        place = torch.zeros_like(self.tokens)
        self._place = place  # [B, w] pool indices of the nodes expanded last
        self._pool = [(self.tokens, place, self.scores)]
        self._pooled = 1
        self._parents: list[Tensor] = []  # of expanded nodes; those of level 1 are their own parents
        self.is_grown = False

    def nodes(self, tokens: Tensor) -> Nodes:
        """Return the nodes expanded last, tokens [B, n], as input of a head that has read the others."""
        rows, count = tokens.shape
        parents = torch.cat(self._parents, 1)
        # the root's children are at the position of the root's successor, at depth 0
        ancestors, depths = tree_paths(parents, len(self._parents))
        slots = torch.arange(parents.shape[1] - count, parents.shape[1], device=tokens.device)
        deepest = len(self._parents) - 1
        return Nodes(tokens, slots.expand(rows, count), depths, ancestors[:, -count:], deepest)

    def grow(self, log_p: Tensor, trust: Tensor | None = None) -> Tensor:
        """Add children of the nodes expanded last, log_p [B, w, V'], and expand the best of them.

        Args:
            log_p: log-probabilities of the children.
            trust: [B, w] log of the overlap with the target's distribution that the head expects after each
                node, which scales the probability of the paths; None for 1.

        Returns:
            [B, w'] the parent, among the w nodes, of each newly expanded node; empty at the last level.
        """
        self.level += 1
        branch = self.shape.branch(self.level)
        if self._merges:  # equal siblings share children and need a bitwise equal q
            log_p = pick(log_p, first_equal(self._place))
        children, chances = self.draws(log_p, branch, self.level)
        if trust is not None:
            chances = chances + trust[..., None]
        candidates = children.flatten(1)
        if self.draws.names is not None:
            candidates = self.draws.names[candidates]
        scores = (self.scores[..., None] + chances).flatten(1)
        parents = self._place[..., None].expand(-1, -1, branch).flatten(1)
        if self.draws.kind.is_drawn:
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
        """Whether every path is too unlikely; synchronises only if the shape stops early."""
        least = self.shape.stops_below(self.level)
        if least <= 0:
            return False
        self._ended = scores.amax(-1) < math.log(least)
        return bool(self._ended.all())

    def draft(self) -> tuple[Tree, Tensor]:
        """Return the draft, and [B, n] the log-probabilities of its paths.

        For a row with invalid log-probabilities the draft is the root alone.
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
            self.draws.kind,
            self._drawn_from(chosen) if self.draws.kind.is_drawn else PointMass(tokens[:, 1:]),
            faulty,
            renumber(parents, chosen),
            self.level,
            self.shape.most_together if self._merges else self.shape.max_children,
        )
        return draft, scores

    def _drawn_from(self, chosen: Tensor) -> Categorical:
        """The distributions over all V from which the chosen nodes [B, n] were drawn, the root excluded."""
        q = pick(torch.cat(self._q, 1), chosen[:, 1:] - 1)
        if self.draws.names is not None:
            q = q.new_zeros(*q.shape[:2], self.draws.vocabulary).index_copy(2, self.draws.names, q)
        return Categorical(q)
