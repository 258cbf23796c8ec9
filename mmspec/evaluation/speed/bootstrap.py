"""Bootstrap intervals of ratios over prompts.

Prompts differ more than repeats do, so prompts are what is drawn again: pairs stay pairs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

__all__ = ["ratio_interval", "speedup_interval"]

RESAMPLES = 2000
PERCENTILES = 2.5, 97.5
FEWEST = 3


def speedup_interval(
    plain: Sequence[Sequence[float]], ours: Sequence[Sequence[float]]
) -> tuple[float, float] | None:
    """The 95 % interval of a ratio of medians over repeats of sums over prompts.

    Args:
        plain, ours: seconds [R][B] of the same prompts in the same repeats.

    Returns:
        Its ends, which contain the ratio itself; None for fewer than three prompts.
    """
    theirs, own = np.asarray(plain, dtype=float), np.asarray(ours, dtype=float)
    chosen = _choices(theirs.shape[1])
    if chosen is None:
        return None
    medians = [np.median(seconds[:, chosen].sum(-1), axis=0) for seconds in (theirs, own)]
    estimate = np.median(theirs.sum(-1)) / np.median(own.sum(-1))
    return _ends(medians[0] / medians[1], float(estimate))


def ratio_interval(counts: Sequence[float], per: Sequence[float]) -> tuple[float, float] | None:
    """The 95 % interval of sum(counts) / sum(per) over prompts, such as tokens per forward.

    Args:
        counts, per: [B] of each prompt; none of `per` below 0.

    Returns:
        Its ends, which contain the ratio itself; None for fewer than three prompts, or for no counts.
    """
    above, below = np.asarray(counts, dtype=float), np.asarray(per, dtype=float)
    chosen = _choices(len(above))
    if chosen is None or not below.sum():
        return None
    sums = below[chosen].sum(-1)
    drawn = above[chosen].sum(-1)[sums > 0] / sums[sums > 0]
    return _ends(drawn, float(above.sum() / below.sum()))


def _choices(prompts: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]] | None:
    """[RESAMPLES, B] prompts drawn with replacement, the same every time."""
    if prompts < FEWEST:
        return None
    return np.random.default_rng(0).integers(prompts, size=(RESAMPLES, prompts))


def _ends(drawn: np.ndarray[tuple[int, ...], np.dtype[np.float64]], estimate: float) -> tuple[float, float]:
    low, high = np.percentile(drawn, PERCENTILES)
    return min(float(low), estimate), max(float(high), estimate)
