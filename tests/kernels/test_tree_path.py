"""Accepted paths: against walking down, the kernels against torch for trees and chains, planted bugs."""

import pytest
import torch

from mmspec.kernels import deepest_node, match_path, path_to, tree_paths
from tests.kernels.hopper import SHARED_MEMORY, Kernel, compile_for_hopper
from tests.kernels.planting import plant
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


CASES = [(*shape, seed) for shape in SHAPES for seed in range(2)]
CASES += [(*shape, None, seed) for shape in CHAINS for seed in range(2)]


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


def test_vectors_match_where_all_their_numbers_do():
    case = Case(3, 9, 0.3)
    tokens, choice = (torch.stack([each, 1 - each], -1).float() for each in (case.tokens, case.choice))
    path, accepted, values = match_path(tokens, choice, *case.match_arguments[2:])
    ids = match_path(*case.match_arguments)
    assert torch.equal(path, ids[0]) and torch.equal(accepted, ids[1])
    assert torch.equal(values[..., 0], ids[2].float())


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


BUGS = {
    "a chain is never accepted whole": ("tl.where(fails, index, nodes)", "tl.where(fails, index, nodes - 1)"),
    "the first of a chain's nodes is not asked": (
        "tl.where(fails, index",
        "tl.where(fails & (index > 1), index",
    ),
    "depths do not count": ("depth * NODES + (NODES", "0 * depth + (NODES"),
    "one failing node is forgiven": (
        "tl.max((on_path & fails[None, :]).to(tl.int32), 1) > 0",
        "tl.sum((on_path & fails[None, :]).to(tl.int32), 1) > 1",
    ),
    "other rows' ancestors": ("(row * nodes + below)[:, None]", "below[:, None]"),
    "depths of the first row": ("depth_ptr + row * nodes + below", "depth_ptr + below"),
    "invalid nodes match": ("mask & (~valid | ~equal)", "mask & ~equal"),
    "tokens are compared at the node": ("choice_ptr + parent", "choice_ptr + index"),
    "the choice of the root follows": ("tl.load(choice_ptr + node)", "tl.load(choice_ptr)"),
    "values are not shifted": ("values_ptr + depth - 1", "values_ptr + depth"),
    "no padding of the path": (
        "tl.zeros([STEPS], tl.int64), mask=padding",
        "tl.zeros([STEPS], tl.int64) - 1, mask=padding",
    ),
    "the last step of a chain": (
        "tl.where(step + 1 < steps, step + 1, 0)",
        "tl.where(step + 1 < steps, step + 1, step)",
    ),
    "the next token in the first place": (
        "tl.store(values_ptr + accepted,",
        "tl.store(values_ptr + 0 * accepted,",
    ),
    "the depth of the first row's node": (
        "tl.load(depth_ptr + row * nodes + node)",
        "tl.load(depth_ptr + node)",
    ),
}


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_planted_in_the_kernels_is_seen(name, both, device, tmp_path, monkeypatch):
    plant(monkeypatch, tmp_path, "tree_path_triton", *BUGS[name])
    with pytest.raises(AssertionError):
        for case in CASES[4:6] + CASES[12:14]:
            compare(both, Case(*case, device=device))


def test_they_compile_for_hopper_without_spills():
    names = "tokens_ptr choice_ptr parents_ptr depth_ptr path_ptr accepted_ptr values_ptr node_ptr next_ptr"
    types = dict.fromkeys(names.split(), "*i64") | {"nodes": "i32", "steps": "i32"}
    types |= dict.fromkeys(("valid_ptr", "ancestors_ptr", "passes_ptr"), "*i8")
    kernels = []
    for size, steps, block in ((16, 8, 16), (64, 16, 16), (512, 64, 2)):
        for chain in (False, True):
            tile = {"NODES": size, "STEPS": steps, "BLOCK": block}
            tile |= {"ancestors_ptr": None, "depth_ptr": None} if chain else {}
            for name in ("_match_kernel", "_path_kernel", "_deepest_kernel"):
                kernels.append(kernel_of(name, types, tile))
    for made in compile_for_hopper(kernels):
        assert made.spilled == 0 and made.shared <= SHARED_MEMORY


def kernel_of(name, types, constants):
    """A configuration with the arguments that this kernel has."""
    arguments = {
        "_match_kernel": "tokens choice parents valid ancestors depth path accepted values NODES STEPS BLOCK",
        "_path_kernel": "tokens ancestors depth node next path accepted values NODES STEPS",
        "_deepest_kernel": "passes ancestors depth node NODES BLOCK",
    }[name].split()
    known = {*arguments, *(f"{each}_ptr" for each in arguments), "nodes"}
    if "path" in arguments:
        known.add("steps")
    constants = {each: value for each, value in constants.items() if each in known}
    types = {each: kind for each, kind in types.items() if each in known and each not in constants}
    return Kernel("tree_path_triton", name, types, constants)


@pytest.mark.parametrize("lean", [0.4, None])
def test_they_are_ops_of_torch(lean):
    case = Case(3, 9, lean)
    torch.library.opcheck(match_path.op, case.match_arguments)
    torch.library.opcheck(path_to.op, case.path_arguments(case.nodes()))
    torch.library.opcheck(deepest_node.op, (case.valid, *case.paths))


def test_they_compile_into_one_graph():
    case = Case(3, 9, 0.4)

    def verify(tokens, choice, parents, valid):
        paths = tree_paths(parents, case.max_depth)
        node = deepest_node(valid, *paths)
        found = match_path(tokens, choice, parents, valid, *paths, case.max_depth)
        return *found, *path_to(tokens, *paths, node, choice[:, 0], case.max_depth)

    arguments = case.match_arguments[:4]
    assert_equal(torch.compile(verify, fullgraph=True)(*arguments), verify(*arguments))
