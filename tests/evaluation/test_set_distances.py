"""Distances of sets of features against independent implementations, and their intervals."""

import math
import statistics as python_statistics

import numpy as np
import pytest
import torch

from mmspec.errors import InputError
from mmspec.evaluation.quality import set_distances
from mmspec.evaluation.quality.intervals import Estimate, jackknife, proportion, student_quantile
from mmspec.evaluation.quality.set_distances import kernel_distance

N, D = 60, 6


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


def test_frechet_distance_is_the_formula():
    one, other = features(0), features(1, shift=0.4, scale=1.5)
    found = set_distances.frechet_distance(one, other)
    assert found.value == pytest.approx(slow_frechet(one, other), rel=1e-6)
    assert found.low < found.value < found.high


def test_the_interval_of_frechet_distance_leaves_out_pairs_of_both_sets():
    one, other = features(0), features(1, shift=0.4, scale=1.5)
    kept = [np.arange(N) % 20 != group for group in range(20)]
    without = np.array([slow_frechet(one[rows], other[rows]) for rows in kept])
    error = math.sqrt(19 / 20 * ((without - without.mean()) ** 2).sum())
    found = set_distances.frechet_distance(one, other)
    assert found.high - found.value == pytest.approx(student_quantile(19) * error, rel=1e-4)


def test_frechet_distance_is_that_of_torch_fidelity():
    fidelity = pytest.importorskip("torch_fidelity.metric_fid")
    one, other = features(2), features(3, shift=0.2)
    moments = [fidelity.fid_features_to_statistics(one), fidelity.fid_features_to_statistics(other)]
    expected = fidelity.fid_statistics_to_metric(*moments, verbose=False)["frechet_inception_distance"]
    assert set_distances.frechet_distance(one, other).value == pytest.approx(expected, rel=1e-4)


def test_kernel_distance_is_that_of_torchmetrics_up_to_the_pairs_that_share_a_prompt():
    from torchmetrics.image.kid import poly_kernel, poly_mmd

    one, other = features(4).double(), features(5, shift=0.3).double()
    across = poly_kernel(one, other)
    all_pairs, without = across.mean(), (across.sum() - across.trace()) / (N * (N - 1))
    expected = poly_mmd(other, one) + 2 * (all_pairs - without)
    assert kernel_distance(one, other)[0] == pytest.approx(float(expected), rel=1e-9)


def test_inception_score_is_that_of_torch_fidelity():
    fidelity = pytest.importorskip("torch_fidelity.metric_isc")
    logits = features(6, scale=3.0)
    expected = fidelity.isc_features_to_metric(logits, splits=1, shuffle=False)["inception_score_mean"]
    before = torch.get_rng_state()
    assert set_distances.inception_score(logits).value == pytest.approx(expected, rel=1e-6)
    assert torch.equal(torch.get_rng_state(), before)  # nobody's random numbers are used up


def test_neighbour_scores_are_the_definitions_point_by_point():
    one, reference = features(7, scale=0.8), features(8)
    found = set_distances.neighbour_scores(one, reference)
    assert found["precision"].value == pytest.approx(slow_neighbours(one, reference, 3)[0])
    assert found["recall"].value == pytest.approx(slow_neighbours(reference, one, 3)[0])
    _, density, coverage = slow_neighbours(one, reference, 5)
    assert found["density"].value == pytest.approx(density)
    assert found["coverage"].value == pytest.approx(coverage)
    assert all(value.low <= value.value <= value.high for value in found.values())


def test_precision_and_recall_are_those_of_torch_fidelity():
    fidelity = pytest.importorskip("torch_fidelity.metric_prc")
    one, reference = features(9, scale=0.7), features(10)
    expected = fidelity.calculate_precision_recall_full(one, reference, neighborhood=3)
    found = set_distances.neighbour_scores(one, reference)
    assert (found["precision"].value, found["recall"].value) == pytest.approx(expected, abs=1e-6)


def test_diversity_counts_what_has_nothing_in_common():
    apart = torch.eye(4).repeat(5, 1)
    assert set_distances.diversity(apart).value == pytest.approx(4.0)
    assert set_distances.diversity(torch.ones(20, 4)).value == pytest.approx(1.0)
    assert set_distances.diversity(torch.eye(30)).value == pytest.approx(30.0)


@pytest.mark.parametrize("damage", ["collapse", "shift", "swap"])
def test_planted_faults_of_a_model_are_seen(damage):
    """Each figure moves when the images do what it is there to see."""
    reference, sound = features(11, count=200), features(12, count=200)
    bad = {
        "collapse": sound[:1] + 0.05 * sound,  # one image again and again
        "shift": sound + 4.0,
        "swap": torch.cat([sound[:100], sound[:100] + 4.0]),  # half of them are wrong
    }[damage]
    before, after = (set_distances.neighbour_scores(one, reference) for one in (sound, bad))
    assert (
        set_distances.frechet_distance(bad, reference).low
        > set_distances.frechet_distance(sound, reference).high
    )
    assert set_distances.kernel_estimate(bad, reference).low > 0
    if damage == "collapse":
        assert after["recall"].high < before["recall"].low
        assert after["coverage"].high < before["coverage"].low
        assert set_distances.diversity(bad).high < set_distances.diversity(sound).low
    else:
        assert after["precision"].high < before["precision"].low
        assert after["density"].high < before["density"].low


def test_exchanging_precision_with_recall_would_be_found_out():
    found = set_distances.neighbour_scores(features(13, scale=0.2), features(14))
    assert found["precision"].value > 0.9 > 0.5 > found["recall"].value


@pytest.mark.parametrize("counts", [(D, D), (40, 39)])
def test_frechet_distances_that_mean_nothing_are_refused(counts):
    with pytest.raises(InputError, match="fid: got"):
        set_distances.frechet_distance(features(count=counts[0]), features(count=counts[1]))


def test_too_few_neighbours_are_refused():
    with pytest.raises(InputError, match="at least 12"):
        set_distances.neighbour_scores(features(count=11), features(count=11))


def test_the_jackknife_of_a_mean_is_its_standard_error():
    values = torch.randn(40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    (found,) = jackknife(lambda rows: [float(values[rows].mean())], len(values), groups=40)
    error = python_statistics.stdev(values.tolist()) / math.sqrt(40)
    assert found.high - found.value == pytest.approx(student_quantile(39) * error, rel=1e-9)


def test_the_interval_contains_the_true_value_about_95_times_in_100():
    generator, inside = torch.Generator().manual_seed(3), 0
    for _ in range(400):
        values = torch.rand(50, generator=generator)
        (found,) = jackknife(lambda rows, values=values: [float(values[rows].mean())], 50)
        inside += found.low <= 0.5 <= found.high
    assert 0.92 <= inside / 400 <= 0.98


@pytest.mark.parametrize("shift", [0.0, 0.5])
def test_intervals_contain_what_is_true_of_so_many_images(shift):
    """The mean over repeats stands for it; 60 of them tell 0.95 from 0.85."""
    generator, found = torch.Generator().manual_seed(0), {}
    for _ in range(60):
        one, reference = torch.randn(2, 100, 4, generator=generator)
        one = one + shift
        figures = {
            "fid": set_distances.frechet_distance(one, reference),
            "diversity": set_distances.diversity(one),
            **set_distances.neighbour_scores(one, reference),
        }
        for name, figure in figures.items():
            found.setdefault(name, []).append(figure)
    for name, figures in found.items():
        mean = sum(figure.value for figure in figures) / len(figures)
        inside = sum(figure.low <= mean <= figure.high for figure in figures) / len(figures)
        assert inside >= 0.88, name


def test_quantiles_of_student_are_those_of_the_tables():
    for freedom, quantile in [(4, 2.7764), (9, 2.2622), (19, 2.0930), (39, 2.0227)]:
        assert student_quantile(freedom) == pytest.approx(quantile, abs=0.01)


def test_shares_are_in_their_intervals_and_these_in_0_to_1():
    for right, count in [(0, 5), (5, 5), (3, 7), (1, 1)]:
        found = proportion(right, count)
        assert 0.0 <= found.low <= found.value == right / count <= found.high <= 1.0
        assert found.high - found.low > 0.1  # nothing is certain after so few


def test_wilsons_interval_is_that_of_the_textbook():
    found = proportion(8, 10)  # 0.4902 to 0.9433
    assert (found.low, found.high) == pytest.approx((0.4902, 0.9433), abs=1e-4)


def test_nothing_has_no_interval():
    with pytest.raises(InputError):
        jackknife(lambda rows: [0.0], 2)
    with pytest.raises(InputError):
        proportion(0, 0)


def test_an_estimate_reads_as_a_figure_with_its_interval():
    assert str(Estimate(0.51234, 0.4, 0.6)) == "0.5123 [0.4, 0.6]"
