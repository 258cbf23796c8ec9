"""Compaction of caches: against a loop over places, the kernel against torch."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mmspec.kernels import compact_cache

GUARD = 3  # poisoned places on both sides of a buffer
# rows, capacity, nodes of the path, tokens' shapes, dtype
CASES = [
    (1, 8, 1, [(1, 1)], torch.float32),
    (2, 9, 3, [(2, 5)], torch.bfloat16),
    (3, 40, 5, [(2, 8), (2, 8), (1, 3)], torch.float32),
    (2, 70, 33, [(1, 7), (3, 4)], torch.float16),
    (2, 12, 4, [(1, 260)], torch.float32),  # more words than a program holds
    (2, 12, 4, [(3, 1)], torch.int8),
]


class Case:
    """Buffers between guards, and a tree's path in every row; the first row keeps nothing."""

    def __init__(self, rows, capacity, nodes, shapes, dtype, device="cpu", seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.memory = []
        for shape in shapes:
            values = torch.randint(-128, 127, (rows * capacity + 2 * GUARD, *shape), generator=generator)
            self.memory.append(values.to(device, dtype))
        self.shape = rows, capacity
        extent = min(capacity, 2 * nodes)
        steps = [torch.randperm(extent - 1, generator=generator)[: nodes - 1] + 1 for _ in range(rows)]
        path = torch.stack([torch.cat([torch.zeros(1).long(), step.sort().values]) for step in steps])
        lengths = torch.randint(0, capacity - extent + 1, (rows,), generator=generator)
        counts = torch.randint(0, nodes + 1, (rows,), generator=generator)
        counts[0] = 0 if rows > 1 else nodes
        path[torch.arange(nodes) >= counts[:, None]] = 0  # padding, as a verdict has it
        self.path, self.lengths, self.counts = path.to(device), lengths.to(device), counts.to(device)

    def run(self, function: Callable[..., None] = compact_cache) -> list[Tensor]:
        """All memory after the call, guards included."""
        memory = [each.clone() for each in self.memory]
        buffers = [each[GUARD:-GUARD].view(*self.shape, *each.shape[1:]) for each in memory]
        function(buffers, self.path, self.lengths, self.counts)
        return memory


def place_by_place(buffers: list[Tensor], path: Tensor, lengths: Tensor, counts: Tensor) -> None:
    for buffer in buffers:
        before = buffer.clone()
        for row in range(len(path)):
            for step in range(int(counts[row])):
                buffer[row, lengths[row] + step] = before[row, lengths[row] + path[row, step]]


def assert_same(ours: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(ours, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("case", CASES)
def test_every_place_gets_its_node_and_no_other_changes(case, both, device):
    for seed in range(3):
        made = Case(*case, device, seed=seed)
        expected = made.run(place_by_place)
        for found in both(made.run):
            assert_same(found, expected)


def test_buffers_that_were_allocated_anew_are_the_ones_that_move(both, device):
    """The table of addresses is kept from call to call; every call here has other buffers."""
    made = Case(*CASES[2], device)
    expected = made.run(place_by_place)
    kept = []
    for memory in (made.run(), *both(made.run), *both(made.run)):
        kept.append(memory)
        assert_same(memory, expected)


def test_no_buffers_and_no_rows_are_nothing_to_do(both, device):
    empty = torch.empty(0, 4, 2, 3, device=device)
    none = torch.empty(0, dtype=torch.long, device=device)
    both(compact_cache, [], none.view(0, 2), none, none)
    both(compact_cache, [empty], none.view(0, 2), none, none)


def test_buffers_of_different_capacity_are_refused(monkeypatch):
    monkeypatch.setenv("MMSPEC_BACKEND", "triton")
    made = Case(*CASES[2])
    for other in (torch.zeros(3, 41, 2), torch.zeros(3, 40, 4)[..., ::2]):
        with pytest.raises(ValueError, match=r"contiguous \[3, 40, ...\]"):
            compact_cache([torch.zeros(3, 40, 2), other], made.path, made.lengths, made.counts)
