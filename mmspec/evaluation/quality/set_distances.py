"""Distances between sets of images, and scores of one set, on the features of any network.

All are pure functions of features. The tests compare most of them with torch-fidelity.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mmspec.errors import InputError
from mmspec.evaluation.quality.image_folder import Moments
from mmspec.evaluation.quality.intervals import Estimate, as_share, jackknife, within

__all__ = ["diversity", "frechet_distance", "inception_score", "kernel_distance", "neighbour_scores"]

NORMAL_QUANTILE = 1.96  # standard deviations that contain 95 % of a normal distribution
PRECISION_NEIGHBOURS = 3  # as in Kynkaanniemi et al.
DENSITY_NEIGHBOURS = 5  # as in Naeem et al.


def kernel_distance(one: Tensor, reference: Tensor) -> Estimate:
    """Kernel distance (KID) between two sets of images of the same prompts.

    The unbiased squared maximum mean discrepancy for k(x, y) = (x.y / d + 1)^3 (Binkowski et al., 1801.01401,
    section 4) as a U-statistic: the mean over i != j of k(x_i, x_j) + k(y_i, y_j) - k(x_i, y_j) - k(x_j, y_i)
    (Gretton et al., JMLR 2012, lemma 6). It never compares x_i with y_i, which share a prompt and are not
    independent. Sets of one distribution have distance 0 on average, so the value can be negative.

    The interval is 1.96 standard errors by the delete-one jackknife over prompts. In simulations at 48
    prompts it contains the true distance in 93 to 99 of 100 repeats (most for equal distributions, as the
    jackknife overestimates variance), and in fewer for one-dimensional features.

    Args:
        one, reference: [n, d] features of one network; row i of both is for prompt i.

    Raises:
        InputError: fewer than three rows, or different shapes.
    """
    _check_pair(one, reference, "kid", 3)
    one, other = one.double(), reference.double()
    across = _kernel(one, other)
    pairs = (_kernel(one, one) + _kernel(other, other) - across - across.T).fill_diagonal_(0.0)
    count, total = len(one), pairs.sum()
    distance = float(total / (count * (count - 1)))
    without_one = (total - 2 * pairs.sum(1)) / ((count - 1) * (count - 2))
    margin = NORMAL_QUANTILE * float(((count - 1) / count * (without_one - distance).square().sum()).sqrt())
    return Estimate(distance, distance - margin, distance + margin)


def _kernel(one: Tensor, other: Tensor) -> Tensor:
    return (one @ other.T / one.shape[1] + 1) ** 3


def _check_pair(one: Tensor, reference: Tensor, metric: str, least: int) -> None:
    if one.shape != reference.shape or one.dim() != 2 or len(one) < least:
        rule = f"needs equally many images in both sets (see --samples), at least {least}"
        raise InputError(metric, f"{len(one)} images against {len(reference)}", rule)


def frechet_distance(one: Tensor, reference: Tensor | Moments) -> Estimate:
    """Frechet distance (FID; Heusel et al., 1706.08500) between two sets of features.

    Its bias depends on the number of images, so both sets must have the same number. The number behind a
    published mean and covariance is unknown.

    Args:
        one: [n, d] features.
        reference: [n, d] features, or moments.

    Raises:
        InputError: the sets differ in number, or there are not more images than features: a covariance is
            then singular, and the distance depends more on the number of images than on the images.
    """
    count, width = one.shape
    if isinstance(reference, Tensor):
        _check_pair(one, reference, "fid", 3)
    if count <= width:
        raise InputError("fid", f"{count} images", f"needs more images than the network's {width} features")

    def distance(rows: Tensor) -> list[float]:
        mine = moments_of(one[rows])
        other = moments_of(reference[rows]) if isinstance(reference, Tensor) else reference
        apart = mine.mean - other.mean
        shared = torch.linalg.eigvalsh(other.root @ mine.covariance @ other.root).clamp(min=0).sqrt().sum()
        return [float(apart @ apart + mine.covariance.trace() + other.covariance.trace() - 2 * shared)]

    return within(jackknife(distance, count)[0], 0.0, float("inf"))


def moments_of(features: Tensor) -> Moments:
    """Mean and covariance of features [n, d]."""
    return Moments(features.double().mean(0), features.double().T.cov())


def inception_score(logits: Tensor) -> Estimate:
    """Inception score (Salimans et al., 1606.03498) of all images at once.

    Args:
        logits: [n, classes] of a classifier. The score is between 1 and the number of classes.
    """
    logs = logits.double().log_softmax(-1)

    def score(rows: Tensor) -> list[float]:
        some = logs[rows]
        return [float((some.exp() * (some - some.exp().mean(0).log())).sum(-1).mean().exp())]

    return within(jackknife(score, len(logits))[0], 1.0, float(logits.shape[1]))


def neighbour_scores(one: Tensor, reference: Tensor) -> dict[str, Estimate]:
    """Precision, recall, density and coverage of a set against a reference, from nearest neighbours.

    The neighbourhood of a reference image extends to its third neighbour in the reference. Precision is the
    share of images in any neighbourhood; recall is the same with the sets exchanged (Kynkaanniemi et al.,
    1904.06991). With fifth neighbours, density is the mean number of neighbourhoods that contain an image,
    over 5; coverage is the share of neighbourhoods that contain an image (Naeem et al., 2002.09797).
    Needs memory for three matrices [n, n] of doubles.

    Args:
        one, reference: [n, d] features.

    Raises:
        InputError: the sets differ in number, or have too few images for the neighbours.
    """
    count = len(one)
    _check_pair(one, reference, "precision_recall", 2 * (DENSITY_NEIGHBOURS + 1))
    one, reference = one.double(), reference.double()
    own, among, across = torch.cdist(one, one), torch.cdist(reference, reference), torch.cdist(one, reference)

    def scores(rows: Tensor) -> list[float]:
        mine, others, between = (matrix[rows][:, rows] for matrix in (own, among, across))
        # the nearest neighbour is the image itself
        in_reference = between <= others.kthvalue(PRECISION_NEIGHBOURS + 1).values
        in_own = between <= mine.kthvalue(PRECISION_NEIGHBOURS + 1).values[:, None]
        near = between <= others.kthvalue(DENSITY_NEIGHBOURS + 1).values
        return [
            float(in_reference.any(1).double().mean()),
            float(in_own.any(0).double().mean()),
            float(near.double().sum(1).mean()) / DENSITY_NEIGHBOURS,
            float(near.any(0).double().mean()),
        ]

    precision, recall, density, coverage = jackknife(scores, count)
    return {
        "precision": as_share(precision, count),
        "recall": as_share(recall, count),
        "density": within(density, 0.0, float("inf")),
        "coverage": as_share(coverage, count),
    }


def diversity(features: Tensor) -> Estimate:
    """Vendi score (Friedman and Dieng, 2210.02410): the effective number of distinct images in a set.

    It is the exponential of the entropy of the eigenvalues of K / n, where K [n, n] contains the cosine
    similarities; 1 if all images are equal.

    Args:
        features: [n, d].
    """
    unit = nn.functional.normalize(features.double(), dim=-1)

    def score(rows: Tensor) -> list[float]:
        some = unit[rows]
        gram = some.T @ some if len(some) > some.shape[1] else some @ some.T
        shares = torch.linalg.eigvalsh(gram / len(some)).clamp(min=0)
        return [float(torch.special.entr(shares).sum().exp())]

    return within(jackknife(score, len(features))[0], 1.0, float(len(features)))
