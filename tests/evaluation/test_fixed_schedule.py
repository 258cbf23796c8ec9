"""Cost models of speculation against the published speed-ups of CSpD (2411.11925): no term of acceptance."""

from __future__ import annotations

import pytest

from mmspec.errors import InputError
from mmspec.evaluation.speed.fixed_schedule import FixedSchedule, stopping_speedup

LENGTHS, BATCHES = (32, 16, 8, 4), (1, 8, 128, 256)
#: Speed-ups of MAR, rows for the lengths of drafts and columns for the sizes of batches.
PUBLISHED = {
    "L-B": ["1.18 1.21 1.44 1.49", "1.10 1.17 1.39 1.42", "1.05 1.12 1.29 1.32", "1.01 1.00 1.13 1.15"],
    "H-B": ["1.44 1.61 2.17 2.33", "1.37 1.51 2.07 2.20", "1.26 1.44 1.88 1.96", "1.11 1.20 1.56 1.62"],
    "H-L": ["1.26 1.34 1.47 1.53", "1.24 1.29 1.41 1.46", "1.11 1.21 1.32 1.33", "1.00 1.03 1.15 1.18"],
}
ACCEPTANCE = {32: 0.19, 16: 0.26, 8: 0.27, 4: 0.30}  # of H-B


def speedups(pair: str, batch: int) -> dict[int, float]:
    column = BATCHES.index(batch)
    rows = zip(LENGTHS, PUBLISHED[pair], strict=True)
    return {length: float(row.split()[column]) for length, row in rows}


@pytest.mark.parametrize("pair", PUBLISHED)
@pytest.mark.parametrize("batch", BATCHES)
def test_two_constants_describe_every_published_speedup(pair: str, batch: int) -> None:
    published = speedups(pair, batch)
    assert FixedSchedule.fitted(published).largest_error(published) < 0.035


@pytest.mark.parametrize(
    "pair, batch, draft_step, verification, error",
    [
        ("H-B", 256, 0.370, 0.908, 0.003),
        ("H-B", 128, 0.402, 0.872, 0.008),
        ("H-B", 8, 0.571, 0.994, 0.023),
        ("H-B", 1, 0.653, 0.984, 0.009),
        ("L-B", 256, 0.627, 0.946, 0.005),
        ("H-L", 256, 0.612, 0.930, 0.015),
    ],
)
def test_constants_are_those_of_the_analysis(
    pair: str, batch: int, draft_step: float, verification: float, error: float
) -> None:
    published = speedups(pair, batch)
    fitted = FixedSchedule.fitted(published)
    assert fitted.draft_step == pytest.approx(draft_step, abs=0.002)
    assert fitted.verification == pytest.approx(verification, abs=0.002)
    assert fitted.largest_error(published) < error


def test_stopping_at_a_rejection_would_slow_down_at_the_published_acceptance() -> None:
    found = [stopping_speedup(ACCEPTANCE[length], length, 0.370) for length in LENGTHS]
    assert found == pytest.approx([0.10, 0.20, 0.35, 0.57], abs=0.006)


def test_a_schedule_is_fitted_back_and_ends_of_the_range_are_plain() -> None:
    schedule = FixedSchedule(0.3, 0.8, prefill=0.1)
    fitted = FixedSchedule.fitted({n: schedule.speedup(n) for n in (2, 4, 8)}, prefill=0.1)
    assert (fitted.draft_step, fitted.verification) == pytest.approx((0.3, 0.8))
    assert FixedSchedule(0.3, 0.8, prefill=1.0).speedup(4) == 1.0
    assert stopping_speedup(1.0, 4, 0.25) == 2.5 and stopping_speedup(0.0, 4, 0.25) == 0.5


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(InputError, match="at least two"):
        FixedSchedule.fitted({4: 1.2})
    with pytest.raises(InputError, match="speedups"):
        FixedSchedule.fitted({4: 1.2, 8: 0.0})
    with pytest.raises(InputError, match="draft_step"):
        FixedSchedule(-0.1, 1.0)
    with pytest.raises(InputError, match="acceptance_rate"):
        stopping_speedup(1.2, 4, 0.25)
