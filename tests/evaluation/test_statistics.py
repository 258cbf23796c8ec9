"""Distances of sets of features."""

import pytest
import torch

from mmspec.errors import InputError
from mmspec.evaluation.quality.set_distances import kernel_distance

PROMPTS, WIDTH = 48, 16  # as many prompts as in the table of the README


def kernel(one, other):
    return (one @ other / len(one) + 1) ** 3


def slow_distance(one, other):
    """The formula, pair by pair."""
    terms = [
        kernel(one[i], one[j])
        + kernel(other[i], other[j])
        - kernel(one[i], other[j])
        - kernel(one[j], other[i])
        for i in range(len(one))
        for j in range(len(one))
        if i != j
    ]
    return (sum(terms) / len(terms)).item()


def biased_distance(one, other):
    """A planted bug: the V-statistic, in which every image also meets itself."""
    grams = ((one @ one.T, 1), (other @ other.T, 1), (one @ other.T, -2))
    return sum(sign * ((gram / one.shape[1] + 1) ** 3).mean() for gram, sign in grams).item()


def paired_distance(one, other):
    """A planted bug: the estimator for independent sets, in which the images of one prompt meet."""
    within = [((a @ a.T / a.shape[1] + 1) ** 3).fill_diagonal_(0).sum() for a in (one, other)]
    across = ((one @ other.T / one.shape[1] + 1) ** 3).mean()
    return (sum(within) / (len(one) * (len(one) - 1)) - 2 * across).item()


def draw_pairs(generator, shift=0.0):
    """Two sets of Gaussian features [PROMPTS, WIDTH], of which those of one prompt are correlated."""
    prompt, one, other = torch.randn(3, PROMPTS, WIDTH, generator=generator, dtype=torch.float64)
    return (prompt + one) / 2**0.5, (prompt + other) / 2**0.5 + shift


def true_distance(shift):
    """Distance of N(0, 1) and N(shift, 1), from squared distances of moments, weighted as in the kernel."""
    square = WIDTH * shift**2
    third = square**3 + 6 * square**2 + 3 * (WIDTH + 2) * square
    return 3 * square / WIDTH + 3 * square**2 / WIDTH**2 + third / WIDTH**3


def is_unbiased(distance, repeats=1000):
    """True if the mean over pairs of sets of one distribution is 0 within four standard errors."""
    generator = torch.Generator().manual_seed(0)
    found = torch.tensor([distance(*draw_pairs(generator)) for _ in range(repeats)])
    return abs(found.mean()) < 4 * found.std() / repeats**0.5


def test_the_distance_is_the_formula_and_its_margin_leaves_out_one_prompt_after_the_other():
    one, other = torch.randn(2, 7, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    distance, margin = kernel_distance(one, other + 0.5)
    assert distance == pytest.approx(slow_distance(one, other + 0.5), rel=1e-12)
    kept = [[index for index in range(7) if index != gone] for gone in range(7)]
    without = torch.tensor([slow_distance(one[rows], other[rows] + 0.5) for rows in kept])
    error = (6 / 7 * (without - without.mean()).square().sum()).sqrt().item()
    assert margin == pytest.approx(1.96 * error, rel=1e-6)


def test_the_distance_of_equal_distributions_is_0_on_average():
    assert is_unbiased(lambda one, other: kernel_distance(one, other)[0])


def test_biased_distances_are_found_out():
    for bug in [biased_distance, paired_distance]:
        assert not is_unbiased(bug)


@pytest.mark.parametrize(("shift", "most"), [(0.0, 0.995), (0.3, 0.97), (1.0, 0.97)])
def test_the_interval_contains_the_true_distance_about_95_times_in_100(shift, most):
    generator, repeats, inside, true = torch.Generator().manual_seed(1), 1000, 0, true_distance(shift)
    for _ in range(repeats):
        distance, margin = kernel_distance(*draw_pairs(generator, shift))
        inside += abs(distance - true) <= margin
    assert 0.93 <= inside / repeats <= most


def test_a_set_has_no_distance_to_itself():
    one = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
    assert kernel_distance(one, one) == pytest.approx((0.0, 0.0), abs=1e-9)


def test_what_has_no_distance_is_refused():
    for shape in [(2, 3), (4, 2), (5, 3), (4,)]:
        with pytest.raises(InputError):
            kernel_distance(torch.zeros(4, 3), torch.zeros(shape))
        with pytest.raises(InputError):
            kernel_distance(torch.zeros(2, 3), torch.zeros(2, 3))
