"""Drift of clips, computed by hand."""

from __future__ import annotations

import math

import pytest

from mmspec.errors import InputError
from mmspec_extras.families.nbp.drift import WEIGHTS, video_drift


def test_drift_by_hand() -> None:
    scores = [0.8, 0.6, 1.0, 0.4]  # a quarter down, a quarter up, a half down
    assert video_drift(scores) == pytest.approx((0.25 + 0.25 + 0.5) / 3)
    assert video_drift(scores, "linear") == pytest.approx(3 * 0.25 + 2 * 0.25 + 0.5)
    assert video_drift(scores, "log") == pytest.approx(math.log(3) * 0.25 + math.log(2) * 0.25)
    assert video_drift([*scores[:3], 77.0], "log") == video_drift(scores, "log")  # ignores the last chunk


@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_clip_that_stays_as_it_is_does_not_drift(weights: str) -> None:
    assert video_drift([0.3] * 10, weights) == 0


@pytest.mark.parametrize("scores", [[], [1.0], [0.0, 1.0], [1.0, math.nan]])
def test_what_has_no_drift_is_refused(scores: list[float]) -> None:
    with pytest.raises(InputError, match="scores"):
        video_drift(scores)
    with pytest.raises(InputError, match="weights"):
        video_drift([1.0, 1.0], "late")
