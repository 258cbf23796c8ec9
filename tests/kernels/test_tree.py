"""Ancestors, depths and children of trees: against walking up, the kernels against torch."""

import pytest
import torch

from mmspec.kernels import tree_children, tree_paths
from tests.kernels.trees import path_up, random_tree

# rows, nodes, how often a node hangs below the one before it
SHAPES = [(1, 1, 0.5), (2, 2, 0.5), (3, 17, 0.0), (2, 16, 1.0), (1, 64, 0.5), (2, 70, 0.3), (0, 3, 0.5)]
TREES = [(*shape, 7) for shape in SHAPES[:-1]]


def make(rows, nodes, lean, seed=7, device="cpu"):
    return random_tree(rows, nodes, seed, lean, device)


@pytest.mark.parametrize("tree", TREES)
def test_paths_and_children_are_those_of_walking_up(tree):
    tree = make(*tree)
    ancestors, depth = tree_paths(tree.parents, tree.max_depth)
    children = tree_children(tree.parents, tree.valid, tree.max_children)
    for row, parents in enumerate(tree.parents.tolist()):
        for node in range(len(parents)):
            path = path_up(parents, node)
            assert ancestors[row, node].nonzero()[:, 0].tolist() == sorted(path)
            assert depth[row, node] == len(path) - 1
            expected = [i for i, p in enumerate(parents) if i and p == node and tree.valid[row, i]]
            padding = [-1] * (tree.max_children - len(expected))
            assert children[row, node].tolist() == expected + padding


def assert_equal(ours, expected):
    for one, other in zip(ours, expected, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)


def compare(both, tree):
    assert_equal(*both(tree_paths, tree.parents, tree.max_depth))
    assert_equal(*([each] for each in both(tree_children, tree.parents, tree.valid, tree.max_children)))


@pytest.mark.parametrize("tree", TREES)
def test_the_kernels_give_what_torch_gives(tree, both, device):
    compare(both, make(*tree, device=device))


def test_no_rows_and_no_children(both, device):
    empty = torch.empty(0, 3, dtype=torch.long, device=device)
    assert_equal(*both(tree_paths, empty, 2))
    root = torch.zeros(2, 1, dtype=torch.long, device=device)
    assert both(tree_children, root, root == 0, 0)[0].shape == (2, 1, 0)


def test_a_bound_above_the_depth_and_several_roots(both, device):
    """Trees of a head that is drafting begin at the root's children, each its own parent."""
    parents = torch.tensor([[0, 1, 2, 0, 0, 2, 5]], device=device)
    ours, expected = both(tree_paths, parents, 6)
    assert_equal(ours, expected)
    assert expected[1].tolist() == [[0, 0, 0, 1, 1, 1, 2]]
