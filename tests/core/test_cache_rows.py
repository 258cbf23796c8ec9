"""Rows that enter and leave a KV cache: contents as in dense tensors, at the cost of one row."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig

from benchmarks.simulated_gpu import SimulatedGPU
from mmspec.core import cache as cache_module
from mmspec.core.cache import RaggedCache
from mmspec.core.rows import runs, select
from mmspec.pipelines.running_batch import fill_holes

LAYERS, HEADS, WIDTH, CAPACITY = 6, 2, 4, 256
CONFIG = LlamaConfig(num_hidden_layers=LAYERS, hidden_size=8, num_attention_heads=HEADS, vocab_size=8)
ROW = 2 * LAYERS * CAPACITY * HEADS * WIDTH * 4  # bytes of the keys and values of a row


def filled(lengths: list[int], first: float = 1.0, capacity: int = CAPACITY) -> RaggedCache:
    """A cache whose row i holds the numbers first + i."""
    cache = RaggedCache(CONFIG, len(lengths), capacity, torch.device("cpu"))
    for row, length in enumerate(lengths):
        cache.begin_prefill(row, length)
        for index, layer in enumerate(cache.ragged):
            states = torch.full((1, HEADS, length, WIDTH), first + row + 0.01 * index)
            layer.update(states, -states)
    return cache


def rows_of(cache: RaggedCache) -> list[tuple[float, int]]:
    """Number and length of each row in the next forward pass, after a check of all entries."""
    cache.begin_score(torch.zeros(cache.rows, 1, dtype=torch.long), 1)
    seen = []
    for row, length in enumerate(cache.lengths.tolist()):
        number = float(cache.ragged[0].keys[row, 0, 0, 0])
        for index, layer in enumerate(cache.ragged):
            assert layer.keys.shape == (cache.rows, cache.plan.capacity, HEADS, WIDTH)
            assert layer.keys.is_contiguous() and layer.keys.data_ptr() == layer.buffers[0].data_ptr()
            for sign, states in ((1, layer.keys), (-1, layer.values)):
                expected = sign * (number + 0.01 * index)
                assert torch.allclose(states[row, :length], torch.tensor(expected))
                assert not states[row, length:].any()
        seen.append((number, length))
    return seen


@given(st.lists(st.integers(0, 9), max_size=12))
def test_runs_are_the_indices(rows: list[int]) -> None:
    assert [row for run in runs(rows) for row in range(run.start, run.stop)] == rows
    assert select(torch.arange(10), rows).tolist() == rows


@given(st.integers(1, 12), st.sets(st.integers(0, 11)))
def test_holes_are_filled_from_the_end(count: int, chosen: set[int]) -> None:
    gone = [row for row in chosen if row < count]
    stay = fill_holes(count, gone)
    assert sorted(stay) == [row for row in range(count) if row not in gone]
    assert sum(row != place for place, row in enumerate(stay)) <= len(gone)


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 2), st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2**16)), min_size=1, max_size=14)
)
def test_rows_that_enter_and_leave_are_those_of_dense_tensors(
    copies: int, steps: list[tuple[int, int]]
) -> None:
    """Steps of all kinds: rows enter (some with more capacity), leave, are reordered and are read."""
    number = 1.0

    def new(count: int, seed: int) -> tuple[RaggedCache, list[tuple[float, int]]]:
        nonlocal number
        lengths = [1 + (seed + 7 * row) % 20 for row in range(copies * count)]
        capacity = CAPACITY * (1 + (seed % 5 == 0))
        cache = filled(lengths, number, capacity)
        rows = [(number + row, length) for row, length in enumerate(lengths)]
        number += len(lengths)
        return cache, rows

    cache, rows = new(1, 1)
    for kind, seed in steps:
        size = len(rows) // copies
        if kind < 2:
            count = 1 + seed % 3
            other, others = new(count, seed)
            cache = cache.joined(other, (size, count))
            split = [rows[first : first + size] for first in range(0, len(rows), size)]
            more = [others[first : first + count] for first in range(0, len(others), count)]
            rows = [row for one, two in zip(split, more, strict=True) for row in one + two]
        elif kind == 2 and size > 1:
            chosen = fill_holes(size, [seed % size])
            cache, rows = cache.part(chosen, size), select(rows, chosen, size)
        elif kind == 3:
            chosen = sorted(range(size), key=lambda row: (row * seed) % 7)[: 1 + seed % size]
            cache, rows = cache.part(chosen, size), select(rows, chosen, size)
        else:
            assert rows_of(cache) == rows
    assert rows_of(cache) == rows


def test_what_a_row_leaves_does_not_reach_the_next_one_there() -> None:
    cache = filled([5, 6], capacity=2 * CAPACITY)  # more than that of the row that enters
    for layer in cache.ragged:
        layer.keys[1, 6:], layer.values[1, 6:] = torch.nan, torch.inf
    cache = cache.part([0], 2).joined(filled([3], 9.0), (1, 1))
    assert rows_of(cache) == [(1.0, 5), (9.0, 3)]


def test_bytes_that_move_are_those_of_one_row() -> None:
    cache, one = filled([4] * 64), filled([4], 100.0)
    small = 64 * 8 * 2  # the lengths
    with SimulatedGPU() as gpu:
        for row in (0, 40, 63):
            gpu.take()
            left = cache.part(fill_holes(64, [row]), 64)
            counts = gpu.take()
            assert counts.moved_bytes <= ROW * (row < 63) + small and counts.copies == 0
            cache = left.joined(one, (63, 1))
            counts = gpu.take()
            assert counts.moved_bytes <= ROW + small and counts.copies == 0
    assert cache.buffer_rows == 64


def test_buffers_grow_by_doubling_and_shrink_when_few_rows_are_left() -> None:
    cache, sizes = filled([4]), []
    for row in range(16):
        cache = cache.joined(filled([4], 10.0 + row), (1 + row, 1))
        sizes.append(cache.buffer_rows)
    assert sizes == [2, 4, 4, *[8] * 4, *[16] * 8, 32]
    for rows in range(16, 0, -1):
        cache = cache.part(range(rows), rows + 1)
        assert cache.buffer_rows < 8 * rows
    assert cache.buffer_rows == 2 and rows_of(cache) == [(1.0, 4)]


class Held(TorchDispatchMode):
    """Records the largest number of bytes of memory that tensors made here hold."""

    def __init__(self) -> None:
        super().__init__()
        self.peak, self._held = 0, dict[int, tuple[int, list[weakref.ref[Tensor]]]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in tree_leaves(out):
            if isinstance(each, Tensor):
                memory = each.untyped_storage()
                _, known = self._held.get(memory.data_ptr(), (0, []))
                self._held[memory.data_ptr()] = memory.nbytes(), [*known, weakref.ref(each)]
        held = (size for size, known in self._held.values() if any(ref() is not None for ref in known))
        self.peak = max(self.peak, sum(held))
        return out


@pytest.mark.parametrize("capacity", [CAPACITY, 2 * CAPACITY], ids=["rows", "rows and capacity"])
def test_memory_never_holds_all_keys_twice(capacity: int) -> None:
    with Held() as held:
        cache = filled([4] * 8)
        one = filled([4], 100.0, capacity)
        before = 8 * ROW
        cache = cache.joined(one, (8, 1))
        after = 16 * ROW * capacity // CAPACITY
    assert cache.nbytes() == after
    # the buffers, the row that enters, and one layer's old buffers
    assert held.peak <= after + one.nbytes() + before // LAYERS + ROW // 100


def failing(nth: int, real: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """An allocator whose nth allocation fails."""
    count = 0

    def allocate(*args: Any) -> Tensor:
        nonlocal count
        count += 1
        if count == nth:
            raise torch.OutOfMemoryError("planted")
        return real(*args)

    return allocate


@pytest.mark.parametrize("capacity", [CAPACITY, 2 * CAPACITY], ids=["rows", "rows and capacity"])
def test_rows_stay_as_they_are_when_memory_runs_out(monkeypatch: pytest.MonkeyPatch, capacity: int) -> None:
    rows = [(1.0, 4), (2.0, 5), (3.0, 6)]
    for nth in range(1, 2 * LAYERS + 1):
        cache = filled([4, 5, 6])
        with monkeypatch.context() as patched, pytest.raises(torch.OutOfMemoryError):
            patched.setattr(cache_module, "resized", failing(nth, cache_module.resized))
            cache.joined(filled([4] * 2, 50.0, capacity), (3, 2))
        assert rows_of(cache) == rows and cache.plan.capacity == CAPACITY
        cache = cache.joined(filled([4] * 2, 50.0, capacity), (3, 2))
        assert rows_of(cache) == [*rows, (50.0, 4), (51.0, 4)]


def test_guided_rows_stay_as_they_are_when_a_later_step_fails() -> None:
    cache = filled([4, 5, 6, 7])
    cache.joined(filled([8, 9], 50.0), (2, 1))  # its caller fails afterwards
    assert rows_of(cache) == [(1.0, 4), (2.0, 5), (3.0, 6), (4.0, 7)]
    cache = cache.joined(filled([8, 9], 50.0), (2, 1)).joined(filled([2, 3], 60.0), (3, 1))
    conditional = [(1.0, 4), (2.0, 5), (50.0, 8), (60.0, 2)]
    assert rows_of(cache) == [*conditional, (3.0, 6), (4.0, 7), (51.0, 9), (61.0, 3)]
