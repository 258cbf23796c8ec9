"""The gated delta rule over a tree: the kernel against torch, which `tests/core` checks."""

import pytest
import torch

from mmspec.kernels import gated_delta_tree, tree_paths

NAN = float("nan")
CLOSE = 1e-6  # relative


def inputs(nodes=5, rows=2, key_heads=1, heads=2, size=16, values=16, dtype=torch.float32, decay=1.0, seed=0):
    """Arguments of `gated_delta_tree`: a chain in the first row, random trees in the others."""
    generator = torch.Generator().manual_seed(seed)
    index = torch.arange(nodes)
    parents = (torch.rand(rows, nodes, generator=generator) * index).long()
    parents[0] = (index - 1).clamp_min(0)
    q, k = torch.randn(2, rows, nodes, key_heads, size, generator=generator).to(dtype)
    v = torch.randn(rows, nodes, heads, values, generator=generator).to(dtype)
    g = -decay * torch.rand(rows, nodes, heads, generator=generator)
    beta = torch.rand(rows, nodes, heads, generator=generator).to(dtype)
    state = torch.randn(rows, heads, size, values, generator=generator)
    return q, k, v, g, beta, state, tree_paths(parents, nodes)[0]


def differs(kernel, torch_form) -> bool:
    distances = [(a - b).norm() / b.norm().clamp_min(1e-30) for a, b in zip(kernel, torch_form, strict=True)]
    return not all(distance < CLOSE for distance in distances)


CASES = {
    "one node": dict(nodes=1),
    "ragged sizes": dict(nodes=3, size=5, values=3, key_heads=2, heads=4),
    "more than a block of everything": dict(nodes=17, size=40, values=33, rows=1, heads=1),
    "half precision": dict(nodes=7, dtype=torch.bfloat16),
    "heads that forget all": dict(nodes=9, decay=300.0),
}


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_agrees_with_torch(both, name):
    kernel, torch_form = both(gated_delta_tree, *inputs(**CASES[name]))
    assert [x.shape for x in kernel] == [x.shape for x in torch_form]
    assert all(x.isfinite().all() and x.is_contiguous() for x in kernel)
    assert not differs(kernel, torch_form)


def test_what_lies_beside_the_inputs_is_not_read(both):
    def banded(x):
        wide = torch.full((x.numel() + 64,), NAN, dtype=x.dtype)
        wide[32 : 32 + x.numel()] = x.flatten()
        return wide[32 : 32 + x.numel()].view(x.shape)

    *parts, ancestors = inputs(**CASES["ragged sizes"])
    kernel, torch_form = both(gated_delta_tree, *(banded(x) for x in parts), ancestors)
    assert not differs(kernel, torch_form)


def test_large_trees_take_the_torch_form(both):
    kernel, torch_form = both(gated_delta_tree, *inputs(nodes=65, rows=1, heads=1))
    assert all(torch.equal(a, b) for a, b in zip(kernel, torch_form, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("nodes", [1, 5, 30, 64])
def test_cuda_is_near_float64(nodes):
    arguments = inputs(nodes=nodes, rows=3, key_heads=2, heads=4, size=128, values=128)
    on_cuda = gated_delta_tree(*(x.cuda() for x in arguments))
    exact = gated_delta_tree(*(x.double() for x in arguments[:6]), arguments[6])
    for ours, reference in zip(on_cuda, exact, strict=True):
        assert (ours.cpu() - reference).norm() / reference.norm() < 1e-5
