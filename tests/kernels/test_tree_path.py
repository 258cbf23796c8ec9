"""Accepted paths: against walking down, the kernels against torch for trees and chains."""

import pytest
import torch

from mmspec.kernels import deepest_node, match_path, path_to, tree_paths
from tests.kernels.trees import path_up, random_tree

SHAPES = [(1, 1, 0.5), (3, 2, 0.5), (4, 17, 0.2), (3, 64, 0.5), (2, 70, 0.3)]
CHAINS = [(1, 1), (4, 5), (3, 16), (2, 33)]


class Case:
    """A draft with few different tokens, so that paths are long and siblings may be equal."""

    def __init__(self, rows, nodes, lean=None, seed=0, device="cpu"):
        generator = torch.Generator().manual_seed(seed)
        tree = random_tree(rows, nodes, seed, 1.0 if lean is None else lean, device)
        self.parents, self.valid, self.max_depth = tree.parents, tree.valid, tree.max_depth
        draws = torch.randint(0, 2, (3, rows, nodes), generator=generator)
        self.tokens = draws[0].to(device)
        self.choice = (draws[0] * draws[1].clamp_min(draws[2])).to(device)  # equal to the tokens, mostly
        self.paths = (None, None) if lean is None else tree_paths(self.parents, self.max_depth)

    @property
    def match_arguments(self):
        return self.tokens, self.choice, self.parents, self.valid, *self.paths, self.max_depth

    def path_arguments(self, node):
        next_token = 100 + torch.arange(len(node), device=node.device)
        return self.tokens, *self.paths, node, next_token, self.max_depth

    def nodes(self):
        rows, nodes = self.tokens.shape
        return (7 + 5 * torch.arange(rows, device=self.tokens.device)) % nodes


CASES = [*SHAPES, *((*shape, None) for shape in CHAINS)]


@pytest.mark.parametrize("case", CASES)
def test_the_path_is_the_longest_whose_nodes_all_match(case):
    case = Case(*case)
    path, accepted, values = match_path(*case.match_arguments)
    for row, parents in enumerate(case.parents.tolist()):
        tokens, choice = case.tokens[row].tolist(), case.choice[row].tolist()
        best = [0]
        for node in range(len(parents)):
            found = path_up(parents, node)
            good = all(case.valid[row, i] and tokens[i] == choice[parents[i]] for i in found[1:])
            if good and len(found) > len(best):
                best = found
        length = int(accepted[row]) + 1
        assert path[row, :length].tolist() == best
        assert values[row, :length].tolist() == [*(tokens[i] for i in best[1:]), choice[best[-1]]]


@pytest.mark.parametrize("case", CASES)
def test_the_path_to_a_node_ends_there(case):
    case = Case(*case)
    node = case.nodes()
    path, accepted, values = path_to(*case.path_arguments(node))
    for row, parents in enumerate(case.parents.tolist()):
        expected = path_up(parents, int(node[row]))
        assert accepted[row] == len(expected) - 1
        assert path[row, : len(expected)].tolist() == expected
        below = [int(case.tokens[row, i]) for i in expected[1:]]
        assert values[row, : len(expected)].tolist() == [*below, 100 + row]


def assert_equal(ours, expected):
    for one, other in zip(ours, expected, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)


def compare(both, case):
    assert_equal(*both(match_path, *case.match_arguments))
    assert_equal(*both(path_to, *case.path_arguments(case.nodes())))
    passes = case.valid.roll(1, 1)  # of the root, it does not matter
    ours, expected = both(deepest_node, passes, *case.paths)
    assert torch.equal(ours, expected)


@pytest.mark.parametrize("case", CASES)
def test_the_kernels_give_what_torch_gives(case, both, device):
    """Padding included, which the cache moves and the canvas cuts off."""
    compare(both, Case(*case, device=device))


def test_no_rows(both, device):
    case = Case(2, 4, None, device=device)
    case.tokens, case.choice, case.parents, case.valid = (
        each[:0] for each in (case.tokens, case.choice, case.parents, case.valid)
    )
    compare(both, case)
