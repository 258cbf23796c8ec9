"""Figures about sets of pictures: how far apart two sets are, and how varied their tokens are.

Pure functions of features and codes; knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mmspec.errors import InputError

__all__ = ["bootstrap_interval", "frechet_distance", "principal_axes", "token_entropy"]

RESAMPLES = 200


def frechet_distance(one: Tensor, other: Tensor) -> float:
    """Distance of two sets of features as if both were Gaussian (Heusel et al., 1706.08500, equation 6).

    |m1 - m2|^2 + tr(C1 + C2 - 2 (C1 C2)^(1/2)).

    Args:
        one, other: [n, d] and [m, d] features; with fewer than about 10 d rows the figure is biased upwards,
            so compare it with the distance of two like sets of the same sizes.

    Raises:
        InputError: fewer than two rows, or different widths.
    """
    for name, features in (("one", one), ("other", other)):
        if features.dim() != 2 or len(features) < 2 or features.shape[1] != one.shape[1]:
            raise InputError(name, tuple(features.shape), "at least two rows of features of one width")
    one, other = one.double(), other.double()
    shift = (one.mean(0) - other.mean(0)).square().sum()
    first, second = (torch.atleast_2d(torch.cov(features.T)) for features in (one, other))
    # C1 C2 has the eigenvalues of the symmetric C1^(1/2) C2 C1^(1/2): real, and negative by rounding alone
    root = torch.linalg.eigvals(first @ second).real.clamp_min(0.0).sqrt().sum()
    return float(shift + first.trace() + second.trace() - 2 * root)


def principal_axes(features: Tensor, count: int) -> Tensor:
    """[d, count] axes along which features [n, d] vary most, scaled to unit variance; count < n, <= d.

    Features are projected on the axes of one reference set: covariances of small sets have rank there, and
    distances do not depend on the units of a network.
    """
    count = min(count, len(features) - 1, features.shape[1])
    _, spread, axes = torch.linalg.svd(features - features.mean(0), full_matrices=False)
    deviation = spread[:count] / (len(features) - 1) ** 0.5
    scaled: Tensor = axes[:count] / deviation.clamp_min(1e-6)[:, None]
    return scaled.T


def bootstrap_interval(
    one: Tensor, other: Tensor, seed: int = 0, resamples: int = RESAMPLES
) -> tuple[float, float]:
    """95 % percentile interval of the Frechet distance, over pictures drawn again from the first set."""
    generator = torch.Generator().manual_seed(seed)
    distances = [
        frechet_distance(one[torch.randint(len(one), (len(one),), generator=generator)], other)
        for _ in range(resamples)
    ]
    low, high = torch.tensor(distances).quantile(torch.tensor([0.025, 0.975])).tolist()
    return low, high


def token_entropy(codes: Sequence[Sequence[int]]) -> float:
    """Entropy in nats of how often each code is used in a set of pictures.

    Relaxations that favour likely codes lower it long before a reader of attributes notices.
    """
    counts = torch.bincount(torch.tensor([code for picture in codes for code in picture])).double()
    shares = counts / counts.sum()
    return float(torch.special.entr(shares).sum())
