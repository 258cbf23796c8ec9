"""Growing trees: parents before children, no orphans, the best; static shapes as drawn."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mmspec.decoding.draft import check_tree
from mmspec.drafters.tree import NAMED_TREES, DynamicTree, StaticTree, TreeShape, best, renumber
from mmspec.errors import InputError

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


def test_choosing_by_unstable_order_would_orphan() -> None:
    """The planted bug that the test above is for: of equal scores, the later one first."""
    shape = DynamicTree(2, 2, 1)
    parents, _, scores = grow(shape, torch.zeros(1, 2))
    flipped = scores.shape[1] - 1 - best(scores.flip(1), 2)
    assert any(int(parents[0, node]) not in flipped[0].tolist() for node in flipped[0].tolist())


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


@pytest.mark.parametrize("name", NAMED_TREES)
def test_named_trees_hold_the_start_of_each_path(name: str) -> None:
    paths = NAMED_TREES[name].split()
    assert len(set(paths)) == len(paths)
    for path in paths:
        assert not path[:-1] or path[:-1] in paths
        assert path[-1] == "0" or path[:-1] + str(int(path[-1]) - 1) in paths, "elder siblings come along"
    shape = StaticTree.named(name)
    assert shape.num_draft_tokens == len(paths) and shape.depth == max(map(len, paths))


def test_the_tree_of_eagle() -> None:
    shape = StaticTree.named("eagle")
    assert (shape.num_draft_tokens, shape.depth, shape.max_children) == (25, 5, 4)
    assert [shape.branch(level) for level in range(1, 6)] == [4, 3, 3, 3, 2]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((0, 1, 1), "num_draft_tokens"),
        ((513, 9, 9), "num_draft_tokens"),
        ((5, 0, 1), "depth"),
        ((5, 6, 1), "depth"),
        ((5, 2, 0), "top_k"),
        ((5, 2, 6), "top_k"),
        ((5, 2, True), "top_k"),
        ((7, 2, 2), "num_draft_tokens"),  # 2 + 4 candidates
    ],
)
def test_sizes_out_of_range_are_named(arguments: tuple[int, int, int], named: str) -> None:
    with pytest.raises(InputError) as caught:
        DynamicTree(*arguments)
    assert caught.value.argument == named


@pytest.mark.parametrize("parents", [[], [0], [1, 0], [0, 2, 0]])
def test_parents_that_are_no_tree_are_refused(parents: list[int]) -> None:
    with pytest.raises(InputError):
        StaticTree(parents)


def test_frontiers_hold_the_best_in_their_order() -> None:
    scores = torch.tensor([[-1.0, -3.0, -1.0, -2.0]])
    assert DynamicTree(3, 2, 2).frontier(1, scores).tolist() == [[0, 2]]
    for order in itertools.permutations(range(3)):
        ranked = -torch.tensor([order], dtype=torch.float)
        assert best(ranked, 3)[0].tolist() == [order.index(i) for i in range(3)]
