"""Cost models of speculation: one whose passes are fixed in advance, and that of stopping at a rejection.

CSpD as it was released (2411.11925) replaces refused tokens in place and goes on, so that the number of
passes does not depend on acceptance. Two constants then describe its speed, and its published speed-ups.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from mmspec.errors import InputError
from mmspec.validation import check_draft_tokens, require_number

__all__ = ["FixedSchedule", "stopping_speedup"]


@dataclass(frozen=True)
class FixedSchedule:
    """Cost of decoding in blocks that are always drafted, verified and kept as a whole.

    Times are in units of a step of the target: 1 / speedup = r + (1 - r) (c + v / gamma), for drafts of gamma
    tokens.

    Attributes:
        draft_step: c, a step of the draft model.
        verification: v, the target's pass over one block.
        prefill: r, the share of the tokens that the target decides alone.

    Raises:
        InputError: a value outside its range.
    """

    draft_step: float
    verification: float
    prefill: float = 0.05

    def __post_init__(self) -> None:
        require_number("draft_step", self.draft_step, 0.0, 1e4, "0 or more")
        require_number("verification", self.verification, 0.0, 1e4, "0 or more")
        require_number("prefill", self.prefill, 0.0, 1.0, "0 to 1")

    @classmethod
    def fitted(cls, speedups: Mapping[int, float], prefill: float = 0.05) -> FixedSchedule:
        """Fit c and v to measured speed-ups, by least squares of the time.

        Args:
            speedups: of several numbers of draft tokens.
            prefill: r.

        Raises:
            InputError: fewer than two numbers of draft tokens, a number outside its range, or speed-ups that
                only a negative c or v would give.
        """
        if len(speedups) < 2:
            raise InputError("speedups", dict(speedups), "those of at least two numbers of draft tokens")
        require_number("prefill", prefill, 0.0, 0.99, "0 to 0.99")
        for length, value in speedups.items():
            check_draft_tokens(length)
            require_number("speedups", value, 0.0, 1e4, "above 0", open_below=True)
        blocks = (1 / np.array(list(speedups.values())) - prefill) / (1 - prefill)
        columns = np.stack([np.ones(len(speedups)), 1 / np.array(list(speedups))], 1)
        (draft_step, verification), *_ = np.linalg.lstsq(columns, blocks, rcond=None)
        return cls(float(draft_step), float(verification), prefill)

    def speedup(self, num_draft_tokens: int) -> float:
        """Speed-up of drafts of that length over a step of the target for every token."""
        block = self.draft_step + self.verification / check_draft_tokens(num_draft_tokens)
        return 1 / (self.prefill + (1 - self.prefill) * block)

    def largest_error(self, speedups: Mapping[int, float]) -> float:
        """Largest relative error of a measured speed-up."""
        return max(abs(self.speedup(length) / value - 1) for length, value in speedups.items())


def stopping_speedup(acceptance_rate: float, num_draft_tokens: int, draft_step: float) -> float:
    """Speed-up where each round ends at its first rejection (2211.17192, theorem 3.8).

    (1 - alpha^(gamma + 1)) / ((1 - alpha) (c gamma + 1)), with alpha the acceptance rate and c the time of a
    draft step in units of a step of the target.

    Raises:
        InputError: an acceptance rate outside [0, 1], a negative time, or an impossible number of tokens.
    """
    require_number("acceptance_rate", acceptance_rate, 0.0, 1.0, "0 to 1")
    require_number("draft_step", draft_step, 0.0, 1e4, "0 or more")
    tokens = sum(acceptance_rate**depth for depth in range(check_draft_tokens(num_draft_tokens) + 1))
    return tokens / (draft_step * num_draft_tokens + 1)
