"""The best candidates: against sorting by hand, the kernel against torch with ties and NaN."""

import math

import pytest
import torch

from mmspec.kernels import best
from tests.kernels.trees import guarded

# rows, candidates, how many are wanted
SHAPES = [(1, 1, 1), (3, 7, 3), (2, 16, 16), (2, 33, 40), (2, 200, 61), (0, 4, 2), (2, 5, 0)]


def make(rows, size, seed=0, device="cpu"):
    """Few different scores, so that there are ties; infinite ones; higher ones behind the end."""
    generator = torch.Generator().manual_seed(seed)
    levels = torch.tensor([-math.inf, -2.5, -1.0, -0.0, 0.0, 1e-9, math.inf])
    drawn = torch.randint(len(levels), (rows, size), generator=generator)
    return guarded((rows, size), math.inf, torch.float32).copy_(levels[drawn]).to(device)


@pytest.mark.parametrize(("rows", "size", "count"), SHAPES)
def test_the_highest_come_first_and_equal_ones_in_their_order(rows, size, count):
    scores = make(rows, size)
    found, ascending = best(scores, count), best(scores, count, ascending=True)
    for row, values in enumerate(scores.tolist()):
        expected = sorted(range(size), key=lambda i: (-values[i], i))[:count]
        assert found[row].tolist() == expected and ascending[row].tolist() == sorted(expected)


def compare(both, scores, count):
    for ascending in (False, True):
        ours, expected = both(best, scores, count, ascending)
        assert ours.dtype == expected.dtype and torch.equal(ours, expected)


@pytest.mark.parametrize(("rows", "size", "count"), SHAPES)
def test_the_kernel_gives_what_torch_gives(rows, size, count, both, device):
    for seed in range(2):
        compare(both, make(rows, size, seed, device), count)
