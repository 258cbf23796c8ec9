"""How kernels see tensors of any number of leading dimensions."""

from __future__ import annotations

from torch import Tensor


def planes(rows: Tensor) -> Tensor:
    """View [..., V] as [batch, places, V] with adjacent elements; copied where two strides do not suffice.

    A slice of the places of a batch (`p[:, :-1]`) is a view; as [batch * places, V] it would be copied.
    """
    flat = rows.reshape(-1, *rows.shape[-2:]) if rows.dim() > 1 else rows[None, None]
    return flat if flat.stride(-1) == 1 else flat.contiguous()
