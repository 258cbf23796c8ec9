"""Recursive rejection down a tree: the kernel against torch, and its distribution.

That the torch form draws from the target is proved in tests/trees, exactly and in float64.
"""

import pytest
import torch

from mmspec.kernels import reject_tree, tree_children
from tests.kernels.trees import guarded, random_tree

# rows, nodes, vocabulary
SHAPES = [(1, 1, 5), (2, 2, 1), (6, 12, 7), (4, 9, 33), (2, 5, 4099)]


class Case:
    """p and q that resemble each other, any candidates, and NaN around all numbers."""

    def __init__(self, rows, nodes, vocabulary, seed=0, device="cpu", dtype=torch.float32):
        generator = torch.Generator().manual_seed(seed)
        tree = random_tree(rows, nodes, seed, 0.2)
        logits = torch.randn(2, rows, nodes, vocabulary, generator=generator, dtype=torch.float64)
        p = (logits[0] + 2 * logits[1]).softmax(-1)
        q = (2 * logits[1]).softmax(-1).gather(1, tree.parents[..., None].expand_as(p))
        q = q.where(torch.rand(q.shape, generator=generator) > 0.2, 0.0)  # some tokens cannot be drawn
        q = q / q.sum(-1, keepdim=True).clamp_min(1e-9)
        if seed % 3 == 2:  # nothing is left of p where both are equal
            q = torch.where((tree.parents == 0)[..., None], p[:, :1], q)
        self.tokens = torch.randint(0, vocabulary, (rows, nodes), generator=generator).to(device)
        self.children = tree_children(tree.parents, tree.valid, tree.max_children).to(device)
        u = torch.rand(rows, tree.max_depth, tree.max_children, generator=generator, dtype=torch.float64)
        numbers = (p, q[:, 1:], u)
        self.p, self.q, self.u = (guarded(each.shape, float("nan"), dtype).copy_(each) for each in numbers)
        if device != "cpu":
            self.p, self.q, self.u = (each.to(device) for each in (self.p, self.q, self.u))

    def arguments(self, without_replacement):
        return self.p, self.q, self.tokens, self.children, self.u, without_replacement


def assert_close(ours, expected):
    assert torch.equal(ours[0], expected[0])
    # sums of a few thousand numbers in float32, in another order
    assert torch.allclose(ours[1], expected[1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("without_replacement", [False, True])
def test_the_kernel_decides_as_torch_does(shape, without_replacement, both, device):
    for seed in range(3):
        assert_close(*both(reject_tree, *Case(*shape, seed, device).arguments(without_replacement)))


@pytest.mark.parametrize("without_replacement", [False, True])
def test_equal_distributions_leave_p_where_nothing_is_left(without_replacement, both, device):
    p = torch.tensor([[[0.5, 0.25, 0.25]] * 3], device=device)
    tokens, u = torch.tensor([[0, 0, 1]], device=device), torch.full((1, 1, 2), 0.9, device=device)
    children = torch.tensor([[[1, 2], [-1, -1], [-1, -1]]], device=device)
    q = torch.tensor([[0.9, 0.05, 0.05]], device=device).expand(1, 2, 3).clone()
    above = q.clone()
    above[..., 1:] = 0.3  # q exceeds p everywhere
    for each in (q, above):
        ours, expected = both(reject_tree, p, each, tokens, children, u, without_replacement)
        assert_close(ours, expected)
        if each is above and not without_replacement:
            assert expected[0] == 0 and torch.equal(expected[1][0], p[0, 0])


def test_no_rows(both, device):
    case = Case(*SHAPES[2], device=device)
    arguments = [each[:0] for each in case.arguments(True)[:-1]]
    assert_close(*both(reject_tree, *arguments, False))
