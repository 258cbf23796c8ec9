"""Compression of blocks of keys or values (2403.05527): codes of few bits, a low-rank residual, outliers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mmspec.errors import InputError

POWER_ITERATIONS = 3


class Packed(NamedTuple):
    """Compressed states of b blocks of n tokens, [b, heads, n, d]; codes of a vector share a range.

    Attributes:
        codes: [b, heads, n, d * bits / 8] uint8.
        low, step: smallest value and distance of the levels of each vector, float16.
        left, right: [b, heads, n, r] and [b, heads, r, d] factors of the residual, float16.
        places, values: uint8 indices and float16 values of the outliers of each vector.
    """

    codes: Tensor
    low: Tensor
    step: Tensor
    left: Tensor
    right: Tensor
    places: Tensor
    values: Tensor

    def followed_by(self, others: Packed) -> Packed:
        """Return these blocks and then `others`."""
        return Packed(*map(torch.cat, zip(self, others, strict=True)))


@dataclass(frozen=True)
class Packing:
    """How keys and values are compressed.

    Args:
        bits: of a code: 2, 4 or 8.
        rank: of the residual of each head; 0 for none.
        outliers: number of smallest, and of largest, values of each vector that are kept; 0 for none.
        block: number n of tokens that are compressed together, a multiple of 8 up to 256.

    Raises:
        InputError: an argument is out of range.
    """

    bits: int = 2
    rank: int = 2
    outliers: int = 1
    block: int = 64

    def __post_init__(self) -> None:
        if self.bits not in (2, 4, 8):
            raise InputError("bits", self.bits, "must be 2, 4 or 8")
        if self.block not in range(8, 257, 8):
            raise InputError("block", self.block, "must be a multiple of 8 between 8 and 256")
        for name in ("rank", "outliers"):
            if not 0 <= (given := getattr(self, name)) < self.block // 2:
                raise InputError(
                    name, given, f"must be at least 0, and below {self.block // 2}, half a block"
                )

    def shifts(self, device: torch.device) -> Tensor:
        """Position of each code in its byte."""
        return torch.arange(0, 8, self.bits, dtype=torch.uint8, device=device)

    def pack(self, states: Tensor, along: int) -> Packed:
        """Compress blocks [b, heads, n, d], whose vectors lie along dimension 2 (keys) or 3 (values)."""
        states, top, count = states.float(), 2**self.bits - 1, self.outliers
        ranked, order = states.sort(dim=along, stable=True)
        last = states.shape[along] - count
        low = ranked.narrow(along, count, 1).half()
        step = ((ranked.narrow(along, last - 1, 1) - low) / top).half()
        codes = ((states - low) / step.float().clamp_min(1e-7)).round().clamp(0, top)
        places = torch.cat([order.narrow(along, 0, count), order.narrow(along, last, count)], along)
        left, right = low_rank((states - low - step * codes).scatter(along, places, 0.0), self.rank)
        apart = codes.to(torch.uint8).unflatten(-1, (-1, 8 // self.bits)) << self.shifts(states.device)
        values = states.gather(along, places).half()
        joined = apart.sum(-1, dtype=torch.uint8)
        return Packed(joined, low, step, left.half(), right.half(), places.to(torch.uint8), values)

    def unpack(self, packed: Packed, along: int, dtype: torch.dtype) -> Tensor:
        """Return the blocks [b, heads, n, d] that `packed` approximates."""
        codes = packed.codes[..., None] >> self.shifts(packed.codes.device) & 2**self.bits - 1
        states: Tensor = packed.low.float() + packed.step.float() * codes.flatten(-2)
        states += packed.left.float() @ packed.right.float()
        return states.scatter_(along, packed.places.long(), packed.values.float()).to(dtype)


def low_rank(residual: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Factors [..., n, r] and [..., r, d] of matrices [..., n, d], by power iteration from a fixed start."""
    noise = torch.Generator().manual_seed(0)
    right = torch.randn(residual.shape[-1], rank, generator=noise, dtype=torch.float32, device="cpu")
    right = right.to(residual.device).expand(*residual.shape[:-2], -1, -1)
    for _ in range(POWER_ITERATIONS):
        left = torch.linalg.qr(residual @ right)[0]
        right = residual.mT @ left
    return left, right.mT
