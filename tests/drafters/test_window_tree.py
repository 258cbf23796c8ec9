"""Trees of candidates at the front of a window: who is behind whom."""

from __future__ import annotations

import pytest

from mmspec.drafters.window import WindowTree, read_front


def test_each_chain_goes_to_the_end_of_the_window() -> None:
    tree = WindowTree(5, (2, 3))
    assert tree.parents == [0, 0, 0, 1, 1, 1, 2, 2, 2, *range(3, 15)]
    assert tree.slots == [0, 1, 1, *[2] * 6, *[3] * 6, *[4] * 6]
    assert tree.nodes[0] == [0, 1, 3, 9, 15] and tree.nodes[5] == [0, 2, 8, 14, 20]
    assert tree.chain[:9] == [0, 0, 3, 0, 1, 2, 3, 4, 5]


def test_behind_the_reach_the_first_chain_stands_for_all() -> None:
    tree = WindowTree(6, (2, 2), reach=3)
    assert tree.parents == [0, 0, 0, 1, 1, 2, 2, 3, 4, 5, 6, 7, 11]
    assert tree.nodes[3] == [0, 2, 6, 10, 11, 12] and tree.chain[11:] == [0, 0]
    assert [tree.chains(slot) for slot in range(1, 6)] == [1, 2, 4, 1, 1]


@pytest.mark.parametrize("window", [1, 2, 7])
def test_a_window_without_candidates_is_a_chain(window: int) -> None:
    tree = WindowTree(window, read_front("1x1"[: 2 * window - 3] if window > 1 else ()))
    assert tree.parents == [0, *range(window - 1)] and tree.nodes == [list(range(window))]
