"""Compaction of a key-value cache after a draft tree was verified: only the accepted path stays.

All nodes of a tree are written behind the committed tokens of their row. The keys and values of the accepted
path move to the front of them; what is left behind is masked, and overwritten later.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .backend import operator, use_triton


def _fake(buffers: list[Tensor], path: Tensor, lengths: Tensor, counts: Tensor) -> None:
    return None


@operator(fake=_fake, mutates=("buffers",))
def compact_cache(buffers: list[Tensor], path: Tensor, lengths: Tensor, counts: Tensor) -> None:
    """Move the accepted path of every row to the end of its committed tokens, in all buffers at once.

    Place `lengths + i` of a row gets what stands at `lengths + path[i]`, for i < counts; no other changes.

    Args:
        buffers: contiguous [B, capacity, ...], keys and values of all layers; of any widths and dtypes.
        path: [B, m] int64 nodes of the path, the root first, which increase; padded.
        lengths: [B] int64 committed tokens of each row.
        counts: [B] int64 how many nodes of the path to keep; 0 leaves a row untouched.
    """
    if not buffers or not path.numel():
        return
    if use_triton(path.device):
        from .compact_cache_triton import compact_cache_triton

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
