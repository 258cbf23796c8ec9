"""Growing trees: parents before children, no orphans, the best; static shapes as drawn."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mmspec.core.draft import DraftKind, check_tree
from mmspec.core.random_stream import RandomStream
from mmspec.core.sampling import Sampler
from mmspec.trees.growth import (
    NAMED_TREES,
    DynamicTree,
    StaticTree,
    TreeGrowth,
    TreeShape,
    best_first,
    draft_at_once,
    renumber,
)
from mmspec.trees.siblings import SiblingDraws

LEVELS = (
    -2.0,
    -1.0,
    -0.5,
    -1e-9,
    0.0,
)  # zeros: where log-probabilities round away, a child equals its parent


def grow(shape: TreeShape, steps: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The pool of a shape with given log-probabilities: parents, depths, scores, each [1, p]."""
    zero = torch.zeros(1, 1)
    parents, depths, scores = [zero.long()], [zero.long()], [zero]
    frontier, pool, size, used = zero, zero.long(), 1, 0
    for level in range(1, shape.depth + 1):
        branch = shape.branch(level)
        count = frontier.shape[1] * branch
        step = steps[:, used : used + count].view(1, -1, branch).sort(-1, descending=True).values
        used += count
        level_scores = (frontier[..., None] + step).flatten(1)
        parents.append(pool.repeat_interleave(branch, 1))
        depths.append(torch.full((1, count), level))
        scores.append(level_scores)
        if level < shape.depth:
            index = shape.frontier(level, level_scores)
            frontier, pool = level_scores.gather(1, index), size + index
        size += count
    return torch.cat(parents, 1), torch.cat(depths, 1), torch.cat(scores, 1)


@st.composite
def dynamic_trees(draw: st.DrawFn) -> tuple[DynamicTree, Tensor]:
    depth, top_k = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    candidates = top_k + (depth - 1) * top_k**2
    most = st.integers(max(depth, top_k), candidates)
    shape = DynamicTree(draw(most), depth, top_k)
    steps = draw(st.lists(st.sampled_from(LEVELS), min_size=candidates, max_size=candidates))
    return shape, torch.tensor([steps])


@settings(max_examples=150, deadline=None)
@given(dynamic_trees())
def test_a_dynamic_tree_has_no_orphans_and_the_best_nodes(case: tuple[DynamicTree, Tensor]) -> None:
    shape, steps = case
    parents, _, scores = grow(shape, steps)
    chosen = shape.choose(scores)
    kept = chosen[0].tolist()
    assert len(kept) == len(set(kept)) == shape.num_draft_tokens + 1 and kept[0] == 0
    assert all(int(parents[0, node]) in kept for node in kept), "an orphan"
    check_tree(renumber(parents, chosen)[0].tolist())
    left = [i for i in range(scores.shape[1]) if i not in kept]
    if left:
        assert scores[0, kept].min() >= scores[0, left].max(), "a better candidate was left out"


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_static_tree_is_the_tree_that_was_drawn(data: st.DataObject) -> None:
    size = data.draw(st.integers(2, 14))
    drawn = [0, *(data.draw(st.integers(0, node - 1)) for node in range(1, size))]
    shape = StaticTree(drawn)
    pool = 1 + sum(
        width * shape.branch(level)
        for level, width in enumerate(
            [1, *(shape.frontier(level, torch.zeros(1, 1)).shape[1] for level in range(1, shape.depth))], 1
        )
    )
    parents, depths, scores = grow(shape, torch.linspace(-1, 0, pool)[None])
    chosen = shape.choose(scores)
    got = renumber(parents, chosen)[0].tolist()
    assert sorted(check_tree(got)) == sorted(check_tree(drawn)) == depths.gather(1, chosen)[0].tolist()
    assert canonical(got) == canonical(drawn)


def canonical(parents: list[int], node: int = 0) -> tuple[object, ...]:
    """A tree as nested tuples; siblings in their order."""
    return tuple(canonical(parents, child) for child, p in enumerate(parents) if child and p == node)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_tree_drafted_at_once_is_the_one_that_grows(data: st.DataObject) -> None:
    size = data.draw(st.integers(2, 14))
    shape = StaticTree([0, *(data.draw(st.integers(0, node - 1)) for node in range(1, size))])
    log_p = torch.randn(4, shape.depth + 1, 15).log_softmax(-1)
    log_p[1, 0, 3:] = -math.inf  # fewer tokens than children
    log_p[2, shape.depth - 1] = math.nan
    log_p[3, 0] = -math.inf  # no token at all
    root, names = torch.arange(4), torch.arange(15) * 2
    draws = SiblingDraws(DraftKind.POINT, Sampler(0.0), RandomStream.from_seed(0, 4), root, 30, names)
    growth = TreeGrowth(shape, root, draws)
    while not growth.is_grown:
        growth.grow(log_p[:, growth.level, None].expand(-1, growth.tokens.shape[1], -1))
    due, likelihoods = growth.draft()
    made, scores = draft_at_once(shape, root, log_p, names)
    assert torch.equal(made.parents, due.parents) and torch.equal(made.faulty, due.faulty)
    assert torch.equal(made.valid, due.valid) and torch.allclose(scores, likelihoods, atol=1e-6)
    assert torch.equal(made.tokens[due.valid], due.tokens[due.valid])
    assert (made.max_depth, made.max_children) == (due.max_depth, due.max_children)


@pytest.mark.parametrize("name", NAMED_TREES)
def test_named_trees_hold_the_start_of_each_path(name: str) -> None:
    paths = NAMED_TREES[name].split()
    assert len(set(paths)) == len(paths)
    for path in paths:
        assert not path[:-1] or path[:-1] in paths
        assert path[-1] == "0" or path[:-1] + str(int(path[-1]) - 1) in paths, "elder siblings come along"
    shape = StaticTree.named(name)
    assert shape.num_draft_tokens == len(paths) and shape.depth == max(map(len, paths))


Rates = list[list[float]]


@st.composite
def rates_of_heads(draw: st.DrawFn) -> Rates:
    """Rates of up to three heads, up to four ranks each, likelier ones first."""
    one = st.lists(st.floats(0.01, 1.0), min_size=1, max_size=4)
    return [sorted(draw(one), reverse=True) for _ in range(draw(st.integers(1, 3)))]


def worths(parents: list[int], rates: Rates) -> list[float]:
    """The product of rates along the path to each node but the root."""
    depths, made, seen = check_tree(parents), [1.0], [0] * len(parents)
    for node, parent in enumerate(parents[1:], 1):
        made.append(made[parent] * rates[depths[node] - 1][seen[parent]])
        seen[parent] += 1
    return made[1:]


@settings(max_examples=80, deadline=None)
@given(rates_of_heads(), st.integers(1, 20))
def test_no_tree_is_worth_more(rates: Rates, nodes: int) -> None:
    every = [
        math.prod(rates[level][rank] for level, rank in enumerate(path))
        for depth in range(1, len(rates) + 1)
        for path in itertools.product(*(range(len(each)) for each in rates[:depth]))
    ]
    got = worths(best_first(rates, nodes), rates)
    best = sorted(every, reverse=True)[:nodes]
    assert len(got) == len(best) and math.isclose(sum(got), sum(best), rel_tol=1e-9)
    assert got == pytest.approx(sorted(got, reverse=True))
