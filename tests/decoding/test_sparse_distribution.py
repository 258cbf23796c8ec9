"""Distributions under top-k as pairs of token and probability."""

import pytest
import torch

from mmspec.decoding.sampling import Sampler
from mmspec.decoding.sparse_distribution import SparseDistribution

SHAPE = (2, 8, 512)


@pytest.mark.parametrize("top_k", [1, 7, 100])
def test_pairs_hold_the_distribution_under_top_k_and_take_their_own_memory(top_k):
    logits = torch.randn(SHAPE, generator=torch.Generator().manual_seed(top_k))
    distribution = Sampler(temperature=0.7, top_k=top_k).scores(logits).p
    pairs = SparseDistribution.of(distribution, top_k)
    torch.testing.assert_close(pairs.dense(), distribution, atol=1e-7, rtol=0)
    assert pairs.nbytes() == 2 * 8 * top_k * 8


def test_of_more_tokens_than_pairs_the_likeliest_stay_and_it_is_a_distribution_again():
    dense = SparseDistribution.of(torch.tensor([0.4, 0.0, 0.2, 0.4]), 2).dense()
    assert dense.tolist() == [0.5, 0.0, 0.0, 0.5]


def test_pairs_of_half_a_vocabulary_do_not_pay():
    assert SparseDistribution.pays(255, 512) and not SparseDistribution.pays(256, 512)
    assert SparseDistribution.pays(300, 512, share_bytes=8)
