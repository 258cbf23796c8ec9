"""Cases in which each op of `mmspec.kernels` is timed: shapes, arguments, floor, and the same in plain torch.

A new op gets an entry here; a test says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.ceilings import Cost
from mmspec import kernels

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


def _rows(shape: Shape, device: torch.device) -> tuple[Any, ...]:
    return torch.randn(1, shape["rows"], shape["vocabulary"], device=device), WARPING


def _sampled(shape: Shape, device: torch.device) -> tuple[Any, ...]:
    place = torch.arange(shape["rows"], device=device)[None]
    return *_rows(shape, device), torch.tensor([[2024, 7]], device=device), place, 0


def _parents(shape: Shape, device: torch.device) -> Tensor:
    """[rows, nodes] of binary trees."""
    parents = (torch.arange(shape["nodes"], device=device) - 1).clamp_min(0) // 2
    return parents.expand(shape["rows"], -1).contiguous()


def _levels(shape: Shape) -> int:
    return int(math.log2(shape["nodes"]))  # of a binary tree


def _trees(shape: Shape, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens, parents, ancestors and depths of trees whose left-most path is accepted."""
    parents = _parents(shape, device)
    return torch.zeros_like(parents), parents, *kernels.tree_paths(parents, _levels(shape))


def _passes(shape: Shape, device: torch.device) -> tuple[Any, ...]:
    tokens, _, ancestors, depth = _trees(shape, device)
    return tokens == 0, ancestors, depth


def _ends(shape: Shape, device: torch.device) -> tuple[Any, ...]:
    tokens, _, ancestors, depth = _trees(shape, device)
    return tokens, ancestors, depth, depth[:, -1].clone(), tokens[:, 0].clone(), _levels(shape)


def _matched(shape: Shape, device: torch.device) -> tuple[Any, ...]:
    tokens, parents, ancestors, depth = _trees(shape, device)
    return tokens, tokens.clone(), parents, tokens == 0, ancestors, depth, _levels(shape)


def _drafted(shape: Shape, device: torch.device) -> tuple[Any, ...]:
    parents = _parents(shape, device)
    p, q = (torch.rand(*parents.shape, shape["vocabulary"], device=device) for _ in range(2))
    children = kernels.tree_children(parents, torch.ones_like(parents, dtype=torch.bool), 2)
    u = torch.rand(shape["rows"], _levels(shape), 2, device=device)
    return (
        p / p.sum(-1, keepdim=True),
        (q / q.sum(-1, keepdim=True))[:, 1:],
        torch.zeros_like(parents),
        children,
        u,
        False,
    )


def _caches(shape: Shape, device: torch.device) -> tuple[Any, ...]:
    size = shape["rows"], 1024, shape["width"]
    buffers = [torch.zeros(size, dtype=torch.bfloat16, device=device) for _ in range(2 * shape["layers"])]
    path = torch.arange(shape["path"], device=device).expand(shape["rows"], -1) * 2
    lengths = torch.full((shape["rows"],), 512, device=device)
    return buffers, path, lengths, torch.full_like(lengths, shape["path"])


def _attention(shape: Shape, device: torch.device) -> tuple[Any, ...]:
    nodes, length, dim = shape["nodes"], shape["length"], 128
    query = torch.randn(shape["rows"], shape["heads"], nodes, dim, device=device, dtype=torch.bfloat16)
    keys = torch.randn(2, shape["rows"], length + nodes, shape["key_heads"], dim, device=device)
    key, value = keys.to(torch.bfloat16).transpose(2, 3)
    lengths = torch.full((shape["rows"],), length, device=device, dtype=torch.int32)
    visible = torch.ones(nodes, nodes, dtype=torch.int32, device=device).tril()
    visible = visible.expand(shape["rows"], -1, -1).contiguous()
    first = torch.zeros(shape["rows"], nodes, dtype=torch.int32, device=device)
    return query, key, value, first, lengths, visible, dim**-0.5


def _delta(shape: Shape, device: torch.device) -> tuple[Any, ...]:
    rows, nodes, heads, dim = shape["rows"], shape["nodes"], shape["heads"], 128
    q, k, v = (torch.randn(rows, nodes, heads, dim, device=device) for _ in range(3))
    g, beta = (torch.rand(rows, nodes, heads, device=device) for _ in range(2))
    ancestors = torch.ones(rows, nodes, nodes, dtype=torch.bool, device=device).tril()
    return q, k, v, -g, beta, torch.randn(rows, heads, dim, dim, device=device), ancestors


def _block(shape: Shape, device: torch.device) -> tuple[Any, ...]:
    rows, width = shape["rows"], shape["width"]
    x, scale, shift = (torch.randn(rows, width, device=device) for _ in range(3))
    weight = torch.randn(width, width, device=device, dtype=torch.bfloat16)
    return x, scale, shift, weight, weight[0].clone(), 1e-6, True


def _gate(shape: Shape, device: torch.device) -> tuple[Any, ...]:
    x, gate, _, weight, bias, _, _ = _block(shape, device)
    return x, x.to(weight.dtype), gate, weight, bias


def _transition(shape: Shape, device: torch.device) -> tuple[Any, ...]:
    x, noise = torch.randn(2, shape["rows"], shape["width"], device=device)
    output = torch.randn(2, shape["rows"], shape["width"], device=device)
    column = torch.ones(shape["rows"], 1, device=device)
    return x, output, noise, torch.tensor([1.0, -0.1, 0.1, 0.0], device=device), column, column


def _neighbours(shape: Shape, device: torch.device) -> tuple[Any, ...]:
    p = torch.rand(shape["rows"], shape["vocabulary"], device=device).softmax(-1)
    size = shape["vocabulary"], shape["neighbours"]
    return p, torch.randint(shape["vocabulary"], size, device=device, dtype=torch.int32)


def _two(shape: Shape, device: torch.device) -> tuple[Tensor, Tensor]:
    p, q = torch.randn(2, shape["rows"], shape["vocabulary"], device=device).softmax(-1)
    return p, q


def _token(shape: Shape, device: torch.device) -> Tensor:
    return torch.arange(shape["rows"], device=device)[:, None] % shape["vocabulary"]


def _images(shape: Shape, device: torch.device) -> tuple[Any, ...]:
    a, b = torch.randn(2, shape["rows"], shape["tokens"], shape["width"], device=device)
    return a, b, torch.ones(a.shape[:2], dtype=torch.bool, device=device)


def _merged(shape: Shape, device: torch.device) -> tuple[Any, ...]:
    values, _, mask = _images(shape, device)
    target = torch.arange(shape["tokens"], device=device) // 2
    return values, mask.float(), target.expand(shape["rows"], -1).contiguous(), shape["tokens"] // 2


WARPING = kernels.Warping((0.9,), (2000,), (0.95,))
VOCABULARIES = tuple(
    {"rows": rows, "vocabulary": size}
    for rows, size in ((1, 16_384), (64, 16_384), (64, 65_536), (64, 151_936))
)
FEW = {"rows": 2, "vocabulary": 40}
TREES, TREE = ({"rows": 1, "nodes": 64}, {"rows": 16, "nodes": 64}), {"rows": 2, "nodes": 7}
HEADS, HEAD = (
    ({"rows": 2, "width": 1024}, {"rows": 2, "width": 1536}, {"rows": 64, "width": 1536}),
    {"rows": 2, "width": 16},
)
IMAGES, IMAGE = (
    ({"rows": 1, "tokens": 2880, "width": 1024}, {"rows": 8, "tokens": 2880, "width": 1024}),
    {
        "rows": 2,
        "tokens": 6,
        "width": 8,
    },
)


def _chains(shape: Shape, device: torch.device) -> tuple[Any, ...]:
    """Chains whose q is p, so that every candidate passes, but for the last: it is refused in all rows."""
    rows, nodes, count = shape["rows"], shape["nodes"], shape["count"]
    p = torch.randn(rows, nodes, count, device=device).softmax(-1)
    q = p[:, :-1].clone()
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
    return p, q[:, 1:], tokens, torch.ones_like(tokens, dtype=torch.bool), old, u


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
        op="warp_logits",
        shapes=VOCABULARIES,
        tiny=FEW,
        make=_rows,
        cost=lambda shape: Cost(8 * shape["rows"] * shape["vocabulary"]),
        floor="rows x vocabulary x 4 bytes, read and written",
    ),
    KernelCase(
        op="sample_tokens",
        shapes=VOCABULARIES,
        tiny=FEW,
        make=_sampled,
        cost=lambda shape: Cost(shape["rows"] * (4 * shape["vocabulary"] + 9)),
        floor="rows x vocabulary x 4 bytes, read",
    ),
    KernelCase(
        op="tree_paths",
        shapes=TREES,
        tiny=TREE,
        make=lambda shape, device: (_parents(shape, device), _levels(shape)),
        cost=lambda shape: Cost(shape["rows"] * shape["nodes"] * (16 + shape["nodes"])),
        floor="rows x nodes x (16 + nodes) bytes: parents, depths and ancestors",
    ),
    KernelCase(
        op="tree_children",
        shapes=TREES,
        tiny=TREE,
        make=lambda shape, device: (
            parents := _parents(shape, device),
            torch.ones_like(parents, dtype=torch.bool),
            2,
        ),
        cost=lambda shape: Cost(shape["rows"] * shape["nodes"] * (9 + 16)),
        floor="rows x nodes x (9 + 16) bytes: parents, which are valid, two children",
    ),
    KernelCase(
        op="deepest_node",
        shapes=TREES,
        tiny=TREE,
        make=_passes,
        cost=lambda shape: Cost(shape["rows"] * (8 + shape["nodes"] * (9 + shape["nodes"]))),
        floor="rows x nodes x (9 + nodes) bytes: what passes, depths and ancestors",
    ),
    KernelCase(
        op="path_to",
        shapes=TREES,
        tiny=TREE,
        make=_ends,
        cost=lambda shape: Cost(shape["rows"] * shape["nodes"] * (32 + shape["nodes"])),
        floor="rows x nodes x (32 + nodes) bytes: tokens, depths, ancestors, paths",
    ),
    KernelCase(
        op="match_path",
        shapes=TREES,
        tiny=TREE,
        make=_matched,
        cost=lambda shape: Cost(shape["rows"] * shape["nodes"] * (49 + shape["nodes"])),
        floor="rows x nodes x (49 + nodes) bytes: tokens, choices, parents, depths, ancestors, paths",
    ),
    KernelCase(
        op="reject_tree",
        shapes=tuple(
            {"rows": rows, "nodes": 15, "vocabulary": size}
            for rows, size in ((1, 16_384), (1, 151_936), (8, 16_384))
        ),
        tiny={"rows": 2, "nodes": 7, "vocabulary": 12},
        make=_drafted,
        cost=lambda shape: Cost(8 * shape["rows"] * (2 * shape["vocabulary"] + 1)),
        floor="rows x vocabulary x 16 bytes: p and q of one node, what is left written",
    ),
    KernelCase(
        op="best",
        shapes=({"rows": 1, "count": 1024}, {"rows": 16, "count": 1024}),
        tiny={"rows": 2, "count": 64},
        make=lambda shape, device: (torch.rand(shape["rows"], shape["count"], device=device), 60),
        cost=lambda shape: Cost(shape["rows"] * (4 * shape["count"] + 8 * 60)),
        floor="rows x (count x 4 + 60 x 8) bytes",
        peer=lambda scores, count: scores.topk(count).indices,
    ),
    KernelCase(
        op="compact_cache",
        shapes=(
            {"rows": 1, "layers": 28, "width": 512, "path": 8},
            {"rows": 8, "layers": 32, "width": 4096, "path": 8},
        ),
        tiny={"rows": 2, "layers": 2, "width": 8, "path": 3},
        make=_caches,
        cost=lambda shape: Cost(8 * shape["rows"] * shape["layers"] * shape["width"] * shape["path"]),
        floor="rows x layers x 2 x width x path x 2 bytes, read and written",
    ),
    KernelCase(
        op="tree_attention",
        shapes=tuple(
            {"rows": rows, "heads": heads, "key_heads": keys, "nodes": nodes, "length": length}
            for rows, heads, keys in ((1, 28, 4), (1, 32, 32), (8, 32, 8))
            for nodes, length in ((1, 4096), (16, 4096), (64, 4096), (64, 16_384))
        ),
        tiny={"rows": 2, "heads": 4, "key_heads": 2, "nodes": 3, "length": 20},
        make=_attention,
        cost=lambda shape: Cost(
            512
            * shape["rows"]
            * (shape["key_heads"] * (shape["length"] + shape["nodes"]) + shape["heads"] * shape["nodes"]),
            512 * shape["rows"] * shape["heads"] * shape["nodes"] * (shape["length"] + shape["nodes"]),
        ),
        floor="rows x 512 bytes x (key heads x (length + nodes) + heads x nodes): keys, values, queries",
    ),
    KernelCase(
        op="gated_delta_tree",
        shapes=({"rows": 1, "nodes": 16, "heads": 32}, {"rows": 1, "nodes": 64, "heads": 32}),
        tiny={"rows": 1, "nodes": 3, "heads": 1},
        make=_delta,
        cost=lambda shape: Cost(
            4 * shape["rows"] * shape["heads"] * (128 * 128 + shape["nodes"] * (6 * 128 + 3))
        ),
        floor="rows x heads x 4 bytes x (128 x 128 + nodes x 6 x 128): states and six vectors of a node",
    ),
    KernelCase(
        op="modulated_linear",
        shapes=HEADS,
        tiny=HEAD,
        make=_block,
        cost=lambda shape: Cost(
            shape["width"] * (2 * shape["width"] + 14 * shape["rows"]),
            2 * shape["rows"] * shape["width"] ** 2,
        ),
        floor="width x (width x 2 + rows x 14) bytes: weights, rows, modulation, output",
    ),
    KernelCase(
        op="gated_linear",
        shapes=HEADS,
        tiny=HEAD,
        make=_gate,
        cost=lambda shape: Cost(
            shape["width"] * (2 * shape["width"] + 14 * shape["rows"]),
            2 * shape["rows"] * shape["width"] ** 2,
        ),
        floor="width x (width x 2 + rows x 14) bytes: weights, rows, gates, output",
    ),
    KernelCase(
        op="denoising_update",
        shapes=({"rows": 2, "width": 16}, {"rows": 64, "width": 64}),
        tiny={"rows": 2, "width": 4},
        make=_transition,
        cost=lambda shape: Cost(20 * shape["rows"] * shape["width"]),
        floor="rows x width x 5 x 4 bytes: state, two predictions, noise, next state",
    ),
    KernelCase(
        op="nearby_mass",
        shapes=(
            {"rows": 8, "vocabulary": 16_384, "neighbours": 100},
            {"rows": 8, "vocabulary": 16_384, "neighbours": 1000},
        ),
        tiny={"rows": 2, "vocabulary": 20, "neighbours": 4},
        make=_neighbours,
        cost=lambda shape: Cost(4 * shape["vocabulary"] * (shape["neighbours"] + 2 * shape["rows"])),
        floor="vocabulary x 4 bytes x (neighbours + 2 rows): the table once, masses in and out",
    ),
    KernelCase(
        op="nearby_prefix",
        shapes=(
            {"rows": 60, "vocabulary": 16_384, "neighbours": 100},
            {"rows": 60, "vocabulary": 16_384, "neighbours": 1000},
        ),
        tiny={"rows": 2, "vocabulary": 20, "neighbours": 4},
        make=lambda shape, device: (
            *_neighbours(shape, device),
            _token(shape, device),
            torch.full((1, 1), 0.1, device=device),
        ),
        cost=lambda shape: Cost(shape["rows"] * (8 * shape["neighbours"] + 20)),
        floor="rows x neighbours x 8 bytes: ids and their masses",
    ),
    KernelCase(
        op="rank_ratio",
        shapes=({"rows": 32, "vocabulary": 16_384}, {"rows": 32, "vocabulary": 65_536}),
        tiny=FEW,
        make=lambda shape, device: (*_two(shape, device), 14),
        cost=lambda shape: Cost(12 * shape["rows"] * shape["vocabulary"]),
        floor="rows x vocabulary x 12 bytes: p, q and ratios",
    ),
    KernelCase(
        op="rank_ratio_at",
        shapes=({"rows": 32, "vocabulary": 16_384}, {"rows": 96, "vocabulary": 65_536}),
        tiny=FEW,
        make=lambda shape, device: (*_two(shape, device), _token(shape, device), 14),
        cost=lambda shape: Cost(4 * shape["rows"] * (shape["vocabulary"] + 1)),
        floor="rows x vocabulary x 4 bytes: p",
    ),
    KernelCase(
        op="most_similar",
        shapes=IMAGES,
        tiny=IMAGE,
        make=_images,
        cost=lambda shape: Cost(
            shape["rows"] * shape["tokens"] * (8 * shape["width"] + 12),
            2 * shape["rows"] * shape["tokens"] ** 2 * shape["width"],
        ),
        floor="rows x tokens^2 x width x 2 operations; rows x tokens x width x 8 bytes",
    ),
    KernelCase(
        op="merge_vectors",
        shapes=IMAGES,
        tiny=IMAGE,
        make=_merged,
        cost=lambda shape: Cost(shape["rows"] * shape["tokens"] * (6 * shape["width"] + 14)),
        floor="rows x tokens x width x 6 bytes: vectors, and half as many",
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
