"""Static trees of measured rates: the best there are, parents and elder siblings first."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmspec.decoding.draft import check_tree
from mmspec.drafters.tree import StaticTree, best_first

Rates = list[list[float]]


@st.composite
def rates_of_heads(draw: st.DrawFn) -> Rates:
    """Of up to three heads, up to four ranks each, likelier ones first."""
    one = st.lists(st.floats(0.01, 1.0), min_size=1, max_size=4)
    return [sorted(draw(one), reverse=True) for _ in range(draw(st.integers(1, 3)))]


def worths(parents: list[int], rates: Rates) -> list[float]:
    """The product of rates along the path to each node but the root."""
    depths, made, seen = check_tree(parents), [1.0], [0] * len(parents)
    for node, parent in enumerate(parents[1:], 1):
        made.append(made[parent] * rates[depths[node] - 1][seen[parent]])
        seen[parent] += 1
    return made[1:]


def no_tree_is_worth_more(rates: Rates, nodes: int) -> None:
    every = [
        math.prod(rates[level][rank] for level, rank in enumerate(path))
        for depth in range(1, len(rates) + 1)
        for path in itertools.product(*(range(len(each)) for each in rates[:depth]))
    ]
    got = worths(best_first(rates, nodes), rates)
    best = sorted(every, reverse=True)[:nodes]
    assert len(got) == len(best) and math.isclose(sum(got), sum(best), rel_tol=1e-9)
    assert got == pytest.approx(sorted(got, reverse=True))


@settings(max_examples=80, deadline=None)
@given(rates_of_heads(), st.integers(1, 20))
def test_no_tree_is_worth_more(rates: Rates, nodes: int) -> None:
    no_tree_is_worth_more(rates, nodes)


def test_an_elder_sibling_comes_along_even_where_it_was_right_less_often() -> None:
    shape = StaticTree(best_first([[0.1, 0.8]], 2))
    assert (shape.num_draft_tokens, shape.max_children) == (2, 2)


@pytest.mark.parametrize("rates", [[], [[]]])
def test_nothing_known_gives_the_root_alone(rates: Rates) -> None:
    assert best_first(rates, 5) == [0]
