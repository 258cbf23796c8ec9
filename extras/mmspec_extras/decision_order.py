"""AR-ness: how close the decoding order is to left to right (DiffuCoder, 2506.20639)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mmspec.core.interfaces import Round
from mmspec.core.verdict import Fill
from mmspec.errors import InputError
from mmspec.validation import is_integer

__all__ = ["decision_order", "global_ar_ness", "local_ar_ness"]


def decision_order(rounds: Iterable[Round]) -> list[list[int]]:
    """Return the output indices of each row in the order of their decisions; left to right within a round.

    Args:
        rounds: rounds of one call, as `speculate` yields them. A place that is decided again counts again.
    """
    rows: list[list[int]] = []
    for each in rounds:
        if not isinstance(each.verdict, Fill):
            continue
        rows = rows or [[] for _ in range(len(each.verdict.places))]
        for row, decided in enumerate(each.verdict.decided):
            rows[row] += each.verdict.places[row][decided].sort().values.tolist()
    return rows


def local_ar_ness(order: Sequence[int], k: int = 2) -> float:
    """Return the share of decisions that begin a run of k places from left to right.

    The last k - 1 decisions are not counted.

    Raises:
        InputError: k is not a positive integer.
    """
    check_width(k)
    starts = range(len(order) - k + 1)
    runs = sum(all(order[start + ahead] == order[start] + ahead for ahead in range(k)) for start in starts)
    return runs / len(starts) if starts else 1.0


def global_ar_ness(order: Sequence[int], k: int = 1) -> float:
    """Return the share of decisions for one of the k leftmost open places.

    Raises:
        InputError: k is not a positive integer.
    """
    check_width(k)
    left, hits = sorted(set(order)), 0
    for place in order:
        hits += place in left[:k]
        if place in left:
            left.remove(place)
    return hits / len(order) if order else 1.0


def check_width(k: int) -> None:
    """Raise InputError if k is not a positive integer."""
    if not is_integer(k) or k < 1:
        raise InputError("k", k, "must be a positive integer")
