"""Drift of a clip: how far the scores of its later chunks are from that of the first."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mmspec.errors import InputError
from mmspec.registry import did_you_mean

__all__ = ["video_drift"]

WEIGHTS = ("uniform", "linear", "log")


def video_drift(scores: Sequence[float], weights: str = "uniform") -> float:
    """Video drift error (BlockVid, 2511.22973): the weighted sum of |m_i - m_1| / m_1 over chunks of a clip.

    The published weights have traps. They are not normalised, so that the figure grows with the number of
    chunks N; "uniform" is a mean, and does not. Late chunks weigh least, though late stability is what is
    asked for, and with "log" the last one weighs nothing. With any weights a clip that is bad from its first
    chunk on scores well, and steps up count as steps down do: give the mean score beside it.

    Args:
        scores: m_1 to m_N, a score of each of N chunks of equal length, in the order of the clip.
        weights: of chunk i = 2 to N: "uniform", 1 / (N - 1); or as published "linear", N - i + 1, or "log",
            ln(N - i + 1).

    Raises:
        InputError: fewer than two scores, one that is not finite, a first one that is not above 0, or no such
            weights.
    """
    if weights not in WEIGHTS:
        raise InputError("weights", weights, did_you_mean(weights, WEIGHTS))
    chunks = len(scores)
    if chunks < 2 or not all(map(math.isfinite, scores)) or scores[0] <= 0:
        raise InputError("scores", list(scores), "must be at least two finite numbers, the first above 0")
    total = 0.0
    for index, score in enumerate(scores[1:], 2):
        left = chunks - index + 1
        weight = {"uniform": 1 / (chunks - 1), "linear": left, "log": math.log(left)}[weights]
        total += weight * abs(score - scores[0]) / scores[0]
    return total
