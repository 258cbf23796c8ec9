"""Kernels of bipartite soft matching: the most similar vectors, and the means of merged vectors."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize

from mmspec.kernels.backend import (
    INTERPRETED,
    launcher,
    operator,
    rows_together,
    tl,
    triton,
    use_triton,
    use_triton_without_gradient,
)

EPSILON = tl.constexpr(1e-12)  # the smallest norm that `normalize` divides by
WIDTH = 256  # elements of a merged vector that one program sums


@operator(
    fake=lambda a, b, mask: (
        a.new_empty(a.shape[:-1], dtype=torch.float32),
        a.new_empty(a.shape[:-1], dtype=torch.int64),
    )
)
def most_similar(a: Tensor, b: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Find the most similar vector of another set, by cosine, for each vector of a set.

    The kernel does not store the matrix of similarities. It has no gradient.

    Args:
        a: [P, n, d].
        b: [P, m, d].
        mask: [P, m] bool, whether each vector of b exists.

    Returns:
        similarity: [P, n] float32; -inf where b is empty.
        index: [P, n] int64 into b, the lowest of equally similar vectors; 0 where b is empty.
    """
    if a.dtype != torch.float64 and use_triton(a.device):
        return most_similar_triton(a, b, mask)
    if not b.shape[1]:
        empty = a.new_full(a.shape[:-1], float("-inf"), dtype=torch.float32)
        return empty, torch.zeros_like(empty, dtype=torch.int64)
    precise = torch.promote_types(a.dtype, torch.float32)
    unit = [normalize(each.to(precise), dim=-1) for each in (a, b)]
    similarity = (unit[0] @ unit[1].mT).masked_fill(~mask[:, None], float("-inf"))
    index = similarity.argmax(-1)
    return similarity.gather(-1, index[..., None])[..., 0].float(), index


@operator(
    fake=lambda values, weights, target, count: (
        values.new_empty(len(values), count, values.shape[-1]),
        weights.new_empty(len(values), count),
    )
)
def merge_vectors(values: Tensor, weights: Tensor, target: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the weighted means of the vectors that are merged into the same slot.

    The torch form has gradients to `values`, and runs if a gradient is needed.

    Args:
        values: [P, N, d].
        weights: [P, N] float32, positive.
        target: [P, N] int64 slot of each vector, from 0 to count - 1; -1 for none.
        count: number of slots, C.

    Returns:
        mean: [P, C, d]; zero where nothing was merged.
        total: [P, C] float32 sums of the weights.
    """
    if values.dtype != torch.float64 and use_triton_without_gradient(values):
        return merge_vectors_triton(values, weights, target, count)
    precise = torch.promote_types(values.dtype, torch.float32)
    kept = target >= 0
    slot, weight = target.where(kept, 0), weights.where(kept, 0.0)
    total = torch.zeros_like(weights[:, :1]).expand(-1, count).scatter_add(1, slot, weight)
    share = (weight / total.gather(1, slot).where(kept, 1.0)).to(precise)
    parts = (share[..., None] * values.to(precise)).where(kept[..., None], 0.0)
    mean = values.new_zeros(len(values), count, values.shape[-1], dtype=precise)
    mean = mean.scatter_add(1, slot[..., None].expand_as(values), parts)
    return mean.to(values.dtype), total


@launcher
def most_similar_triton(a: Tensor, b: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Launch `most_similar`: a [P, n, d], b [P, m, d], mask [P, m] -> [P, n] similarities and indices."""
    a, b = rows_together(a), rows_together(b)
    sets, rows, width = a.shape
    similarity = torch.empty(sets, rows, dtype=torch.float32, device=a.device)
    index = torch.empty(sets, rows, dtype=torch.int64, device=a.device)
    if index.numel():
        block = 32 if a.dtype == torch.float32 else 64
        _most_similar_kernel[(triton.cdiv(rows, block), sets)](
            a,
            b,
            mask.contiguous(),
            similarity,
            index,
            rows,
            b.shape[1],
            width,
            *a.stride()[:2],
            *b.stride()[:2],
            ROWS=block,
            COLUMNS=block,
            DEPTH=32 if a.dtype == torch.float32 else 64,
            UPCAST=INTERPRETED,
        )
    return similarity, index


@launcher
def merge_vectors_triton(
    values: Tensor, weights: Tensor, target: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    """Launch `merge_vectors`: values [P, N, d], weights, target [P, N] -> [P, C, d] and [P, C]."""
    values = rows_together(values)
    sets, members, width = values.shape
    mean = torch.empty(sets, count, width, dtype=values.dtype, device=values.device)
    total = torch.empty(sets, count, dtype=torch.float32, device=values.device)
    if total.numel():
        ordered, order = target.sort(dim=-1, stable=True)
        slots = torch.arange(count + 1, device=target.device).expand(sets, -1).contiguous()
        starts = torch.searchsorted(ordered, slots)
        _merge_kernel[(count, sets, triton.cdiv(width, WIDTH))](
            values,
            weights.contiguous(),
            order,
            starts,
            mean,
            total,
            members,
            count,
            width,
            *values.stride()[:2],
            WIDTH=WIDTH,
        )
    return mean, total


@triton.jit
def _most_similar_kernel(
    a_ptr,  # [sets, rows, width] with two strides
    b_ptr,  # [sets, columns, width] with two strides
    mask_ptr,  # [sets, columns]
    similarity_ptr,  # [sets, rows]
    index_ptr,  # [sets, rows]
    rows,
    columns,
    width,
    a_set_stride,
    a_row_stride,
    b_set_stride,
    b_row_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    UPCAST: tl.constexpr,
):
    each = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    a_row = a_ptr + each * a_set_stride + row * a_row_stride
    best = tl.full([ROWS], float("-inf"), tl.float32)
    where = tl.zeros([ROWS], dtype=tl.int64)
    a_square = tl.zeros([ROWS], dtype=tl.float32)
    for start in range(0, columns, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        b_column = b_ptr + each * b_set_stride + column.to(tl.int64) * b_row_stride
        product = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
        b_square = tl.zeros([COLUMNS], dtype=tl.float32)
        a_square = tl.zeros([ROWS], dtype=tl.float32)
        for first in range(0, width, DEPTH):
            depth = first + tl.arange(0, DEPTH)
            a = tl.load(
                a_row[:, None] + depth[None, :],
                mask=(row < rows)[:, None] & (depth < width)[None, :],
                other=0.0,
            )
            b = tl.load(
                b_column[None, :] + depth[:, None],
                mask=(depth < width)[:, None] & (column < columns)[None, :],
                other=0.0,
            )
            if UPCAST:
                a, b = a.to(tl.float32), b.to(tl.float32)
            # products of half-precision numbers are exact in float32, and float32 is not rounded to tf32
            product = tl.dot(a, b, product, input_precision="ieee")
            a, b = a.to(tl.float32), b.to(tl.float32)
            a_square += tl.sum(a * a, 1)
            b_square += tl.sum(b * b, 0)
        similarity = product / tl.maximum(tl.sqrt(b_square), EPSILON)[None, :]
        exists = tl.load(mask_ptr + each * columns + column, mask=column < columns, other=0) != 0
        similarity = tl.where(exists[None, :], similarity, float("-inf"))
        highest = tl.max(similarity, 1)
        first_of = tl.min(tl.where(similarity == highest[:, None], column[None, :], columns), 1)
        better = highest > best  # keeps the first of equally similar vectors
        where = tl.where(better, first_of, where)
        best = tl.where(better, highest, best)
    best = best / tl.maximum(tl.sqrt(a_square), EPSILON)
    tl.store(similarity_ptr + each * rows + row, best, mask=row < rows)
    tl.store(index_ptr + each * rows + row, where, mask=row < rows)


@triton.jit
def _merge_kernel(
    values_ptr,  # [sets, members, width] with two strides
    weights_ptr,  # [sets, members]
    order_ptr,  # [sets, members] the vectors, sorted by target
    starts_ptr,  # [sets, count + 1] where the vectors of each target begin in that order
    mean_ptr,  # [sets, count, width]
    total_ptr,  # [sets, count]
    members,
    count,
    width,
    set_stride,
    member_stride,
    WIDTH: tl.constexpr,
):
    each = tl.program_id(1).to(tl.int64)
    slot = tl.program_id(0)
    depth = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    starts = starts_ptr + each * (count + 1) + slot
    mean = tl.zeros([WIDTH], dtype=tl.float32)
    total = 0.0
    for place in range(tl.load(starts), tl.load(starts + 1)):
        member = tl.load(order_ptr + each * members + place)
        weight = tl.load(weights_ptr + each * members + member).to(tl.float32)
        source = values_ptr + each * set_stride + member * member_stride + depth
        mean += weight * tl.load(source, mask=depth < width, other=0.0).to(tl.float32)
        total += weight
    mean = mean / tl.where(total > 0, total, 1.0)
    tl.store(mean_ptr + (each * count + slot) * width + depth, mean, mask=depth < width)
    tl.store(total_ptr + each * count + slot, total, mask=tl.program_id(2) == 0)
