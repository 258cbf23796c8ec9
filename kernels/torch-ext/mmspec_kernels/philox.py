"""Counter-based random numbers: Philox4x32-10 (Salmon et al., SC 2011) with explicit counters.

A number is a function of (key, element, position, stream, step) alone. It does not depend on the other rows
of the batch, on the order of drawing, or on the device. The caller assigns the streams.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .backend import INTERPRETED, launcher, libdevice, operator, tl, triton, use_triton

ROUNDS = 10
WORD = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)  # of counter words 0 and 2
KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
LARGEST_FLOAT32_BELOW_ONE = 1 - 2**-24
HALF = 1 << 31
BLOCK = 128  # counters per program
IN_INTERPRETER = tl.constexpr(INTERPRETED)


def _fake_words(counters: Tensor, key: Tensor) -> Tensor:
    leading = torch.broadcast_shapes(counters.shape[:-1], key.shape[:-1])
    return counters.new_empty(*leading, 4)


@operator(fake=_fake_words)
def philox4x32(counters: Tensor, key: Tensor) -> Tensor:
    """Encrypt counters: four random words for every four counter words.

    Args:
        counters: [..., 4] int64 holding uint32 words.
        key: [..., 2] int64 holding uint32 words; the leading dimensions of the two broadcast.

    Returns:
        [..., 4] int64 holding uint32 words.
    """
    if use_triton(counters.device):
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
        key: [B, 2] int64 holding uint32 words, one key per request.
        position: [B, n] int64, absolute token positions.
        stream: purpose of the numbers; an integer, or a tensor that broadcasts to [B, n].
        count: number of uniforms per position.
        step: a further counter, for retries; an integer, or a tensor that broadcasts to [B, n].
        dtype: float32 or float64; float64 gives the same numbers before rounding.

    Returns:
        [B, n, count] of `dtype`.

    Raises:
        ValueError: another dtype is given, in which some uniforms would round to 0 or 1.
    """
    return uniforms(key, position, counter_word(stream, position), counter_word(step, position), count, dtype)


def counter_word(value: int | Tensor, position: Tensor) -> Tensor:
    """Return a counter word that broadcasts to [B, n]; an integer becomes a tensor without a host copy."""
    return value if isinstance(value, Tensor) else position.new_full((1, 1), value)


def _fake_uniforms(
    key: Tensor, position: Tensor, stream: Tensor, step: Tensor, count: int, dtype: torch.dtype
) -> Tensor:
    return position.new_empty(*position.shape, count, dtype=dtype)


@operator(fake=_fake_uniforms)
def uniforms(
    key: Tensor, position: Tensor, stream: Tensor, step: Tensor, count: int, dtype: torch.dtype
) -> Tensor:
    """Like `philox_uniform`, with tensors for stream and step."""
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"dtype must be torch.float32 or torch.float64; got {dtype}")
    if use_triton(position.device):
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

    The argmax of log-probabilities plus this noise is a draw from the distribution (Gumbel-max trick).
    Arguments, shapes and errors are those of `philox_uniform`.
    """
    uniform = philox_uniform(key, position, stream, count, step, dtype)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def encrypt_on_host(counters: Sequence[Tensor], key: Tensor) -> Tensor:
    """`philox4x32` in NumPy, for CPU tensors.

    Unlike torch, NumPy multiplies unsigned 64-bit integers, and its calls on small arrays cost a fraction.

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
    result = torch.empty(
        (*c0.shape, 4), dtype=torch.int64, device="cpu"
    )  # each word depends on all counter words by now
    array = result.numpy()
    for place, word in enumerate((c0, c1, c2, c3)):
        array[..., place] = word
    return result


def uniforms_on_host(counters: Sequence[Tensor], key: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Uniforms strictly between 0 and 1, with 24 random bits each, in NumPy.

    Args:
        counters, key: see `encrypt_on_host`; they broadcast to [..., blocks].
        count: uniforms in the last dimension, at most 4 per block.
        dtype: float32 or float64.

    Returns:
        [..., count].
    """
    words = encrypt_on_host(counters, key)
    result = torch.empty(*words.shape[:-2], count, dtype=dtype, device="cpu")
    array: Any = result.numpy()
    array[...] = (words.flatten(-2)[..., :count].numpy()) >> 8
    array *= 2**-24
    array += 2**-25
    if dtype == torch.float32:  # 1 - 2^-25 is halfway between two float32 numbers, and would round to 1
        array.clip(max=LARGEST_FLOAT32_BELOW_ONE, out=array)
    return result


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


@functools.cache  # CUDA graphs cannot capture the copies of constants from the host
def _constants(device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Multipliers [2], their halves in swapped order [2], 2^31 [], and key increments [10, 2]."""
    multipliers = torch.tensor(MULTIPLIERS, device=device)
    increments = torch.tensor(KEY_INCREMENTS, device=device)
    steps = torch.arange(ROUNDS, device=device)[:, None]
    return multipliers, (multipliers >> 1).flip(0), torch.tensor(HALF, device=device), steps * increments


@launcher
def philox4x32_triton(counters: Tensor, key: Tensor) -> Tensor:
    """Launch `philox4x32`: counters [..., 4], key [..., 2], both int64 -> [..., 4] int64."""
    leading = torch.broadcast_shapes(counters.shape[:-1], key.shape[:-1])
    counters = counters.expand(*leading, 4).contiguous()
    out = torch.empty_like(counters)
    size = leading.numel()
    if size:
        grid = (triton.cdiv(size, BLOCK),)
        _words_kernel[grid](counters, key.expand(*leading, 2).contiguous(), out, size, BLOCK=BLOCK)
    return out


@launcher
def philox_uniform_triton(
    key: Tensor, position: Tensor, stream: Tensor, step: Tensor, count: int, dtype: torch.dtype
) -> Tensor:
    """Launch `uniforms`: key [B, 2], position [B, n], stream and step of shapes that broadcast to it."""
    out = torch.empty(*position.shape, count, dtype=dtype, device=position.device)
    if out.numel():
        grid = (position.numel(), triton.cdiv(count, 4 * BLOCK))
        key, position, stream, step = (
            each.contiguous()
            for each in (key, position, stream.expand_as(position), step.expand_as(position))
        )
        _uniform_kernel[grid](key, position, stream, step, out, position.shape[1], count, BLOCK=BLOCK)
    return out


@triton.jit
def encrypt(key_ptr, c0, c1, c2, c3):
    """Philox words of counters under the key at `key_ptr`, which is two int64."""
    seed = (tl.load(key_ptr + 1).to(tl.uint64) << 32) | (tl.load(key_ptr).to(tl.uint64) & 0xFFFFFFFF)
    # int64 counters would silently select the 64-bit variant of the generator, hence the casts.
    return tl.philox(seed, c0.to(tl.uint32), c1.to(tl.uint32), c2.to(tl.uint32), c3.to(tl.uint32))


@triton.jit
def _words_kernel(counters_ptr, key_ptr, out_ptr, size, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    index = tl.minimum(index, size - 1)  # the last program writes its last row several times
    counter = counters_ptr + 4 * index
    w0, w1, w2, w3 = encrypt(
        key_ptr + 2 * index,
        tl.load(counter),
        tl.load(counter + 1),
        tl.load(counter + 2),
        tl.load(counter + 3),
    )
    out = out_ptr + 4 * index
    tl.store(out, w0.to(tl.int64))
    tl.store(out + 1, w1.to(tl.int64))
    tl.store(out + 2, w2.to(tl.int64))
    tl.store(out + 3, w3.to(tl.int64))


@triton.jit
def _store_uniform(out_ptr, element, count, word):
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    value = (word >> 8).to(dtype) * 5.9604644775390625e-08 + 2.98023223876953125e-08  # 2^-24, 2^-25
    if dtype == tl.float32:
        value = tl.minimum(value, 0.999999940395355224609375)  # 1 - 2^-24: the sum may have rounded to 1
    tl.store(out_ptr + element, value, mask=element < count)


@triton.jit
def _uniform_kernel(key_ptr, position_ptr, stream_ptr, step_ptr, out_ptr, nodes, count, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)  # of [B * n]
    block = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    w0, w1, w2, w3 = encrypt(
        key_ptr + row // nodes * 2,
        block,
        tl.load(position_ptr + row),
        tl.load(stream_ptr + row),
        tl.load(step_ptr + row),
    )
    out_ptr += row * count
    _store_uniform(out_ptr, 4 * block, count, w0)
    _store_uniform(out_ptr, 4 * block + 1, count, w1)
    _store_uniform(out_ptr, 4 * block + 2, count, w2)
    _store_uniform(out_ptr, 4 * block + 3, count, w3)


@triton.jit
def _gumbel(word):
    """Standard Gumbel noise of `philox_gumbel`, -log(-log1p(-u)), by the functions that torch calls."""
    u = (word >> 8).to(tl.float32) * 5.9604644775390625e-08 + 2.98023223876953125e-08  # 2^-24, 2^-25
    u = tl.minimum(u, 0.999999940395355224609375)  # 1 - 2^-24: the sum may have rounded to 1
    if IN_INTERPRETER:  # which has no log1p: the last bits differ there
        series = u * (1 + u * (0.5 + u * (1 / 3 + u * (0.25 + u * (0.2 + u * (1 / 6))))))
        exponential = tl.where(u < 0.05, series, -tl.log(1 - u))
    else:
        exponential = -libdevice.log1p(-u)
    return -tl.log(exponential)


@triton.jit
def gumbel_tile(key_ptr, position, stream, step, start, SIZE: tl.constexpr):
    """Noise of the elements start, start + 1, ..., four to a counter; start is a multiple of 4."""
    counter = start // 4 + tl.arange(0, SIZE // 4)
    w0, w1, w2, w3 = encrypt(key_ptr, counter, position, stream, step)
    return _gumbel(tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3)))
