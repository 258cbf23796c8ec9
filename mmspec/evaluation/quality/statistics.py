"""Statistics of sets of images: kernel distance between two sets, and entropy of their tokens.

Pure functions of features and codes; knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mmspec.errors import InputError

__all__ = ["kernel_distance", "token_entropy"]

NORMAL_QUANTILE = 1.96  # 95 % of a normal distribution is within so many standard deviations


def kernel_distance(one: Tensor, other: Tensor) -> tuple[float, float]:
    """Kernel distance (KID) of two sets of images of the same prompts, and the margin of its 95 % interval.

    The unbiased squared maximum mean discrepancy for k(x, y) = (x.y / d + 1)^3 (Binkowski et al., 1801.01401,
    section 4) as a U-statistic: the mean over i != j of k(x_i, x_j) + k(y_i, y_j) - k(x_i, y_j) - k(x_j, y_i)
    (Gretton et al., JMLR 2012, lemma 6). It never compares x_i with y_i, which share a prompt and so are not
    independent. Sets of one distribution have distance 0 on average, so it can be negative.

    The margin is 1.96 standard errors by the delete-one jackknife over prompts: the interval is distance +-
    margin. In simulations at 48 prompts it contains the true distance in 93 to 99 of 100 repeats (most for
    equal distributions, as a jackknifed variance errs upwards), in fewer where features have one dimension.

    Args:
        one, other: [n, d] features; row i of both belongs to prompt i.

    Returns:
        Distance and margin; both in units of the kernel, so compare them for one network only.

    Raises:
        InputError: fewer than three rows, or different shapes.
    """
    for name, features in (("one", one), ("other", other)):
        if features.dim() != 2 or len(features) < 3 or features.shape != one.shape:
            raise InputError(name, tuple(features.shape), "at least 3 rows of features, as many in both sets")
    one, other = one.double(), other.double()
    across = _kernel(one, other)
    pairs = (_kernel(one, one) + _kernel(other, other) - across - across.T).fill_diagonal_(0.0)
    count, total = len(one), pairs.sum()
    distance = total / (count * (count - 1))
    without_one = (total - 2 * pairs.sum(1)) / ((count - 1) * (count - 2))
    error = ((count - 1) / count * (without_one - distance).square().sum()).sqrt()
    return float(distance), NORMAL_QUANTILE * float(error)


def _kernel(one: Tensor, other: Tensor) -> Tensor:
    return (one @ other.T / one.shape[1] + 1) ** 3


def token_entropy(codes: Sequence[Sequence[int]]) -> float:
    """Entropy in nats of the use of codes in a set of images.

    Relaxations that favour likely codes lower it long before a reader of attributes notices.
    """
    counts = torch.bincount(torch.tensor([code for image in codes for code in image])).double()
    shares = counts / counts.sum()
    return float(torch.special.entr(shares).sum())
