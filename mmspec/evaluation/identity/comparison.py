"""Comparison of tokens with a reference: first differences, and whether rounding explains them.

In float32 every difference is an error. In half precision the order of summation can decide a tie, so a
difference is explained if the reference's two largest logits are within 2 ulp (measured: all flips of plain
decoding were at 0 or 1 ulp).

Recurrent layers process a prompt in chunks and later tokens one by one. The two forms round differently, in
float32 too: on assets/scenes-hybrid the same logit differs by up to 66 ulp in float32 (median 6), and by up
to 5 in bfloat16 (tests/reference/test_hybrid_rounding.py). Models with such layers have about twice that as
the limit, since both of the largest logits move.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mmspec.core.statistics import DecodingStats
from mmspec.evaluation.identity.distribution import DistributionTest, SampleTest
from mmspec.evaluation.tables import figures
from mmspec.open_types import Json

__all__ = [
    "Comparison",
    "Difference",
    "Gap",
    "IdentityReport",
    "compare",
    "explained_ulp",
    "first_difference",
    "identity_report",
    "ulp",
]

COMPARISON_COLUMNS = (
    *("mode", "reference", "equal", "explained"),
    *("tokens", "forward\npasses", "accepted", "verdict"),
)
DIFFERENCE_COLUMNS = ("prompt", "at token", "expected", "got", "logit gap", "in ulp", "verdict")
SHOWN_DIFFERENCES = 5
HALF_PRECISIONS = (torch.float16, torch.bfloat16)

Gap = tuple[float, float, float]
"""(largest, second largest, magnitude of the larger of the two) of the logits that decided a token."""


def explained_ulp(dtype: torch.dtype, is_recurrent: bool) -> float:
    """Largest gap in ulp between the two largest logits that rounding explains; 0 if none does."""
    is_half = dtype in HALF_PRECISIONS
    if is_recurrent:
        return 8.0 if is_half else 128.0
    return 2.0 if is_half else 0.0


@dataclass(frozen=True)
class Difference:
    """First difference of an output from its reference.

    Attributes:
        example, position: index of the prompt, and of the output token.
        expected, got: token ids; None if that output had ended.
        gap: distance between the reference's two largest logits there (with the noise, if sampled).
        gap_ulp: the gap in units in the last place of the larger logit, in the model's dtype.
        explained: whether the gap is at most `explained_ulp`, so that rounding can cause the difference.
    """

    example: int
    position: int
    expected: int | None
    got: int | None
    gap: float
    gap_ulp: float
    explained: bool


@dataclass(frozen=True)
class Comparison:
    """Outputs of one decoding mode, compared with their references.

    Attributes:
        mode: "greedy", "sampled", "same noise" or "distribution".
        reference: name of the reference.
        examples, tokens: numbers of compared examples, and of the reference's tokens.
        differences: the first difference of each example that has one.
        stats: statistics of the accelerator over all examples.
        distribution: the result of the test, if distributions were compared instead of tokens.
    """

    mode: str
    reference: str
    examples: int
    tokens: int
    differences: list[Difference]
    stats: DecodingStats
    distribution: DistributionTest | SampleTest | None = None

    @property
    def equal(self) -> int:
        return self.examples - len(self.differences)

    @property
    def explained(self) -> int:
        return sum(difference.explained for difference in self.differences)

    @property
    def passed(self) -> bool:
        """True if every output is equal or explained, and the distribution passed where it was tested."""
        distribution_passed = self.distribution is None or self.distribution.passed
        return distribution_passed and self.equal + self.explained == self.examples


@dataclass(frozen=True)
class IdentityReport:
    """Result of an identity check; `notes` list what was not compared, and why."""

    accelerator: str
    exactness: str
    dtype: str
    device: str
    comparisons: list[Comparison]
    notes: list[str]

    @property
    def passed(self) -> bool:
        """True if the accelerator promises exactness, and every comparison passed."""
        return self.exactness == "exact" and all(comparison.passed for comparison in self.comparisons)

    def as_dict(self) -> Json:
        """The report as a mapping for JSON."""
        comparisons = []
        for one in self.comparisons:
            found = {
                name: value for name, value in vars(one).items() if name != "stats" and value is not None
            }
            found["differences"] = list(map(vars, one.differences))
            if one.distribution is not None:
                found["distribution"] = vars(one.distribution)
            found |= {name: getattr(one, name) for name in ("passed", "equal", "explained")}
            found |= {name: getattr(one.stats, name) for name in ("target_forwards", "acceptance_length")}
            found |= {name: sum(getattr(one.stats, name)) for name in ("accepted", "drafted")}
            comparisons.append(found)
        return {**vars(self), "passed": self.passed, "comparisons": comparisons}


def first_difference(expected: Sequence[int], got: Sequence[int]) -> int | None:
    """Index of the first token that differs, including a different end; None for equal sequences."""
    for index, (one, other) in enumerate(zip(expected, got, strict=False)):
        if one != other:
            return index
    return None if len(expected) == len(got) else min(len(expected), len(got))


def ulp(value: float, dtype: torch.dtype) -> float:
    """The unit in the last place of a number in a dtype: the distance to its neighbour."""
    info = torch.finfo(dtype)
    magnitude = max(abs(value), info.tiny)
    return float(info.eps * 2.0 ** math.floor(math.log2(magnitude)))


def compare(
    mode: str,
    reference: str,
    found: list[tuple[list[int], list[Gap]]],
    outputs: list[list[int]],
    dtype: torch.dtype,
    stats: DecodingStats,
    is_recurrent: bool = False,
) -> Comparison:
    """Compare outputs with their references.

    Args:
        mode, reference: labels of the comparison.
        found: for each example, the reference's token ids and the two largest logits of each step.
        outputs: token ids of the checked outputs, one list per example.
        dtype: the model's dtype.
        stats: statistics of the outputs.
        is_recurrent: whether the model has recurrent layers.
    """
    limit = explained_ulp(dtype, is_recurrent)
    differences = []
    for index, ((expected, gaps), got) in enumerate(zip(found, outputs, strict=True)):
        position = first_difference(expected, got)
        if position is not None:
            # The reference has no logits after its end: such a difference is never explained.
            first, second, magnitude = gaps[position] if position < len(gaps) else (math.inf, 0.0, 1.0)
            units = (first - second) / ulp(magnitude, dtype)
            wanted, given = (row[position] if position < len(row) else None for row in (expected, got))
            explained = limit > 0 and units <= limit
            differences.append(Difference(index, position, wanted, given, first - second, units, explained))
    count = sum(len(expected) for expected, _ in found)
    return Comparison(mode, reference, len(found), count, differences, stats)


def identity_report(
    report: IdentityReport, decode: Callable[[int], str], names: Sequence[str] = ()
) -> RenderableType:
    """Render an identity check as tables, with the first differences as token texts."""
    rows = [
        (
            one.mode,
            one.reference,
            str(one.distribution or f"{one.equal} of {one.examples}"),
            str(one.explained),
            str(one.tokens),
            str(one.stats.target_forwards),
            f"{sum(one.stats.accepted)} of {sum(one.stats.drafted)}",
            Text("passed", "green") if one.passed else Text("FAILED", "bold red"),
        )
        for one in report.comparisons
    ]
    parts: list[RenderableType] = [figures(COMPARISON_COLUMNS, rows, words=2)]
    for one in report.comparisons:
        if one.differences:
            parts.append(_difference_table(one, decode, names))
    parts += [Text(f"note: {note}", style="dim") for note in report.notes]
    verdict, style = ("passed", "bold green") if report.passed else ("FAILED", "bold red")
    said = f"{verdict}: {report.accelerator} ({report.exactness}), {report.dtype} on {report.device}"
    return Group(*parts, Text(said, style))


def _difference_table(comparison: Comparison, decode: Callable[[int], str], names: Sequence[str]) -> Table:
    hidden = len(comparison.differences) - SHOWN_DIFFERENCES
    more = f"; {hidden} more are not shown" if hidden > 0 else ""
    rows = [
        (
            names[one.example] if one.example < len(names) else f"prompt {one.example}",
            str(one.position),
            *(
                "(end)" if token is None else f"{decode(token)!r} ({token})"
                for token in (one.expected, one.got)
            ),
            f"{one.gap:.3g}",
            f"{one.gap_ulp:.3g}",
            "explained" if one.explained else "wrong",
        )
        for one in comparison.differences[:SHOWN_DIFFERENCES]
    ]
    return figures(DIFFERENCE_COLUMNS, rows, title=f"first differences, {comparison.mode}{more}")
