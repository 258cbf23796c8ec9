"""Distances of sets of features against independent implementations, and their intervals."""

import math

import numpy as np
import pytest
import torch

from mmspec.evaluation.quality import set_distances
from mmspec.evaluation.quality.intervals import jackknife, student_quantile
from mmspec.evaluation.quality.set_distances import kernel_distance

N, D = 60, 6
PROMPTS, WIDTH = 48, 16  # as many prompts as in the table of the README


def features(seed=0, shift=0.0, scale=1.0, count=N):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, D, generator=generator) * scale + shift


def slow_frechet(one, other):
    """By the symmetric root in NumPy: tr of sqrt(A^1/2 B A^1/2)."""
    one, other = one.double().numpy(), other.double().numpy()
    first, second = np.cov(one, rowvar=False), np.cov(other, rowvar=False)
    values, vectors = np.linalg.eigh(first)
    root = vectors @ np.diag(np.sqrt(values)) @ vectors.T
    cross = np.sqrt(np.linalg.eigvalsh(root @ second @ root)).sum()
    means = one.mean(0) - other.mean(0)
    return means @ means + np.trace(first) + np.trace(second) - 2 * cross


def slow_neighbours(one, reference, k):
    """Precision and density, point by point."""
    one, reference = one.double().numpy(), reference.double().numpy()
    radius = [sorted(np.linalg.norm(reference - point, axis=1))[k] for point in reference]
    inside = [[np.linalg.norm(x - y) <= r for y, r in zip(reference, radius, strict=True)] for x in one]
    return np.mean([any(row) for row in inside]), np.sum(inside) / k / len(one), np.any(inside, axis=0).mean()


def test_frechet_distance_is_the_formula_and_its_interval_leaves_out_pairs_of_both_sets():
    one, other = features(0), features(1, shift=0.4, scale=1.5)
    found = set_distances.frechet_distance(one, other)
    assert found.value == pytest.approx(slow_frechet(one, other), rel=1e-6)
    kept = [np.arange(N) % 20 != group for group in range(20)]
    without = np.array([slow_frechet(one[rows], other[rows]) for rows in kept])
    error = math.sqrt(19 / 20 * ((without - without.mean()) ** 2).sum())
    assert found.high - found.value == pytest.approx(student_quantile(19) * error, rel=1e-4)


def test_figures_are_those_of_torch_fidelity():
    pytest.importorskip("torch_fidelity")
    from torch_fidelity import metric_fid, metric_isc, metric_prc

    one, other, logits = features(2, scale=0.7), features(3, shift=0.2), features(6, scale=3.0)
    moments = [metric_fid.fid_features_to_statistics(each) for each in (one, other)]
    expected = metric_fid.fid_statistics_to_metric(*moments, verbose=False)["frechet_inception_distance"]
    assert set_distances.frechet_distance(one, other).value == pytest.approx(expected, rel=1e-4)
    expected = metric_isc.isc_features_to_metric(logits, splits=1, shuffle=False)["inception_score_mean"]
    assert set_distances.inception_score(logits).value == pytest.approx(expected, rel=1e-6)
    expected = metric_prc.calculate_precision_recall_full(one, other, neighborhood=3)
    found = set_distances.neighbour_scores(one, other)
    assert (found["precision"].value, found["recall"].value) == pytest.approx(expected, abs=1e-6)


def test_neighbour_scores_are_the_definitions_point_by_point():
    one, reference = features(7, scale=0.5), features(8)
    found = set_distances.neighbour_scores(one, reference)
    assert found["precision"].value > found["recall"].value + 0.2, "exchanging the two would be seen"
    assert found["precision"].value == pytest.approx(slow_neighbours(one, reference, 3)[0])
    assert found["recall"].value == pytest.approx(slow_neighbours(reference, one, 3)[0])
    _, density, coverage = slow_neighbours(one, reference, 5)
    assert found["density"].value == pytest.approx(density)
    assert found["coverage"].value == pytest.approx(coverage)
    assert all(value.low <= value.value <= value.high for value in found.values())


def slow_distance(one, other):
    """The kernel distance by its formula, pair by pair."""

    def k(a, b):
        return (a @ b / len(a) + 1) ** 3

    pairs = [(i, j) for i in range(len(one)) for j in range(len(one)) if i != j]
    terms = [
        k(one[i], one[j]) + k(other[i], other[j]) - k(one[i], other[j]) - k(one[j], other[i])
        for i, j in pairs
    ]
    return (sum(terms) / len(terms)).item()


def draw_pairs(generator, shift=0.0):
    """Two sets of Gaussian features [PROMPTS, WIDTH], of which those of one prompt are correlated."""
    prompt, one, other = torch.randn(3, PROMPTS, WIDTH, generator=generator, dtype=torch.float64)
    return (prompt + one) / 2**0.5, (prompt + other) / 2**0.5 + shift


def test_the_kernel_distance_is_the_formula_and_its_margin_leaves_out_one_prompt_after_the_other():
    one, other = torch.randn(2, 7, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = kernel_distance(one, other + 0.5)
    assert found.value == pytest.approx(slow_distance(one, other + 0.5), rel=1e-12)
    kept = [[index for index in range(7) if index != gone] for gone in range(7)]
    without = torch.tensor([slow_distance(one[rows], other[rows] + 0.5) for rows in kept])
    assert tuple(vars(kernel_distance(one, one)).values()) == pytest.approx((0.0, 0.0, 0.0), abs=1e-9)
    error = (6 / 7 * (without - without.mean()).square().sum()).sqrt().item()
    assert found.high - found.value == pytest.approx(1.96 * error, rel=1e-6)


@pytest.mark.parametrize(("shift", "most"), [(0.0, 0.995), (0.3, 0.97)])
def test_its_interval_contains_the_true_distance_about_95_times_in_100(shift, most):
    square = WIDTH * shift**2  # the true one is of squared distances of moments, weighted as in the kernel
    third = square**3 + 6 * square**2 + 3 * (WIDTH + 2) * square
    true = 3 * square / WIDTH + 3 * square**2 / WIDTH**2 + third / WIDTH**3
    generator = torch.Generator().manual_seed(1)
    found = [kernel_distance(*draw_pairs(generator, shift)) for _ in range(1000)]
    assert 0.93 <= np.mean([one.low <= true <= one.high for one in found]) <= most


def test_the_jackknife_of_a_mean_is_its_standard_error_and_holds_it_about_95_times_in_100():
    values = torch.randn(40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    (found,) = jackknife(lambda rows: [float(values[rows].mean())], len(values), groups=40)
    error = float(values.std()) / math.sqrt(40)
    assert found.high - found.value == pytest.approx(student_quantile(39) * error, rel=1e-9)
    generator, inside = torch.Generator().manual_seed(3), 0
    for _ in range(400):
        values = torch.rand(50, generator=generator)
        (found,) = jackknife(lambda rows, values=values: [float(values[rows].mean())], 50)
        inside += found.low <= 0.5 <= found.high
    assert 0.92 <= inside / 400 <= 0.98
