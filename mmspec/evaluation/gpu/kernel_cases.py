"""Cases in which each op of `mmspec.kernels` is timed: shapes, arguments, floor, and the same in plain torch.

A new op gets an entry here; a test says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mmspec import kernels
from mmspec.evaluation.speed.ceilings import Cost

__all__ = ["CASES", "KernelCase"]

Shape = Mapping[str, int]


@dataclass(frozen=True)
class KernelCase:
    """An op, with what it is timed on.

    Attributes:
        op: its name in `mmspec.kernels`.
        shapes: that are timed, those of real models.
        tiny: shape for a rehearsal on a CPU.
        make: shape and device -> the op's arguments.
        cost: shape -> least bytes moved and operations done.
        floor: that cost as a formula, which is printed.
        peer: the same in plain torch, called with the same arguments; None for the op's own torch form
            (`MMSPEC_BACKEND=torch`).
    """

    op: str
    shapes: Sequence[Shape]
    tiny: Shape
    make: Callable[[Shape, torch.device], tuple[Any, ...]]
    cost: Callable[[Shape], Cost]
    floor: str
    peer: Callable[..., Any] | None = None

    @property
    def function(self) -> Callable[..., Any]:
        """The op."""
        function: Callable[..., Any] = getattr(kernels, self.op)
        return function


ROWS = ({"rows": 1, "count": 16_384}, {"rows": 64, "count": 16_384}, {"rows": 64, "count": 151_936})


def _positions(shape: Shape, device: torch.device) -> tuple[Any, ...]:
    key = torch.tensor([[2024, 7]], device=device)
    return key, torch.arange(shape["rows"], device=device)[None], 0, shape["count"]


def _counters(shape: Shape, device: torch.device) -> tuple[Any, ...]:
    counters = torch.arange(4 * shape["count"], device=device).view(-1, 4)
    return counters, torch.tensor([2024, 7], device=device)


def _chains(shape: Shape, device: torch.device) -> tuple[Any, ...]:
    """Chains whose q is p, so that every candidate passes, but for the last: it is refused in all rows."""
    rows, nodes, count = shape["rows"], shape["nodes"], shape["count"]
    p = torch.randn(rows, nodes, count, device=device).softmax(-1)
    q = p.roll(1, 1)
    tokens = torch.zeros(rows, nodes, dtype=torch.long, device=device)
    u = torch.full((rows, nodes - 1), 0.5, device=device)
    u[:, -1], q[:, -1, 0] = 1.0, 1.0
    key = torch.tensor([[2024, 7]], device=device).expand(rows, 2)
    place = torch.arange(rows, device=device)
    return p, q, tokens, torch.ones_like(tokens, dtype=torch.bool), u, key, place, place * 0, place * 0


def _windows(shape: Shape, device: torch.device) -> tuple[Any, ...]:
    """Windows of which every second token is refused."""
    rows, places, count = shape["rows"], shape["places"], shape["count"]
    p, q = torch.randn(2, rows, places, count, device=device).softmax(-1).unbind(0)
    old = torch.arange(places, device=device).expand(rows, places)
    tokens = torch.where(old % 2 == 0, (p / q).argmin(-1), (p / q).argmax(-1))
    u = torch.full((rows, places, 3), 0.5, dtype=torch.float64, device=device)
    return p, q, tokens, torch.ones_like(tokens, dtype=torch.bool), old, u


CASES = (
    KernelCase(
        op="philox4x32",
        shapes=({"count": 65_536},),
        tiny={"count": 8},
        make=_counters,
        cost=lambda shape: Cost(2 * 4 * 8 * shape["count"]),
        floor="count x 4 words of 8 bytes, read and written",
    ),
    KernelCase(
        op="philox_uniform",
        shapes=ROWS,
        tiny={"rows": 2, "count": 8},
        make=_positions,
        cost=lambda shape: Cost(4 * shape["rows"] * shape["count"]),
        floor="rows x count x 4 bytes, written",
        peer=lambda key, position, stream, count: torch.rand(*position.shape, count, device=position.device),
    ),
    KernelCase(
        op="philox_gumbel",
        shapes=ROWS,
        tiny={"rows": 2, "count": 8},
        make=_positions,
        cost=lambda shape: Cost(4 * shape["rows"] * shape["count"]),
        floor="rows x count x 4 bytes, written",
        peer=lambda key, position, stream, count: (
            torch.empty(*position.shape, count, device=position.device).exponential_().log_().neg_()
        ),
    ),
    KernelCase(
        op="verify_chain",
        shapes=tuple(
            {"rows": rows, "nodes": 6, "count": count}
            for rows, count in ((1, 16_384), (16, 16_384), (16, 151_936), (16, 184_622))
        ),
        tiny={"rows": 2, "nodes": 3, "count": 8},
        make=_chains,
        cost=lambda shape: Cost(2 * 4 * shape["rows"] * shape["count"]),
        floor="rows x count x 4 bytes, of p and of q, read",
    ),
    KernelCase(
        op="redraw",
        shapes=({"rows": 1, "places": 32, "count": 16_384}, {"rows": 8, "places": 32, "count": 65_536}),
        tiny={"rows": 2, "places": 4, "count": 8},
        make=_windows,
        cost=lambda shape: Cost(2 * 4 * shape["rows"] * shape["places"] * shape["count"] // 2),
        floor="half of rows x places x count x 4 bytes, of p and of q, read",
    ),
)
