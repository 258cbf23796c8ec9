"""Largest numbers and stable sorting, compared with torch: with ties, both zeros and infinities."""

import pytest
import torch

from mmspec.kernels.ordering import largest, sort_stably

INF = float("inf")


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((1,), torch.float32),
        ((7, 1000), torch.float32),
        ((2, 3, 64), torch.float64),
        ((7, 64), torch.bfloat16),
        ((4, 0), torch.float32),
    ],
)
def test_it_sorts_as_torch_does(shape, dtype, descending):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).mul(3).round().to(dtype)
    x.flatten()[:6] = torch.tensor([INF, -INF, 0.0, -0.0, 1e-45, -1e-45], dtype=dtype)[: x.numel()]
    expected = x.sort(dim=-1, descending=descending, stable=True)
    values, order = sort_stably(x, descending)
    assert torch.equal(order, expected.indices) and torch.equal(values, expected.values)


@pytest.mark.parametrize(
    ("counts", "dtype"),
    [((1,), torch.float32), ((300, 2, 300, 999), torch.float32), ((7,), torch.float64)],
)
def test_it_finds_the_largest(counts, dtype):
    x = torch.randn(2, 3, 1000, generator=torch.Generator().manual_seed(0)).mul(50).round().to(dtype)
    x[0, 0, :500] = -INF
    expected, found = x.topk(max(counts)).values, largest(x.mT.contiguous().mT, counts)
    at = [count - 1 for count in counts]
    assert torch.equal(found[..., at], expected[..., at])
    assert torch.equal(found.sort(-1, descending=True).values, expected)
