"""Distances of sets of features, and the entropy of codes."""

import math

import pytest
import torch

from mmspec.errors import InputError
from mmspec.evaluation.image_quality import (
    bootstrap_interval,
    frechet_distance,
    principal_axes,
    token_entropy,
)


def gaussian(mean, scales, count=4000, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.tensor(mean) + torch.tensor(scales) * torch.randn(count, len(mean), generator=generator)


def test_the_distance_of_two_gaussians_has_a_closed_form():
    """For diagonal covariances it is |m1 - m2|^2 + sum (s1 - s2)^2."""
    one, other = gaussian([0.0, 0.0], [1.0, 2.0]), gaussian([3.0, 0.0], [1.0, 0.5], seed=1)
    assert frechet_distance(one, other) == pytest.approx(9 + 1.5**2, rel=0.05)


def test_a_set_has_no_distance_to_itself():
    one = gaussian([1.0, -1.0, 0.0], [1.0, 0.1, 3.0])
    assert frechet_distance(one, one) == pytest.approx(0.0, abs=1e-6)


def test_more_features_than_pictures_stay_finite():
    one, other = torch.randn(5, 20), torch.randn(7, 20)
    assert math.isfinite(frechet_distance(one, other))


@pytest.mark.parametrize("shape", [(1, 3), (4, 2), (4,)])
def test_what_has_no_covariance_is_refused(shape):
    with pytest.raises(InputError):
        frechet_distance(torch.zeros(4, 3), torch.zeros(shape))


def test_the_interval_holds_the_distance_of_like_sets_and_not_of_shifted_ones():
    reference = gaussian([0.0, 0.0], [1.0, 1.0], 200, seed=2)
    like = gaussian([0.0, 0.0], [1.0, 1.0], 200, seed=3)
    low, high = bootstrap_interval(like, reference)
    assert low < high < 0.2
    shifted_low, _ = bootstrap_interval(like + 1.0, reference)
    assert shifted_low > high


def test_principal_axes_find_the_direction_of_variation_and_scale_it_to_one():
    features = gaussian([0.0, 0.0, 5.0], [0.1, 3.0, 0.2])
    axes = principal_axes(features, 1)
    assert axes.shape == (3, 1)
    assert axes[1].abs() / axes.norm() > 0.99
    assert (features @ axes).std() == pytest.approx(1.0, rel=1e-3)
    assert principal_axes(features[:3], 16).shape == (3, 2)


def test_entropy_of_codes():
    assert token_entropy([[0, 1], [2, 3]]) == pytest.approx(math.log(4))
    assert token_entropy([[7, 7], [7]]) == 0.0
