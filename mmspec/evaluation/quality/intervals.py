"""Confidence intervals of scores of a set of images or texts.

All are pure functions, and every interval contains its estimate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mmspec.open_types import Json

__all__ = ["GROUPS", "Estimate", "as_share", "jackknife", "jsonable", "proportion", "within"]

GROUPS = 20
NORMAL_QUANTILE = 1.959964  # standard deviations that contain 95 % of a normal distribution


@dataclass(frozen=True)
class Estimate:
    """An estimate with its 95 % interval, low <= value <= high."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.4g} [{self.low:.4g}, {self.high:.4g}]"


def jsonable(figures: Mapping[str, object]) -> Json:
    """Scores by name for JSON; an estimate becomes its value and the ends of its interval."""
    return {name: vars(one) if isinstance(one, Estimate) else one for name, one in figures.items()}


def jackknife(
    statistic: Callable[[Tensor], Sequence[float]], count: int, groups: int = GROUPS
) -> list[Estimate]:
    """Statistics of a set of rows, with intervals by the delete-a-group jackknife.

    The standard error (Kott, J. Official Statistics 17, 2001) is the root of (g - 1) / g times the sum of
    (t_j - mean)^2, where t_j is the statistic without group j. The interval is the statistic +- the quantile
    of Student's t for g - 1 degrees of freedom times the standard error. Unlike a bootstrap, the jackknife
    never repeats a row, which would put nearest neighbours at distance 0. It measures the variation at this
    number of rows, not the bias of a statistic that depends on their number.

    Args:
        statistic: maps row indices [m] to a fixed number of statistics.
        count: number of rows, at least 3.
        groups: the most groups; row i is in group i mod groups.
    """
    groups = min(groups, count)
    rows = torch.arange(count)
    values = statistic(rows)
    without = torch.tensor(
        [list(statistic(rows[rows % groups != group])) for group in range(groups)], dtype=torch.float64
    )
    variance = (without - without.mean(0)).square().sum(0) * (groups - 1) / groups
    margins = student_quantile(groups - 1) * variance.sqrt()
    return [
        Estimate(float(value), float(value) - margin, float(value) + margin)
        for value, margin in zip(values, margins.tolist(), strict=True)
    ]


def student_quantile(freedom: int) -> float:
    """The 97.5 % quantile of Student's t, expanded around the normal quantile (Abramowitz, 26.7.5)."""
    z = NORMAL_QUANTILE
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


def within(estimate: Estimate, least: float, most: float) -> Estimate:
    """Clip an estimate and its interval to [least, most], the range of the statistic."""
    value = min(max(estimate.value, least), most)
    return Estimate(value, max(estimate.low, least), min(estimate.high, most))


def proportion(right: float, count: int) -> Estimate:
    """A share with Wilson's score interval (JASA 22, 1927), which has a width even for shares of 0 and 1."""
    share, z2 = right / count, NORMAL_QUANTILE**2
    middle = (share + z2 / (2 * count)) / (1 + z2 / count)
    margin = (z2 * (share * (1 - share) / count + z2 / (4 * count**2))) ** 0.5 / (1 + z2 / count)
    return Estimate(share, max(0.0, min(share, middle - margin)), min(1.0, max(share, middle + margin)))


def as_share(estimate: Estimate, count: int) -> Estimate:
    """A share of `count` with the union of the jackknife's and Wilson's intervals.

    The jackknife's interval has no width if all are correct.
    """
    value = min(max(estimate.value, 0.0), 1.0)
    other = proportion(value * count, count)
    return Estimate(value, max(0.0, min(estimate.low, other.low)), min(1.0, max(estimate.high, other.high)))
