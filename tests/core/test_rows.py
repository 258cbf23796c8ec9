"""Rows that leave and enter a batch, also while distributions under top-k are stored as pairs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LogitsProcessorList, TemperatureLogitsWarper

from mmspec.core.canvas import Canvas, Stopping
from mmspec.core.distributions import Categorical, Pairs, PointMass
from mmspec.core.draft import DraftKind, Tree
from mmspec.core.random_stream import Purpose, RandomStream
from mmspec.core.rows import concat, select
from mmspec.core.sampling import Sampler
from mmspec.core.statistics import DecodingStats
from mmspec.core.verdict import Measured, Path
from tests.oracles import mass

CPU = torch.device("cpu")


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 2), st.integers(1, 3), st.integers(1, 3))
def test_joined_rows_stand_behind_one_another_in_every_copy(
    rows: int, others: int, copies: int, width: int, other_width: int
) -> None:
    first = torch.arange(copies * rows * width).view(copies * rows, width) + 1
    second = -torch.arange(copies * others * other_width).view(copies * others, other_width) - 1
    both, counts = rows + others, (rows, others)
    joined = concat(first, second, counts)
    assert torch.equal(select(joined, range(rows), both)[:, :width], first)
    behind = select(joined, range(rows, both), both)
    assert torch.equal(behind[:, :other_width], second)
    assert not behind[:, other_width:].any()
    lists = concat(first[:, 0].tolist(), second[:, 0].tolist(), counts)
    assert lists == joined[:, 0].tolist()
    assert select(lists, [rows, 0], both) == select(joined[:, 0], [rows, 0], both).tolist()


def test_settings_of_rows_are_joined_and_parted() -> None:
    warp = LogitsProcessorList([TemperatureLogitsWarper(2.0)])
    first, second = (
        Sampler(temperature=0.5, top_k=3),
        Sampler(temperature=[0.0, 1.0], processors=[warp, warp]),
    )
    both = first.joined(second, (2, 2))
    assert both.temperature == (0.5, 0.5, 0.0, 1.0) and both.top_k == (3, 3, 0, 0)
    assert [len(row) for row in both.processors] == [0, 0, 1, 1]
    assert both.part([0, 1]).temperature == 0.5 and both.part([3]).temperature == 1.0


def test_joined_distributions_of_another_k_keep_the_mass_of_token_0() -> None:
    dense = torch.tensor([[[0.7, 0.3, 0.0, 0.0]]])
    whole, narrow, wide = Categorical(dense), Pairs.of(dense, 1), Pairs.of(dense, 3)
    joined = concat(narrow, wide, (1, 1))
    assert isinstance(joined, Pairs) and torch.equal(joined.p, torch.cat([narrow.p, wide.p]))
    assert torch.equal(select(joined, [1]).p, wide.p)
    for one, two in ((narrow, whole), (whole, narrow), (whole, whole)):
        joined = concat(one, two, (1, 1))
        assert torch.equal(joined.p, torch.cat([one.p, two.p]))
        assert torch.equal(select(joined, [1, 0]).p, torch.cat([two.p, one.p]))
    for one in (whole, narrow):  # of a prompt, whose window holds no candidates yet
        joined = concat(one[1:], one, (1, 1))
        assert type(joined) is type(one) and torch.equal(select(joined, [1]).p, one.p)
    joined = concat(PointMass(torch.zeros(1, 0).long()), PointMass(torch.tensor([[3, 4]])), (1, 1))
    assert select(joined, [1]).values.tolist() == [[3, 4]]


@given(st.integers(1, 3), st.integers(2, 5), st.integers(1, 6))
def test_pairs_are_the_distributions_that_they_hold(rows: int, nodes: int, count: int) -> None:
    shares = torch.rand(rows, nodes, count) + 0.1
    p = torch.zeros(rows, nodes, 8)
    p[..., torch.randperm(8)[:count]] = shares / shares.sum(-1, keepdim=True)
    pairs = Pairs.of(p, count)
    whole, node, x = Categorical(pairs.p), torch.randint(nodes, (rows,)), torch.randint(8, (rows, nodes))
    for one, two in (
        (pairs[1:], whole[1:]),
        (pairs.at(node), whole.at(node)),
        (pairs.flat(), whole.flat()),
        (Pairs.stack([pairs.flat(), pairs.flat()]), Categorical.stack([whole.flat(), whole.flat()])),
    ):
        assert torch.equal(one.p, two.p)
    assert torch.equal(mass(pairs, x), mass(whole, x)) and torch.equal(pairs.is_finite(), whole.is_finite())
    random = RandomStream.from_seed(1, rows, CPU)
    place = torch.arange(nodes).expand(rows, nodes)
    drawn = (each.sample(random, place, Purpose.DRAFT) for each in (pairs, whole))
    assert torch.equal(*drawn)


def canvas(prompt: list[int], most: int, ends: set[int]) -> Canvas:
    return Canvas([prompt], Stopping(most, frozenset(ends)), DecodingStats(), CPU)


def feed(canvas: Canvas, tokens: list[list[int]]) -> list[list[int]]:
    """Commit a chain of accepted tokens and the one that follows it."""
    values = torch.tensor(tokens)
    draft = Tree.chain(torch.cat([canvas.root[:, None], values[:, :-1]], 1), DraftKind.POINT)
    last = torch.full((len(values),), values.shape[1] - 1)
    path = Path.at(draft, last, values[:, -1])
    canvas.reserve(max(canvas.length_bounds) + draft.reach)
    canvas.send(canvas.write(draft, path, Measured.nothing(canvas.active)), draft.reach, "tv")
    return canvas.read().tokens


@pytest.mark.parametrize("early", [0, 600], ids=["", "of another capacity"])
def test_each_row_ends_by_conditions_of_its_own(early: int) -> None:
    first, second = canvas([1], 700, {9}), canvas([2, 3], 4, {8, 7})
    for _ in range(early // 2 + 1):
        feed(first, [[5, 6]])
    feed(second, [[4, 5]])
    both = first.joined(second, (1, 1))
    assert both.ids[1] == [2, 3, 4, 5] and both.length_bounds == [early + 2, 2]
    assert feed(both, [[8, 7], [9, 9]]) == [[8, 7], [9, 9]]
    assert both.finish_reasons == [None, "length"]
    assert feed(both, [[4, 9], [0, 0]]) == [[4, 9], []]
    assert both.finish_reasons == ["eos", "length"]
    left = both.part([1])
    assert left.outputs() == [[4, 5, 9, 9]] and left.stats.new_tokens == [4] and left.finished
