"""Speculative sampling of chains: the kernel against torch, and its distribution.

That the torch form with a q draws from the target is proved in tests/trees, exactly and in float64.
"""

import pytest
import torch

from mmspec.kernels import verify_chain
from tests.kernels.trees import guarded

# rows, nodes, vocabulary
SHAPES = [(1, 1, 5), (2, 2, 1), (16, 4, 7), (6, 4, 33), (4, 3, 1100), (1, 2, 4097)]


class Case:
    """p and q that resemble each other, candidates of q, and NaN around all numbers."""

    def __init__(self, rows, nodes, vocabulary, seed=0, device="cpu", dtype=torch.float32):
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(2, rows, nodes, vocabulary, generator=generator, dtype=torch.float64)
        p = (logits[0] + 2 * logits[1].roll(-1, 1)).softmax(-1)  # after node i, what node i + 1 is drawn from
        q = (2 * logits[1]).softmax(-1)
        x = torch.multinomial(q.flatten(0, 1), 1, generator=generator).view(rows, nodes)
        hidden = torch.rand(rows, nodes, generator=generator) < 0.3
        q = q.scatter(-1, x[..., None], q.gather(-1, x[..., None]).masked_fill(hidden[..., None], 0.0))
        self.valid = torch.rand(rows, nodes, generator=generator) < 0.9
        u = torch.rand(rows, nodes - 1, generator=generator, dtype=torch.float64)
        numbers = (p, q[:, 1:], u)
        self.p, self.q, self.u = (guarded(each.shape, float("nan"), dtype).copy_(each) for each in numbers)
        self.tokens = guarded(x.shape, 0, torch.int64).copy_(x)
        self.key = torch.randint(0, 2**32, (rows, 2), generator=generator)
        self.place = torch.randint(0, 1000, (rows,), generator=generator)
        self.stream = torch.randint(0, 5, (rows,), generator=generator)
        self.step = torch.randint(0, 9, (rows,), generator=generator)
        self.device = device

    def arguments(self, deterministic=False):
        chain = self.p, None if deterministic else self.q, self.tokens, self.valid, self.u
        noise = self.key, self.place, self.stream, self.step
        return tuple(None if each is None else each.to(self.device) for each in (*chain, *noise))


def assert_same(ours, expected):
    for one, other in zip(ours, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.every(4)
def test_the_kernel_decides_and_draws_as_torch_does(shape, deterministic, both, device):
    for seed in range(2):
        dtype = torch.float64 if shape == SHAPES[2] and seed else torch.float32  # which takes the torch form
        ours, expected = both(verify_chain, *Case(*shape, seed, device, dtype).arguments(deterministic))
        assert_same(ours, expected)
        if not deterministic and shape == SHAPES[2]:
            assert expected[0].unique().tolist() == [0, 1, 2, 3], "every length occurs"


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_first_token_is_distributed_as_p(deterministic):
    rows, generator = 40_000, torch.Generator().manual_seed(1)
    p, q = torch.tensor([[0.4, 0.3, 0.2, 0.1, 0.0], [0.1, 0.2, 0.2, 0.1, 0.4]])
    tokens = torch.multinomial(q.expand(rows, 5), 2, True, generator=generator)
    if deterministic:
        tokens[:, 1] = 1
    node, token = verify_chain(
        p.expand(rows, 2, 5),
        None if deterministic else q.expand(rows, 1, 5),
        tokens,
        torch.ones(rows, 2, dtype=torch.bool),
        torch.rand(rows, 1, generator=generator),
        torch.randint(0, 2**32, (rows, 2), generator=generator),
        *torch.zeros(3, rows, dtype=torch.long),
    )
    first = torch.where(node > 0, tokens[:, 1], token)
    observed, expected = torch.bincount(first, minlength=5), rows * p
    assert observed[4] == 0
    assert ((observed - expected).square() / expected)[:4].sum() < 21.1  # p > 1e-4, three degrees of freedom
    accepted = p[1] if deterministic else torch.minimum(p, q).sum()
    assert abs(node.double().mean() - accepted) < 4 * (0.25 / rows) ** 0.5


def test_no_rows(both, device):
    assert_same(*both(verify_chain, *(each[:0] for each in Case(*SHAPES[2], device=device).arguments())))


def test_rows_that_are_nan_give_tokens_of_the_vocabulary(both, device):
    p, *rest = Case(*SHAPES[3], device=device).arguments()
    (node, token), _ = both(verify_chain, torch.full_like(p, float("nan")), *rest)
    assert (node == 0).all() and (token >= 0).all() and (token < p.shape[-1]).all()
