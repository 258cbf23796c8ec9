"""Keys and values rounded to 8 or 4 bits, with the range of every head of every token beside its codes.

The rounding is that of KIVI (2402.02750) and GEAR (2403.05527) along the numbers of a head. Neither KIVI's
groups of tokens nor GEAR's low-rank and sparse corrections are made: so a token is rounded by itself, when it
is written, and stays as it is wherever an accepted path moves it.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["BITS", "RANGE_BYTES", "pack_states", "unpack_states"]

BITS = (8, 4)
RANGE_BYTES = 8  # the smallest number and the step, float32 each


def pack_states(states: Tensor, bits: int) -> Tensor:
    """Round states [.., d] to 2^bits equal steps of their range: bytes [.., d * bits / 8 + 8].

    Args:
        states: finite; d is even.
        bits: 8 or 4.
    """
    exact = states.float()
    least, most = exact.amin(-1, keepdim=True), exact.amax(-1, keepdim=True)
    step = (most - least) / (2**bits - 1)
    codes = ((exact - least) / step.where(step > 0, 1.0)).round().clamp(0, 2**bits - 1).to(torch.uint8)
    if bits == 4:
        codes = codes[..., ::2] | codes[..., 1::2] << 4
    return torch.cat([codes, torch.cat([least, step], -1).view(torch.uint8)], -1)


def unpack_states(packed: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """States [.., d] of bytes that `pack_states` made."""
    codes, bounds = packed[..., :-RANGE_BYTES], packed[..., -RANGE_BYTES:].contiguous().view(torch.float32)
    if bits == 4:
        codes = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)
    least, step = bounds.split(1, -1)
    states: Tensor = (least + step * codes).to(dtype)
    return states
