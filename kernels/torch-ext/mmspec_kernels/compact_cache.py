"""Compaction of a key-value cache after verification of a draft tree: only the accepted path stays.

All nodes of a tree are stored behind the committed tokens of their row. The keys and values of the accepted
path move to the front of these, in one launch for all layers. The rest is masked and overwritten later.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from .backend import launcher, operator, tl, triton, use_triton

ELEMENTS = 2048  # words per program: the whole path, and a part of each token


@operator(fake=lambda *_: None, mutates=("buffers",))
def compact_cache(buffers: list[Tensor], path: Tensor, lengths: Tensor, counts: Tensor) -> None:
    """Move the accepted path of every row to the end of its committed tokens, in all buffers at once.

    Position `lengths + i` of a row gets the value at `lengths + path[i]`, for i < counts; no other changes.

    Args:
        buffers: contiguous [B, capacity, ...] keys and values of all layers, of any width and dtype.
        path: [B, m] int64 nodes of the path in increasing order, root first, padded.
        lengths: [B] int64 number of committed tokens.
        counts: [B] int64 number of path nodes to keep; 0 leaves a row unchanged.
    """
    if not buffers or not path.numel():
        return
    if use_triton(path.device):
        compact_cache_triton(buffers, path, lengths, counts)
        return
    rows, capacity = buffers[0].shape[:2]
    step = torch.arange(path.shape[1], device=path.device)
    begin = (torch.arange(rows, device=path.device) * capacity + lengths)[:, None]
    source = (begin + torch.where(step < counts[:, None], path, step)).flatten()
    destination = (begin + step).flatten()
    for buffer in buffers:
        places = buffer.view(rows * capacity, -1)
        places.index_copy_(0, destination, places.index_select(0, source))  # the two may overlap


@launcher
def compact_cache_triton(buffers: list[Tensor], path: Tensor, lengths: Tensor, counts: Tensor) -> None:
    """Launch `compact_cache`.

    Raises:
        ValueError: the buffers differ in rows or capacity, or one is not contiguous.
    """
    rows, capacity = buffers[0].shape[:2]
    for buffer in buffers:
        if buffer.shape[:2] != (rows, capacity) or not buffer.is_contiguous():
            raise ValueError(
                f"buffers must be contiguous [{rows}, {capacity}, ...]; "
                f"got shape {tuple(buffer.shape)}, strides {buffer.stride()}"
            )
    nodes = path.shape[1]
    bytes_of_token = tuple(buffer.nbytes // (rows * capacity) for buffer in buffers)
    addresses = tuple(buffer.data_ptr() for buffer in buffers)
    word = 1 if any(number % 4 for number in (*bytes_of_token, *addresses)) else 4
    table = _table(addresses, tuple(size // word for size in bytes_of_token), path.device)
    steps = triton.next_power_of_2(nodes)
    block = max(16, ELEMENTS // steps)
    grid = (len(buffers), rows, triton.cdiv(max(bytes_of_token) // word, block))
    _compact_kernel[grid](
        table,
        path.contiguous(),
        lengths.contiguous(),
        counts.contiguous(),
        nodes,
        capacity,
        WORD=word,
        PATH=steps,
        BLOCK=block,
    )


@functools.lru_cache(
    maxsize=64
)  # buffers stay the same for a whole call, and each table is a copy to the GPU
def _table(addresses: tuple[int, ...], widths: tuple[int, ...], device: torch.device) -> Tensor:
    """[buffers, 2] address of each buffer, and words per token."""
    return torch.tensor(list(zip(addresses, widths, strict=True)), device=device)


@triton.jit
def _compact_kernel(
    table_ptr,
    path_ptr,
    lengths_ptr,
    counts_ptr,
    nodes,
    capacity,
    WORD: tl.constexpr,  # bytes
    PATH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    buffer = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    width = tl.load(table_ptr + 2 * buffer + 1)  # of a token, in words
    step = tl.arange(0, PATH)
    source = tl.load(path_ptr + row * nodes + step, mask=step < nodes, other=0)
    moves = (step < nodes) & (step < tl.load(counts_ptr + row)) & (source != step)
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    mask = moves[:, None] & (column < width)[None, :]
    begin = tl.load(table_ptr + 2 * buffer)
    begin = begin.to(tl.pointer_type(tl.int32)) if WORD == 4 else begin.to(tl.pointer_type(tl.int8))
    begin += (row * capacity + tl.load(lengths_ptr + row)) * width
    values = tl.load(begin + source[:, None] * width + column[None, :], mask=mask, other=0)
    tl.debug_barrier()  # read everything before writing: source and destination overlap
    tl.store(begin + step[:, None].to(tl.int64) * width + column[None, :], values, mask=mask)
