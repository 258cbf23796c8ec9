"""Trees: ancestors, depths and children against loops; verdicts; invalid trees."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmspec.core.draft import Draft, DraftKind, check_tree
from mmspec.core.verdict import Path
from mmspec.errors import InputError
from tests.oracles import ragged_tree


@st.composite
def ragged_drafts(draw: st.DrawFn) -> Draft:
    nodes, rows = draw(st.integers(1, 60)), draw(st.integers(1, 3))
    lean = draw(st.sampled_from([0.0, 0.5, 1.0]))  # 1: chains, 0: any tree
    seed = draw(st.integers(0, 2**32))
    generator = torch.Generator().manual_seed(seed)
    order = torch.arange(nodes)
    parents = (torch.rand(rows, nodes, generator=generator) * order).long()
    parents = torch.where(torch.rand(rows, nodes, generator=generator) < lean, order - 1, parents).clamp_min(
        0
    )
    valid = torch.rand(rows, nodes, generator=generator) < 0.8
    valid[:, 0] = True
    return ragged_tree(torch.randint(9, (rows, nodes), generator=generator), parents, valid, DraftKind.POINT)


def walk_up(parents: list[int], node: int) -> list[int]:
    """The path from the root to a node."""
    path = [node]
    while path[0]:
        path.insert(0, parents[path[0]])
    return path


@settings(max_examples=60, deadline=None, derandomize=True)
@given(ragged_drafts())
def test_ancestors_and_depths_are_those_of_walking_up(draft: Draft) -> None:
    for row, parents in enumerate(draft.parents.tolist()):
        for node in range(len(parents)):
            path = walk_up(parents, node)
            assert draft.ancestors[row, node].nonzero()[:, 0].tolist() == sorted(path)
            assert draft.depth[row, node] == len(path) - 1


@settings(max_examples=60, deadline=None, derandomize=True)
@given(ragged_drafts(), st.integers(0, 2**16))
def test_a_verdict_at_a_node_is_the_path_to_it(draft: Draft, pick: int) -> None:
    rows, nodes = draft.tokens.shape
    node = torch.tensor([(pick + 7 * row) % nodes for row in range(rows)])
    verdict = Path.at(draft, node, torch.zeros(rows, dtype=torch.long))
    assert verdict.nodes.shape == (rows, draft.max_depth + 1)
    for row, parents in enumerate(draft.parents.tolist()):
        path = walk_up(parents, int(node[row]))
        assert verdict.accepted[row] == len(path) - 1
        assert verdict.nodes[row, : len(path)].tolist() == path


@pytest.mark.parametrize(
    ("parents", "argument"),
    [
        ([], "parents"),
        ([0, 1], "parents[1]"),  # its own parent
        ([0, 0, 3, 0], "parents[2]"),  # a child before its parent
        ([0, 9], "parents[1]"),
    ],
)
def test_a_tree_that_is_cyclic_or_unordered_is_refused_by_node(parents: list[int], argument: str) -> None:
    with pytest.raises(InputError) as caught:
        check_tree(parents)
    assert caught.value.argument == argument
