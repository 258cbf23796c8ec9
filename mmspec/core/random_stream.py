"""Counter-based random numbers, keyed by (seed, row, position, purpose, step) and never drawn in sequence.

A row's numbers do not depend on other rows, on the number of rounds, or on earlier draws. A batch therefore
equals its rows decoded alone, and speculative sampling can equal plain sampling bit for bit. The generator is
Philox4x32-10 (Salmon et al., SC 2011), in `mmspec.kernels`.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mmspec.core.rows import Rows, named
from mmspec.errors import InputError
from mmspec.kernels import philox4x32, philox_gumbel, philox_uniform
from mmspec.validation import is_integer, plain_numbers

MAX_SEED = 2**64


class Purpose(enum.IntEnum):
    """Purpose of a random number. No two purposes share the numbers of one (seed, position)."""

    TARGET = 0
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3
    REDRAW = 4
    RETRY = 5
    ORDER = 6
    ROW_KEY = 7


@dataclass(frozen=True)
class RandomStream(Rows):
    """Random numbers of a batch.

    Attributes:
        keys: [B, 2] the rows' Philox keys, uint32 words in int64.
        round: index of the round, [B, 1] if on the device, for draws from a residual distribution that may
            take several rounds.
        step: distinguishes repeated draws for one position, as in Jacobi windows and open places of masked
            models; [B, 1] where rows differ. Acceptance rules verify a place once and need no step, except
            rules that verify a draft as a whole, whose step is the place after its root. The target's own
            noise has no step.
    """

    row_fields = named("keys")

    keys: Tensor
    step: int | Tensor = 0
    round: int | Tensor = 0

    @classmethod
    def from_seed(
        cls, seed: int | Sequence[int], rows: int, device: torch.device | str = "cpu"
    ) -> RandomStream:
        """Derive the keys of a batch: row i of an integer seed, or row 0 of each seed of a list.

        A list reproduces single calls: `seed=[3, 5]` gives the rows that `seed=3` and `seed=5` give alone.

        Raises:
            InputError: a seed outside [0, 2^64), or a list whose length is not the batch size.
        """
        seed = plain_numbers(seed)
        seeds = list(seed) if isinstance(seed, Sequence) else [seed] * rows
        if len(seeds) != rows:
            raise InputError(
                "seed", seeds, f"must be one integer, or a list with one for each of the {rows} rows"
            )
        for value in seeds:
            if not is_integer(value) or not 0 <= value < MAX_SEED:
                raise InputError("seed", value, "must be an integer from 0 to 2**64 - 1")
        index = range(rows) if isinstance(seed, int) else [0] * rows
        counters = [[row, 0, Purpose.ROW_KEY, 0] for row in index]
        keys = [[value & 0xFFFFFFFF, value >> 32] for value in seeds]
        both = [[*counter, *key] for counter, key in zip(counters, keys, strict=True)]
        words = torch.tensor(both, dtype=torch.long, device="cpu").reshape(rows, 6)
        return cls(philox4x32(words[:, :4], words[:, 4:])[:, :2].to(device))

    def repeat(self, rows: int) -> RandomStream:
        """Return the stream of a batch that repeats each row rows / B times in succession."""
        copies = rows // max(len(self.keys), 1)
        return self if copies == 1 else replace(self, keys=self.keys.repeat_interleave(copies, 0))

    def during(self, round: int | Tensor) -> RandomStream:
        """Return the stream of the same rows in the given round."""
        return replace(self, round=round)

    def at(self, step: int | Tensor) -> RandomStream:
        """Return the stream of the same rows at another step."""
        return replace(self, step=step)

    def uniform(self, position: Tensor, purpose: Purpose | Tensor, count: int, dtype: torch.dtype) -> Tensor:
        """[B, m] positions -> [B, m, count] uniforms in (0, 1); `purpose` may be a tensor [B, m]."""
        return philox_uniform(self.keys, position, purpose, count, self.step_of(purpose), dtype)

    def gumbel(self, position: Tensor, purpose: Purpose | Tensor, count: int, dtype: torch.dtype) -> Tensor:
        """[B, m] positions -> [B, m, count] standard Gumbel numbers; `purpose` may be a tensor [B, m]."""
        return philox_gumbel(self.keys, position, purpose, count, self.step_of(purpose), dtype)

    def normal(self, position: Tensor, purpose: Purpose | Tensor, count: int, dtype: torch.dtype) -> Tensor:
        """[B, m] positions -> [B, m, count] standard normal numbers."""
        return box_muller(self.uniform(position, purpose, 2 * count, dtype))

    def step_of(self, purpose: Purpose | Tensor) -> int | Tensor:
        """The step in the key of a purpose's numbers."""
        if isinstance(purpose, Tensor):
            return self.step * purpose.ne(Purpose.TARGET)
        return {Purpose.TARGET: 0, Purpose.RETRY: self.round}.get(purpose, self.step)


def draw_seed(generator: torch.Generator | None = None) -> int:
    """Draw a seed from a generator; if None, from torch's global one, which `torch.manual_seed` sets."""
    device = "cpu" if generator is None else generator.device
    return int(torch.randint(2**62, (), generator=generator, device=device))


def box_muller(u: Tensor) -> Tensor:
    """Transform uniforms [..., 2 n] to standard normal numbers [..., n] (Box and Muller, 1958)."""
    radius, angle = u.chunk(2, -1)
    return (-2 * radius.log()).sqrt() * (2 * math.pi * angle).cos()
