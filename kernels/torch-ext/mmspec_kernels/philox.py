"""Random numbers without a state: Philox4x32-10 (Salmon et al., SC 2011) over explicit counters.

A number is a function of (key, element, position, stream, step) alone, so it does not depend on who else
is in the batch, on the order of drawing, or on the device. The caller says what a stream is for.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from .backend import operator, use_triton
from .philox_host import (
    KEY_INCREMENTS,
    LARGEST_FLOAT32_BELOW_ONE,
    MULTIPLIERS,
    ROUNDS,
    WORD,
    encrypt_on_host,
    uniforms_on_host,
)

HALF = 1 << 31


def _fake_words(counters: Tensor, key: Tensor) -> Tensor:
    leading = torch.broadcast_shapes(counters.shape[:-1], key.shape[:-1])
    return counters.new_empty(*leading, 4)


@operator(fake=_fake_words)
def philox4x32(counters: Tensor, key: Tensor) -> Tensor:
    """Encrypt counters: four random words for each four counter words.

    Args:
        counters: [..., 4] int64 holding uint32 words.
        key: [..., 2] int64 holding uint32 words; the leading dimensions of the two broadcast.

    Returns:
        [..., 4] int64 holding uint32 words.
    """
    if use_triton(counters.device):
        from .philox_triton import philox4x32_triton

        return philox4x32_triton(counters, key)
    if counters.device.type == "cpu":
        return encrypt_on_host(counters.unbind(-1), key)
    return _encrypt_in_torch(counters.unbind(-1), key)


def philox_uniform(
    key: Tensor,
    position: Tensor,
    stream: int | Tensor,
    count: int,
    step: int | Tensor = 0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Uniforms strictly between 0 and 1, with 24 random bits each.

    Element v is output word v % 4 of the counter (v // 4, position, stream, step).

    Args:
        key: [B, 2] int64 holding uint32 words, one key for each request.
        position: [B, n] int64, absolute token positions.
        stream: what the numbers are for; an integer, or a tensor that broadcasts to [B, n].
        count: how many numbers at each position.
        step: a further counter, for retries; an integer, or a tensor that broadcasts to [B, n].
        dtype: float32 or float64; the latter holds the same numbers before rounding.

    Returns:
        [B, n, count] of `dtype`.

    Raises:
        ValueError: another dtype, in which some uniforms would round to 0 or 1.
    """
    return uniforms(key, position, counter_word(stream, position), counter_word(step, position), count, dtype)


def counter_word(value: int | Tensor, position: Tensor) -> Tensor:
    """A counter word that broadcasts to [B, n]; an integer is filled in on the device, without a copy."""
    return value if isinstance(value, Tensor) else position.new_full((1, 1), value)


def _fake_uniforms(
    key: Tensor, position: Tensor, stream: Tensor, step: Tensor, count: int, dtype: torch.dtype
) -> Tensor:
    return position.new_empty(*position.shape, count, dtype=dtype)


@operator(fake=_fake_uniforms)
def uniforms(
    key: Tensor, position: Tensor, stream: Tensor, step: Tensor, count: int, dtype: torch.dtype
) -> Tensor:
    """As `philox_uniform`, with a tensor for the stream and for the step."""
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"dtype: got {dtype}; allowed: torch.float32, torch.float64")
    if use_triton(position.device):
        from .philox_triton import philox_uniform_triton

        return philox_uniform_triton(key, position, stream, step, count, dtype)
    block = torch.arange(-(-count // 4), device=position.device)
    counters = block, position[..., None], stream[..., None], step[..., None]
    form = uniforms_on_host if position.device.type == "cpu" else _uniforms_in_torch
    return form(counters, key[:, None, None], count, dtype)


def philox_gumbel(
    key: Tensor,
    position: Tensor,
    stream: int | Tensor,
    count: int,
    step: int | Tensor = 0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Standard Gumbel noise: -log E of the exponential E = -log(1 - u), for the uniforms of `philox_uniform`.

    The argmax of log-probabilities plus this noise is a draw from them. Arguments, shapes and errors
    are those of `philox_uniform`.
    """
    uniform = philox_uniform(key, position, stream, count, step, dtype)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _uniforms_in_torch(counters: Sequence[Tensor], key: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """`uniforms_on_host` on any device."""
    bits = (_encrypt_in_torch(counters, key) >> 8).flatten(-2)[..., :count]
    uniform = bits.to(dtype).mul_(2**-24).add_(2**-25)
    return uniform.clamp_(max=LARGEST_FLOAT32_BELOW_ONE) if dtype == torch.float32 else uniform


def _encrypt_in_torch(counters: Sequence[Tensor], key: Tensor) -> Tensor:
    """`encrypt_on_host` on any device; the words are int64."""
    c0, c1, c2, c3, key0, key1 = torch.broadcast_tensors(*counters, *key.unbind(-1))
    even, odd = torch.stack((c0, c2)) & WORD, torch.stack((c1, c3)) & WORD
    key = torch.stack((key0, key1))
    shape = (2, *[1] * c0.dim())
    multipliers, high_offset, half, increments = _constants(key.device)
    multipliers, high_offset = multipliers.view(shape), high_offset.view(shape)
    for round_key in (key + increments.view(ROUNDS, *shape)) & WORD:
        # An unsigned 32 x 32 bit product overflows int64, so one factor is centred. For an odd multiplier m,
        # x m = ((x - 2^31) m + 2^31) + 2^32 (m >> 1): the bracket fits, and its low word is that of x m.
        product = torch.addcmul(half, even - HALF, multipliers).flip(0)
        even = ((product >> 32) + high_offset) ^ odd ^ round_key
        odd = product & WORD
    return torch.stack((even[0], odd[0], even[1], odd[1]), -1)


@functools.cache  # a constant built on the host in every call would be a copy that CUDA graphs cannot hold
def _constants(device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Multipliers [2], their halves in swapped order [2], 2^31 [], and key increments [10, 2]."""
    multipliers = torch.tensor(MULTIPLIERS, device=device)
    increments = torch.tensor(KEY_INCREMENTS, device=device)
    steps = torch.arange(ROUNDS, device=device)[:, None]
    return multipliers, (multipliers >> 1).flip(0), torch.tensor(HALF, device=device), steps * increments
