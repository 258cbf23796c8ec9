"""Triton kernels of `groups.py` and their launchers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .layout import planes
from .selection_triton import bounded_ratio, key_value, merge_selected, select

MEMBERS = 1024  # tokens of groups that one program holds at once
LARGEST_SELECTION = 32  # tokens of a group, up to which selecting beats sorting


@triton.jit
def _rank_merge_kernel(
    taken_ptr,
    before_ptr,
    p_ptr,
    q_ptr,
    x_ptr,
    out_ptr,  # as x
    places,
    tokens,
    p_batch_stride,
    p_place_stride,
    q_batch_stride,
    q_place_stride,
    vocabulary,
    tiles,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    TILES: tl.constexpr,
    SLOTS: tl.constexpr,
):
    node = tl.program_id(0).to(tl.int64)
    place = node // tokens
    batch, place = place // places, place % places
    tile = tl.arange(0, TILES)
    before = tl.load(before_ptr + node * tiles + tile, mask=tile < tiles, other=0)
    above = tl.sum(before, 0) % SIZE  # of the group's tokens, those that come before x
    taken = merge_selected(taken_ptr, node, tiles, SIZE - 1, SIZE - 1, WIDTH, SLOTS)
    lane = tl.arange(0, WIDTH)
    is_below = lane < SIZE - 1
    member = (is_below & (lane < SIZE - 1 - above)) | (~is_below & (lane - (SIZE - 1) < above))
    p = key_value(taken)
    member = member & (taken >= 0) & (p > 0)  # tokens that p excludes are in no group
    index = vocabulary - 1 - (taken & 0xFFFFFFFF)
    q_row = q_ptr + batch * q_batch_stride + place * q_place_stride
    q = tl.load(q_row + index, mask=member, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + node)
    p_x = tl.load(p_ptr + batch * p_batch_stride + place * p_place_stride + x).to(tl.float32)
    q_x = tl.load(q_row + x).to(tl.float32)
    ratio = bounded_ratio(p_x + tl.sum(tl.where(member, p, 0.0), 0), q_x + tl.sum(q, 0))
    tl.store(out_ptr + node, tl.where(p_x > 0, ratio, 0.0))


@triton.jit
def _groups_kernel(
    p_ptr,  # [batch, places, vocabulary] with two strides
    q_ptr,  # [batch, places, vocabulary] with two strides
    members_ptr,  # tokens by group: [listed], or [batch * places, listed]
    starts_ptr,  # [groups + 1] where each group begins, or None: every `size` tokens
    out_ptr,  # [batch * places, vocabulary]
    places,
    p_batch_stride,
    p_place_stride,
    q_batch_stride,
    q_place_stride,
    vocabulary,
    members_stride,
    listed,
    groups,
    size,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    p_row = p_ptr + row // places * p_batch_stride + row % places * p_place_stride
    q_row = q_ptr + row // places * q_batch_stride + row % places * q_place_stride
    members_ptr += row * members_stride
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    if starts_ptr is None:
        begin = tl.minimum(group * size, listed)
        end = tl.minimum(begin + size, listed)
    else:
        begin = tl.load(starts_ptr + group, mask=group < groups, other=0).to(tl.int32)
        end = tl.load(starts_ptr + group + 1, mask=group < groups, other=0).to(tl.int32)
    # a token that is not listed is a group of its own
    single = listed + group - groups
    begin = tl.where(group < groups, begin, tl.minimum(single, vocabulary))
    end = tl.where(group < groups, end, tl.minimum(single + 1, vocabulary))
    longest = tl.max(end - begin, 0)
    p_sum = tl.zeros([GROUPS, WIDTH], dtype=tl.float32)
    q_sum = tl.zeros([GROUPS, WIDTH], dtype=tl.float32)
    for start in range(0, longest, WIDTH):
        place = begin[:, None] + start + tl.arange(0, WIDTH)[None, :]
        inside = place < end[:, None]
        token = tl.load(members_ptr + place, mask=inside & (place < listed), other=0)
        token = tl.where(place < listed, token, place)
        p = tl.load(p_row + token, mask=inside, other=0.0).to(tl.float32)
        p_sum += p
        q_sum += tl.load(q_row + token, mask=inside & (p > 0), other=0.0).to(tl.float32)
    ratio = bounded_ratio(tl.sum(p_sum, 1), tl.sum(q_sum, 1))
    for start in range(0, longest, WIDTH):
        place = begin[:, None] + start + tl.arange(0, WIDTH)[None, :]
        inside = place < end[:, None]
        token = tl.load(members_ptr + place, mask=inside & (place < listed), other=0)
        token = tl.where(place < listed, token, place)
        p = tl.load(p_row + token, mask=inside, other=0.0).to(tl.float32)
        tl.store(out_ptr + row * vocabulary + token, tl.where(p > 0, ratio[:, None], 0.0), mask=inside)


def rank_ratio_triton(p: Tensor, q: Tensor, size: int) -> Tensor:
    """Launch `rank_ratio`: p, q [..., V] -> [..., V]."""
    order = p.sort(dim=-1, descending=True, stable=True).indices
    groups = triton.cdiv(p.shape[-1], size)
    return _launch_groups(p, q, order.contiguous().view(-1, p.shape[-1]), None, groups, size)


def cluster_ratio_triton(p: Tensor, q: Tensor, members: Tensor, starts: Tensor) -> Tensor:
    """Launch `cluster_ratio`: p, q [..., V], members [K], starts [clusters + 1] -> [..., V]."""
    groups = len(starts) - 1
    return _launch_groups(p, q, members, starts, groups, triton.cdiv(len(members), groups))


def _launch_groups(
    p: Tensor, q: Tensor, members: Tensor, starts: Tensor | None, groups: int, size: int
) -> Tensor:
    out = torch.empty(p.shape, dtype=p.dtype, device=p.device)
    if not out.numel():
        return out
    p, q = planes(p), planes(q)
    listed, vocabulary = members.shape[-1], p.shape[-1]
    width = min(MEMBERS, triton.next_power_of_2(size))
    held = min(MEMBERS // width, triton.next_power_of_2(groups))
    grid = (p.shape[0] * p.shape[1], triton.cdiv(groups + vocabulary - listed, held))
    _groups_kernel[grid](
        p,
        q,
        members,
        starts,
        out,
        p.shape[1],
        *p.stride()[:2],
        *q.stride()[:2],
        vocabulary,
        0 if starts is not None else listed,
        listed,
        groups,
        size,
        GROUPS=held,
        WIDTH=width,
    )
    return out


def rank_ratio_at_triton(p: Tensor, q: Tensor, x: Tensor, size: int) -> Tensor:
    """Launch `rank_ratio_at`: p, q [..., V], x [..., m] -> [..., m]."""
    if size > LARGEST_SELECTION:
        return rank_ratio_triton(p, q, size).gather(-1, x)
    out = torch.empty(x.shape, dtype=p.dtype, device=p.device)
    if not out.numel():
        return out
    p, q, x = planes(p), planes(q), x.contiguous()
    taken, before = select(p, x, size - 1, size - 1, lower_index_above=True)
    nodes, tiles, width = taken.shape
    _rank_merge_kernel[(nodes,)](
        taken,
        before,
        p,
        q,
        x,
        out,
        p.shape[1],
        x.shape[-1],
        *p.stride()[:2],
        *q.stride()[:2],
        p.shape[-1],
        tiles,
        SIZE=size,
        WIDTH=width,
        TILES=triton.next_power_of_2(tiles),
        SLOTS=triton.next_power_of_2(tiles * width),
    )
    return out
