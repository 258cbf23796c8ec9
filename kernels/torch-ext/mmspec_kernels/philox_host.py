"""Philox4x32-10 for the CPU, in NumPy by way of `Tensor.numpy`.

NumPy multiplies unsigned integers of 64 bits, which torch does not, and a call with a small array costs it a
fraction of torch's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

ROUNDS = 10
WORD = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)  # of counter words 0 and 2
KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
LARGEST_FLOAT32_BELOW_ONE = 1 - 2**-24


def encrypt_on_host(counters: Sequence[Tensor], key: Tensor) -> Tensor:
    """Encrypt counters: four random words for each four counter words.

    Args:
        counters: four int64 tensors [...] holding uint32 words, which broadcast with one another.
        key: [..., 2] int64 holding uint32 words; the leading dimensions broadcast with the counters.

    Returns:
        [..., 4] int64 holding uint32 words.
    """
    words: Sequence[Any] = (*counters, *key.unbind(-1))
    c0, c1, c2, c3, k0, k1 = (each.numpy().astype("uint64") & WORD for each in words)
    for _ in range(ROUNDS):
        even, odd = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1 = (odd >> 32) ^ c1 ^ k0, odd & WORD
        c2, c3 = (even >> 32) ^ c3 ^ k1, even & WORD
        k0, k1 = (k0 + KEY_INCREMENTS[0]) & WORD, (k1 + KEY_INCREMENTS[1]) & WORD
    result = torch.empty((*c0.shape, 4), dtype=torch.int64)  # each word depends on all counter words by now
    array = result.numpy()
    for place, word in enumerate((c0, c1, c2, c3)):
        array[..., place] = word
    return result


def uniforms_on_host(counters: Sequence[Tensor], key: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Turn words into uniforms strictly between 0 and 1, with 24 random bits each.

    Args:
        counters, key: as of `encrypt_on_host`; [..., blocks] together.
        count: uniforms in the last dimension, at most 4 for each block.
        dtype: float32 or float64.

    Returns:
        [..., count].
    """
    words = encrypt_on_host(counters, key)
    result = torch.empty(*words.shape[:-2], count, dtype=dtype)
    array: Any = result.numpy()
    array[...] = (words.flatten(-2)[..., :count].numpy()) >> 8
    array *= 2**-24
    array += 2**-25
    if dtype == torch.float32:  # 1 - 2^-25 is halfway between two float32 numbers, and would round to 1
        array.clip(max=LARGEST_FLOAT32_BELOW_ONE, out=array)
    return result
