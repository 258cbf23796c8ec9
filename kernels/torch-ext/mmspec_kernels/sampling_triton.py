"""Triton kernels of `sampling.py` and their launchers.

A row of up to `RESIDENT` tokens stays in the registers of one program. Longer rows are processed in tiles, by
several kernels with a workspace. Thresholds are found by bisection on the bits of the logits, without a sort.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from .backend import launcher, rows_together, tl, triton
from .philox import gumbel_tile
from .sampling import CACHED_SETTINGS, Warping, held

RESIDENT = 8192  # longest row that one program holds; 16,384 would spill registers
TILE = 4096  # tokens per program in longer rows
COUNTS = ("batch", "rows", "settings_rows", "nodes", "places")  # arguments that vary between calls
NEG_INF = tl.constexpr(float("-inf"))
INF = tl.constexpr(float("inf"))


@triton.jit
def _ordered(x):
    """Map floats to unsigned integers of the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)


@triton.jit
def _float_of(ordered):
    bits = ordered.to(tl.int32, bitcast=True)
    return (bits ^ (~(bits >> 31) | -2147483648)).to(tl.float32, bitcast=True)


@triton.jit
def _settings(settings_ptr, row, rows):
    """Guidance scale, temperature, k, 1 - top_p and log min_p of a row; [5, rows]."""
    at = settings_ptr + row
    return (
        tl.load(at),
        tl.load(at + rows),
        tl.load(at + 2 * rows),
        tl.load(at + 3 * rows),
        tl.load(at + 4 * rows),
    )


@triton.jit
def _guide(c, u, c_top, c_sum, u_top, u_sum, scale):
    """Guide log-probabilities, u + s (c - u); return the unchanged logits c if s is 1."""
    log_c, log_u = c - c_top - tl.log(c_sum), u - u_top - tl.log(u_sum)
    guided = tl.where(log_c == NEG_INF, NEG_INF, log_u + scale * (log_c - log_u))
    return tl.where(scale == 1.0, c, guided)


@triton.jit
def _count(x, row_ptr, size, low, high, last, BLOCK: tl.constexpr, HELD: tl.constexpr):
    """Number of elements before index `last` whose order is within two bounds, both included."""
    if HELD:
        ordered = _ordered(x)
        inside = (ordered >= low) & (ordered <= high) & (tl.arange(0, BLOCK) < last)
        found = inside.to(tl.int32)
    else:
        found = tl.zeros((BLOCK,), tl.int32)
        for start in range(0, size, BLOCK):
            index = start + tl.arange(0, BLOCK)
            ordered = _ordered(tl.load(row_ptr + index, mask=index < size, other=NEG_INF))
            found += ((ordered >= low) & (ordered <= high) & (index < last)).to(tl.int32)
    return tl.sum(found)


@triton.jit
def _mass(x, row_ptr, size, top, floor, high, BLOCK: tl.constexpr, HELD: tl.constexpr):
    """Sum of exp(x - top) over the elements of at least `floor` whose order is below a bound."""
    if HELD:
        mass = tl.where((x >= floor) & (_ordered(x) < high), tl.exp(x - top), 0.0)
    else:
        mass = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, size, BLOCK):
            index = start + tl.arange(0, BLOCK)
            tile = tl.load(row_ptr + index, mask=index < size, other=NEG_INF)
            mass += tl.where((tile >= floor) & (_ordered(tile) < high), tl.exp(tile - top), 0.0)
    return tl.sum(mass)


@triton.jit
def _cut(
    x,
    row_ptr,
    size,
    top,
    k,
    tail,
    log_min_p,
    BLOCK: tl.constexpr,
    HELD: tl.constexpr,
    INDEX_BITS: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
):
    """Find (value, index): a token stays if it is above the value, or equals it from the index on."""
    highest = tl.full((), 0xFFFFFFFF, tl.uint32)
    value = tl.full((), NEG_INF, tl.float32)
    index = tl.full((), 0, tl.int32)
    if TOP_K:
        threshold, bit = tl.full((), 0, tl.uint32), tl.full((), 0x80000000, tl.uint32)
        for _ in range(32):  # the largest threshold that k logits reach is the k-th largest logit
            reached = _count(x, row_ptr, size, threshold | bit, highest, size, BLOCK, HELD)
            threshold = tl.where(reached >= k, threshold | bit, threshold)
            bit = bit >> 1
        value = tl.where(k < size, _float_of(threshold), value)
    if TOP_P:
        bound = tail * _mass(x, row_ptr, size, top, value, highest, BLOCK, HELD)
        threshold, bit = tl.full((), 0, tl.uint32), tl.full((), 0x80000000, tl.uint32)
        for _ in range(32):  # the largest threshold with at most the tail's mass below it
            below = _mass(x, row_ptr, size, top, value, threshold | bit, BLOCK, HELD)
            threshold = tl.where(below <= bound, threshold | bit, threshold)
            bit = bit >> 1
        threshold = tl.minimum(threshold, _ordered(top))
        edge = _float_of(threshold)
        # drop the first of the ties at the edge, as far as they are in the tail, but never all
        below = _mass(x, row_ptr, size, top, value, threshold, BLOCK, HELD)
        equals = _count(x, row_ptr, size, threshold, threshold, size, BLOCK, HELD)
        surplus = tl.minimum((bound - below) / tl.exp(edge - top), equals - 1).to(tl.int32)
        surplus = tl.where(tail >= 0.0, surplus, 0)
        if surplus > 0:
            step = tl.full((), 1 << (INDEX_BITS - 1), tl.int32)
            for _ in range(INDEX_BITS):
                before = _count(x, row_ptr, size, threshold, threshold, index | step, BLOCK, HELD)
                index = tl.where(before <= surplus, index | step, index)
                step = step >> 1
        value = tl.where(tail >= 0.0, edge, value)
    lowest = top + log_min_p
    index = tl.where(lowest > value, 0, index)
    return tl.maximum(value, lowest), index


@triton.jit(do_not_specialize=COUNTS)
def _row_kernel(
    logits_ptr,
    settings_ptr,
    key_ptr,
    place_ptr,
    stream_ptr,
    step_ptr,
    node_ptr,
    token_ptr,
    finite_ptr,
    warped_ptr,
    size,
    batch_stride,
    row_stride,
    batch,
    rows,
    settings_rows,
    nodes,
    places,
    GUIDED: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    MIN_P: tl.constexpr,
    INDEX_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Warp a whole row of logits, and store them (warped_ptr) or draw a token."""
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK)
    inside = index < size
    at = logits_ptr + row // rows * batch_stride + row % rows * row_stride
    setting = tl.where(settings_rows > 1, row // rows, 0)
    scale, temperature, k, tail, log_min_p = _settings(settings_ptr, setting, settings_rows)
    x = tl.load(at + index, mask=inside, other=NEG_INF).to(tl.float32)
    if GUIDED:
        u = tl.load(at + batch.to(tl.int64) * batch_stride + index, mask=inside, other=NEG_INF).to(tl.float32)
        c_top, u_top = tl.max(x), tl.max(u)
        x = _guide(x, u, c_top, tl.sum(tl.exp(x - c_top)), u_top, tl.sum(tl.exp(u - u_top)), scale)
    is_drawn = temperature > 0.0
    x = (
        x * tl.div_rn(1.0, tl.where(is_drawn, temperature, 1.0)) + 0.0
    )  # turns -0 into 0, so that their bits are equal
    top = tl.max(x)
    is_finite = (tl.sum((x != x).to(tl.int32)) == 0) & (top > NEG_INF) & (top < INF)
    x = tl.where(is_finite, x, 0.0)
    x = tl.where(inside, x, NEG_INF)
    if TOP_K or TOP_P or MIN_P:
        top = tl.where(is_finite, top, 0.0)
        value, first = _cut(
            x, logits_ptr, size, top, k, tail, log_min_p, BLOCK, True, INDEX_BITS, TOP_K, TOP_P
        )
        value, first = tl.where(is_drawn, value, NEG_INF), tl.where(is_drawn, first, 0)
        x = tl.where((x > value) | ((x == value) & (index >= first)), x, NEG_INF)
    if warped_ptr is not None:
        tl.store(warped_ptr + row * size + index, tl.where(is_finite, x, float("nan")), mask=inside)
    else:
        if key_ptr is not None:
            node = tl.load(node_ptr + row) if node_ptr is not None else row % nodes
            place = row // nodes * places + node
            noise = gumbel_tile(
                key_ptr + row // nodes * 2,
                tl.load(place_ptr + place),
                tl.load(stream_ptr + place),
                tl.load(step_ptr + place),
                0,
                BLOCK,
            )
            x = tl.where(is_drawn, x + noise, x)
        tl.store(token_ptr + row, tl.argmax(x, 0).to(tl.int64))
        tl.store(finite_ptr + row, is_finite)


@triton.jit(do_not_specialize=COUNTS)
def _sums_kernel(
    logits_ptr, sums_ptr, size, batch_stride, row_stride, batch, rows, tiles, TILE: tl.constexpr
):
    """Maximum and sum of exponentials of a tile of conditional and unconditional logits: [rows, tiles, 4]."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    index = tile * TILE + tl.arange(0, TILE)
    at = logits_ptr + row // rows * batch_stride + row % rows * row_stride
    out = sums_ptr + (row * tiles + tile) * 4
    for side in tl.static_range(2):
        x = tl.load(
            at + side * batch.to(tl.int64) * batch_stride + index, mask=index < size, other=NEG_INF
        ).to(tl.float32)
        top = tl.max(x)
        tl.store(out + 2 * side, top)
        tl.store(out + 2 * side + 1, tl.sum(tl.exp(x - tl.where(top == NEG_INF, 0.0, top))))


@triton.jit
def _total(sums_ptr, side, tiles, TILES: tl.constexpr):
    """Maximum and sum of exponentials of a row, from those of its tiles."""
    at, inside = sums_ptr + tl.arange(0, TILES) * 4 + 2 * side, tl.arange(0, TILES) < tiles
    tops, sums = tl.load(at, mask=inside, other=NEG_INF), tl.load(at + 1, mask=inside, other=0.0)
    top = tl.max(tops)
    return top, tl.sum(tl.where(tops == NEG_INF, 0.0, sums * tl.exp(tops - top)))


@triton.jit(do_not_specialize=COUNTS)
def _scores_kernel(
    logits_ptr,
    settings_ptr,
    sums_ptr,
    scores_ptr,
    tops_ptr,
    size,
    batch_stride,
    row_stride,
    batch,
    rows,
    settings_rows,
    tiles,
    GUIDED: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    """Apply guidance and temperature to a tile; find its maximum, and whether it has a NaN."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    index = tile * TILE + tl.arange(0, TILE)
    inside = index < size
    at = logits_ptr + row // rows * batch_stride + row % rows * row_stride
    setting = tl.where(settings_rows > 1, row // rows, 0)
    scale, temperature, _, _, _ = _settings(settings_ptr, setting, settings_rows)
    x = tl.load(at + index, mask=inside, other=NEG_INF).to(tl.float32)
    if GUIDED:
        u = tl.load(at + batch.to(tl.int64) * batch_stride + index, mask=inside, other=NEG_INF).to(tl.float32)
        c_top, c_sum = _total(sums_ptr + row * tiles * 4, 0, tiles, TILES)
        u_top, u_sum = _total(sums_ptr + row * tiles * 4, 1, tiles, TILES)
        x = _guide(x, u, c_top, c_sum, u_top, u_sum, scale)
    x = x * tl.div_rn(1.0, tl.where(temperature > 0.0, temperature, 1.0)) + 0.0  # as in `_row_kernel`
    tl.store(scores_ptr + row * size + index, x, mask=inside)
    tl.store(tops_ptr + (row * tiles + tile) * 2, tl.max(x))
    tl.store(tops_ptr + (row * tiles + tile) * 2 + 1, tl.max((x != x).to(tl.float32)))


@triton.jit
def _top(tops_ptr, row, tiles, TILES: tl.constexpr):
    """Maximum of a row, and whether the row is finite."""
    at, inside = tops_ptr + (row * tiles + tl.arange(0, TILES)) * 2, tl.arange(0, TILES) < tiles
    top = tl.max(tl.load(at, mask=inside, other=NEG_INF))
    nans = tl.max(tl.load(at + 1, mask=inside, other=0.0))
    return top, (nans == 0.0) & (top > NEG_INF) & (top < INF)


@triton.jit(do_not_specialize=COUNTS)
def _cut_kernel(
    settings_ptr,
    scores_ptr,
    tops_ptr,
    cuts_ptr,
    size,
    rows,
    settings_rows,
    tiles,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    INDEX_BITS: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    """Find the cut of a row: the value and the index of `_cut`, [rows, 2]."""
    row = tl.program_id(0).to(tl.int64)
    setting = tl.where(settings_rows > 1, row // rows, 0)
    _, temperature, k, tail, log_min_p = _settings(settings_ptr, setting, settings_rows)
    top, is_finite = _top(tops_ptr, row, tiles, TILES)
    value, first = tl.full((), NEG_INF, tl.float32), tl.full((), 0, tl.int32)
    if is_finite & (temperature > 0.0):
        value, first = _cut(
            0.0, scores_ptr + row * size, size, top, k, tail, log_min_p, TILE, False, INDEX_BITS, TOP_K, TOP_P
        )
    tl.store(cuts_ptr + row * 2, value)
    tl.store(cuts_ptr + row * 2 + 1, first.to(tl.float32))


@triton.jit(do_not_specialize=COUNTS)
def _tile_kernel(
    settings_ptr,
    scores_ptr,
    tops_ptr,
    cuts_ptr,
    key_ptr,
    place_ptr,
    stream_ptr,
    step_ptr,
    node_ptr,
    best_ptr,
    choice_ptr,
    warped_ptr,
    size,
    rows,
    settings_rows,
    nodes,
    places,
    tiles,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    """Exclude tokens of a tile, and store it (warped_ptr) or its best token with noise: [rows, tiles]."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start = tile * TILE
    index = start + tl.arange(0, TILE)
    inside = index < size
    x = tl.load(scores_ptr + row * size + index, mask=inside, other=NEG_INF)
    _, is_finite = _top(tops_ptr, row, tiles, TILES)
    x = tl.where(inside, tl.where(is_finite, x, 0.0), NEG_INF)
    if cuts_ptr is not None:
        value, first = tl.load(cuts_ptr + row * 2), tl.load(cuts_ptr + row * 2 + 1).to(tl.int32)
        x = tl.where((x > value) | ((x == value) & (index >= first)), x, NEG_INF)
    if warped_ptr is not None:
        tl.store(warped_ptr + row * size + index, tl.where(is_finite, x, float("nan")), mask=inside)
    else:
        if key_ptr is not None:
            setting = tl.where(settings_rows > 1, row // rows, 0)
            temperature = tl.load(settings_ptr + settings_rows + setting)
            node = tl.load(node_ptr + row) if node_ptr is not None else row % nodes
            place = row // nodes * places + node
            noise = gumbel_tile(
                key_ptr + row // nodes * 2,
                tl.load(place_ptr + place),
                tl.load(stream_ptr + place),
                tl.load(step_ptr + place),
                start,
                TILE,
            )
            x = tl.where(temperature > 0.0, x + noise, x)
        tl.store(best_ptr + row * tiles + tile, tl.max(x))
        tl.store(choice_ptr + row * tiles + tile, start + tl.argmax(x, 0))


@triton.jit
def _choice_kernel(tops_ptr, best_ptr, choice_ptr, token_ptr, finite_ptr, tiles, TILES: tl.constexpr):
    """The best token of a row among those of its tiles."""
    row, tile = tl.program_id(0).to(tl.int64), tl.arange(0, TILES)
    best = tl.load(best_ptr + row * tiles + tile, mask=tile < tiles, other=NEG_INF)
    token = tl.load(choice_ptr + row * tiles + tl.argmax(best, 0))
    tl.store(token_ptr + row, token.to(tl.int64))
    _, is_finite = _top(tops_ptr, row, tiles, TILES)
    tl.store(finite_ptr + row, is_finite)


def warp_triton(logits: Tensor, warping: Warping) -> Tensor:
    """Launch `warped`: [B or 2B, m, V] -> [B, m, V]."""
    batch = len(logits) // (1 + warping.is_guided)
    out = torch.empty(batch, *logits.shape[1:], dtype=torch.float32, device=logits.device)
    if out.numel():
        _launch(logits, warping, None, None, None, None, None, out, None)
    return out


def sample_triton(
    logits: Tensor,
    key: Tensor | None,
    place: Tensor,
    stream: Tensor,
    step: Tensor,
    node: Tensor | None,
    warping: Warping,
) -> tuple[Tensor, Tensor]:
    """Launch `sampled`: [B or 2B, m, V] -> tokens [T, n] and whether they are valid."""
    tokens = torch.empty_like(place if node is None else node, memory_format=torch.contiguous_format)
    finite = torch.empty_like(tokens, dtype=torch.bool)
    if tokens.numel():
        place, stream, step = (each.expand_as(place).contiguous() for each in (place, stream, step))
        key, node = (None if each is None else each.contiguous() for each in (key, node))
        _launch(logits, warping, key, place, stream, step, node, tokens, finite)
    return tokens, finite


@launcher
def _launch(
    logits: Tensor,
    warping: Warping,
    key: Tensor | None,
    place: Tensor | None,
    stream: Tensor | None,
    step: Tensor | None,
    node: Tensor | None,
    out: Tensor,
    finite: Tensor | None,
) -> None:
    """Launch the kernels for warped logits (`finite` is None) or for tokens."""
    logits = rows_together(logits)
    rows, size = logits.shape[1:]
    batch = len(logits) // (1 + warping.is_guided)
    if warping.rows is None:
        settings = held(_numbers(warping, logits.device))
    else:
        settings = warping.rows.to(torch.float32).T.contiguous()
    strides, counts = logits.stride()[:2], (settings.shape[1], out.shape[1], 1)
    if place is not None:
        counts = (settings.shape[1], out.shape[1], place.shape[1])
    token, warped = (None, out) if finite is None else (out, None)
    flags = {
        "TOP_K": any(0 < k < size or (k and warping.rows is not None) for k in warping.top_k),
        "TOP_P": min(warping.top_p) < 1.0,
        "INDEX_BITS": (size - 1).bit_length() or 1,
    }
    if size <= RESIDENT:
        block = max(16, triton.next_power_of_2(size))
        words = key, place, stream, step, node, token, finite, warped
        _row_kernel[(batch * rows,)](
            *(logits, settings, *words, size, *strides, batch, rows, *counts),
            **flags,
            GUIDED=warping.is_guided,
            MIN_P=any(warping.min_p),
            BLOCK=block,
            num_warps=row_warps(block),
        )
        return
    tiles = triton.cdiv(size, TILE)
    grid, fixed = (batch * rows, tiles), {"TILE": TILE, "TILES": triton.next_power_of_2(tiles)}
    scores = logits.new_empty(batch * rows, size, dtype=torch.float32)
    tops = scores.new_empty(batch * rows, tiles, 2)
    sums = cuts = best = choice = None
    if warping.is_guided:
        sums = scores.new_empty(batch * rows, tiles, 4)
        _sums_kernel[grid](logits, sums, size, *strides, batch, rows, tiles, TILE=TILE, num_warps=8)
    _scores_kernel[grid](
        *(logits, settings, sums, scores, tops, size, *strides, batch, rows, counts[0], tiles),
        **fixed,
        GUIDED=warping.is_guided,
        num_warps=8,
    )
    if warping.truncates and not warping.is_greedy:
        cuts = scores.new_empty(batch * rows, 2)
        _cut_kernel[(batch * rows,)](
            *(settings, scores, tops, cuts, size, rows, counts[0], tiles), **flags, **fixed, num_warps=16
        )
    if finite is not None:
        best, choice = scores.new_empty(grid), scores.new_empty(grid, dtype=torch.int32)
    words = key, place, stream, step, node, best, choice, warped
    _tile_kernel[grid](
        *(settings, scores, tops, cuts, *words, size, rows, *counts, tiles), **fixed, num_warps=8
    )
    if finite is not None:
        _choice_kernel[(batch * rows,)](
            tops, best, choice, token, finite, tiles, TILES=fixed["TILES"], num_warps=1
        )


def row_warps(block: int) -> int:
    """Number of warps for a row in registers: 16 tokens per thread."""
    return max(1, min(16, block // 512))


@functools.lru_cache(CACHED_SETTINGS)
def _numbers(warping: Warping, device: torch.device) -> Tensor:
    """Return the settings of all rows, [5, 1], or of each row, [5, B]; see `Warping.numbers`."""
    wide = warping.numbers(max(map(len, warping[:5])))
    with torch.inference_mode(False):
        return torch.tensor(wide, dtype=torch.float32, device=device)
