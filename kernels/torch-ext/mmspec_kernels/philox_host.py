"""Philox4x32-10 in numpy, for the CPU: a tenth of a call's time goes to the calls of small arrays.

NumPy multiplies unsigned integers of 64 bits, which torch does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

ROUNDS = 10
WORD, HALF_WORD = np.uint64(0xFFFFFFFF), np.uint64(32)
MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
KEY_INCREMENTS = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
LARGEST_FLOAT32_BELOW_ONE = 1 - 2**-24


def encrypt_on_host(counters: Sequence[Tensor], key: Tensor) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """Encrypt counters: four random words for each four counter words.

    Args:
        counters: four int64 tensors [...] holding uint32 words, which broadcast with one another.
        key: [..., 2] int64 holding uint32 words; the leading dimensions broadcast with the counters.

    Returns:
        [..., 4] words.
    """
    c0, c1, c2, c3, k0, k1 = (each.numpy().astype(np.uint64) & WORD for each in (*counters, *key.unbind(-1)))
    for _ in range(ROUNDS):
        even, odd = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1 = (odd >> HALF_WORD) ^ c1 ^ k0, odd & WORD
        c2, c3 = (even >> HALF_WORD) ^ c3 ^ k1, even & WORD
        k0, k1 = (k0 + KEY_INCREMENTS[0]) & WORD, (k1 + KEY_INCREMENTS[1]) & WORD
    words = np.empty((*c0.shape, 4), np.uint32)  # each word depends on all counter words by now
    for place, word in enumerate((c0, c1, c2, c3)):
        words[..., place] = word
    return words


def uniforms_on_host(counters: Sequence[Tensor], key: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Turn words into uniforms strictly between 0 and 1, with 24 random bits each.

    Args:
        counters, key: as of `encrypt_on_host`; [..., blocks] together.
        count: uniforms in the last dimension, at most 4 for each block.
        dtype: float32 or float64.

    Returns:
        [..., count].
    """
    is_single = dtype == torch.float32
    words = encrypt_on_host(counters, key) >> 8
    uniform = words.reshape(*words.shape[:-2], 4 * words.shape[-2])[..., :count].astype(
        np.float32 if is_single else np.float64
    )
    uniform *= 2**-24
    uniform += 2**-25
    if is_single:  # 1 - 2^-25 is halfway between two float32 numbers, and would round to 1
        np.minimum(uniform, LARGEST_FLOAT32_BELOW_ONE, out=uniform)
    return torch.from_numpy(uniform)
