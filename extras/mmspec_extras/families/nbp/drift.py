"""Drift of a clip: the distance of the scores of its later chunks from the score of the first."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mmspec.errors import InputError
from mmspec.registry import did_you_mean

__all__ = ["video_drift"]

WEIGHTS = ("uniform", "linear", "log")


def video_drift(scores: Sequence[float], weights: str = "uniform") -> float:
    """Return the video drift error (BlockVid, 2511.22973): a weighted sum of |m_i - m_1| / m_1 over chunks.

    The published weights are not normalised, so that the error grows with the number of chunks N; "uniform"
    is a mean. They are smallest for late chunks, although the error should measure late stability; "log"
    ignores the last chunk. With any weights, a clip that is bad from its first chunk on has a small error,
    and a rising score counts like a falling one. Report the mean score as well.

    Args:
        scores: m_1 to m_N, the scores of N chunks of equal length, in the order of the clip.
        weights: weight of chunk i = 2 to N: "uniform", 1 / (N - 1); as published "linear", N - i + 1, or
            "log", ln(N - i + 1).

    Raises:
        InputError: there are fewer than two scores, a score is not finite, the first is not above 0, or the
            weights are unknown.
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
