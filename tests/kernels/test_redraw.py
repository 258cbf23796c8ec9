"""Redraw by maximal coupling: the kernel against torch, how often a token is kept.

That a chain of redraws leaves the target's distribution alone is proved in tests/trees, with planted bugs.
"""

import pytest
import torch

from mmspec.kernels import redraw
from tests.kernels.trees import guarded

# rows, places, nodes, vocabulary
SHAPES = [(1, 1, 1, 5), (2, 3, 2, 1), (9, 5, 6, 7), (4, 3, 4, 33), (2, 3, 3, 4099)]


def case(rows, places, nodes, vocabulary, seed=0, device="cpu", dtype=torch.float32):
    """Arguments: p and q that resemble each other, NaN around all numbers, any old node for each place."""
    generator = torch.Generator().manual_seed(seed)
    old = torch.randint(0, nodes, (rows, places), generator=generator)
    logits = torch.randn(rows, nodes, vocabulary, generator=generator, dtype=torch.float64)
    q = (2 * logits).softmax(-1)
    change = torch.randn(rows, places, vocabulary, generator=generator, dtype=torch.float64)
    p = (change + 2 * logits.gather(1, old[..., None].expand_as(change))).softmax(-1)
    x = torch.multinomial(q.flatten(0, 1), 1, generator=generator).view(rows, nodes)
    valid = torch.rand(rows, nodes, generator=generator) < 0.8
    u = (torch.randint(0, 2**24, (rows, places, 3), generator=generator) + 0.5).double() * 2**-24
    numbers = (guarded(each.shape, float("nan"), dtype).copy_(each) for each in (p, q[:, 1:]))
    u = guarded(u.shape, float("nan"), torch.float64).copy_(u)
    return tuple(each.to(device) for each in (*numbers, x, valid, old, u))


def assert_same(ours, expected):
    assert torch.equal(ours, expected)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernel_redraws_as_torch_does(shape, both, device):
    for seed in range(3):
        assert_same(*both(redraw, *case(*shape, seed, device)))


def test_p_is_drawn_from_where_nothing_is_left(both, device):
    p = torch.tensor([[[0.5, 0.25, 0.25, 0.0]] * 8], device=device)
    q = torch.tensor([0.9, 0.3, 0.3, 0.3], device=device).expand(1, 1, 4)  # above p everywhere
    ones = torch.ones(1, 8, dtype=torch.long, device=device)
    u = torch.rand(1, 8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(device)
    u[..., 0], u[..., 1] = 0.9, torch.arange(8, device=device) / 8 + 1 / 16
    ours, expected = both(redraw, p, q, ones[:, :2] * 0, ones[:, :2] > 0, ones, u)
    assert_same(ours, expected)
    assert expected.tolist() == [[0, 0, 0, 0, 1, 1, 2, 2]]


def test_tokens_follow_p_and_are_kept_as_often_as_can_be():
    rows, generator = 40_000, torch.Generator().manual_seed(1)
    p, q = torch.tensor([[0.4, 0.3, 0.2, 0.1, 0.0], [0.1, 0.2, 0.2, 0.1, 0.4]])
    x = torch.multinomial(q.expand(rows, 5), 1, generator=generator)
    u = torch.rand(rows, 1, 3, dtype=torch.float64, generator=generator)
    tokens, old = x.expand(rows, 2), torch.ones_like(x)
    drawn = redraw(p.expand(rows, 1, 5), q.expand(rows, 1, 5), tokens, tokens >= 0, old, u)
    observed, expected = torch.bincount(drawn[:, 0], minlength=5), rows * p
    assert observed[4] == 0
    assert ((observed - expected).square() / expected)[:4].sum() < 21.1  # p > 1e-4, three degrees of freedom
    kept = (drawn == x).double().mean()
    assert abs(kept - torch.minimum(p, q).sum()) < 4 * (0.25 / rows) ** 0.5


def test_no_rows(both, device):
    assert_same(*both(redraw, *(each[:0] for each in case(*SHAPES[2], device=device))))
