"""Cases for timing each op of `mmspec.kernels`: shapes, arguments, floor, and the same in plain torch.

A test checks that every op has a case.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu.ceilings import Cost
from mmspec import kernels

__all__ = ["ATTENTION_PEERS", "CASES", "KernelCase", "Shape"]

Shape = Mapping[str, int]
Arguments = tuple[Any, ...]


@dataclass(frozen=True)
class KernelCase:
    """An op, and the inputs for timing it.

    Attributes:
        op: name of the op in `mmspec.kernels`.
        shapes: the timed shapes, which are those of real models.
        tiny: shape for a trial run on a CPU.
        arguments: function from the sizes of a shape to the op's arguments, on torch's default device.
        least: function from the sizes of a shape to the least bytes moved and operations done.
        floor: formula of that cost, for display.
        peer: the same in plain torch, with the same arguments; None for the op's torch implementation
            (`MMSPEC_BACKEND=torch`).
    """

    op: str
    shapes: Sequence[Shape]
    tiny: Shape
    arguments: Callable[..., Arguments]
    least: Callable[..., Cost]
    floor: str
    peer: Callable[..., Any] | None = None

    @property
    def function(self) -> Callable[..., Any]:
        """The op."""
        function: Callable[..., Any] = getattr(kernels, self.op)
        return function

    def make(self, shape: Shape, device: torch.device) -> Arguments:
        """Make the op's arguments on a device."""
        with device:
            return self.arguments(**shape)

    def cost(self, shape: Shape) -> Cost:
        """Return the least bytes moved and operations done for a shape."""
        return self.least(**shape)


WARPING = kernels.Warping((0.9,), (2000,), (0.95,))
ROWS = ({"rows": 1, "count": 16_384}, {"rows": 64, "count": 16_384}, {"rows": 64, "count": 151_936})
VOCABULARIES = tuple(
    {"rows": rows, "vocabulary": size}
    for rows, size in ((1, 16_384), (64, 16_384), (64, 65_536), (64, 151_936))
)
FEW = {"rows": 2, "vocabulary": 40}
TREES, TREE = ({"rows": 1, "nodes": 64}, {"rows": 16, "nodes": 64}), {"rows": 2, "nodes": 7}
HEADS = ({"rows": 2, "width": 1024}, {"rows": 2, "width": 1536}, {"rows": 64, "width": 1536})
HEAD = {"rows": 2, "width": 16}
WIDTHS = ({"rows": 1, "width": 4096}, {"rows": 60, "width": 4096})


def _key() -> Tensor:
    return torch.tensor([[2024, 7]])


def _positions(rows: int, count: int) -> Arguments:
    return _key(), torch.arange(rows)[None], 0, count


def _counters(count: int) -> Arguments:
    return torch.arange(4 * count).view(-1, 4), _key()[0]


def _rows(rows: int, vocabulary: int) -> Arguments:
    return torch.randn(1, rows, vocabulary), WARPING


def _sampled(rows: int, vocabulary: int) -> Arguments:
    return *_rows(rows, vocabulary), _key(), torch.arange(rows)[None], 0


def _parents(rows: int, nodes: int) -> Tensor:
    """Return the parents [rows, nodes] of binary trees."""
    return ((torch.arange(nodes) - 1).clamp_min(0) // 2).expand(rows, -1).contiguous()


def _levels(nodes: int) -> int:
    return int(math.log2(nodes))  # of a binary tree


def _children(rows: int, nodes: int) -> Arguments:
    parents = _parents(rows, nodes)
    return parents, torch.ones_like(parents, dtype=torch.bool), 2


def _trees(rows: int, nodes: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return tokens, parents, ancestors and depths of binary trees."""
    parents = _parents(rows, nodes)
    return torch.zeros_like(parents), parents, *kernels.tree_paths(parents, _levels(nodes))


def _passes(rows: int, nodes: int) -> Arguments:
    tokens, _, ancestors, depth = _trees(rows, nodes)
    return tokens == 0, ancestors, depth


def _ends(rows: int, nodes: int) -> Arguments:
    tokens, _, ancestors, depth = _trees(rows, nodes)
    return tokens, ancestors, depth, depth[:, -1].clone(), tokens[:, 0].clone(), _levels(nodes)


def _matched(rows: int, nodes: int) -> Arguments:
    tokens, parents, ancestors, depth = _trees(rows, nodes)
    return tokens, tokens.clone(), parents, tokens == 0, ancestors, depth, _levels(nodes)


def _path_tokens(rows: int, nodes: int) -> Arguments:
    tokens, _, ancestors, depth = _trees(rows, nodes)
    prompts, output = torch.ones(rows, 1024, dtype=torch.long), torch.ones(rows, 1024, dtype=torch.long)
    return prompts, output, torch.full((rows,), 512), tokens, ancestors, depth, _levels(nodes)


def _penalized(rows: int, nodes: int, vocabulary: int) -> Arguments:
    paths, first = torch.randint(vocabulary, (rows, nodes, 1024)), torch.zeros(rows, dtype=torch.long)
    return torch.randn(rows, nodes, vocabulary), paths, first, torch.full((rows,), 1.05)


def _drafted(rows: int, nodes: int, vocabulary: int) -> Arguments:
    p, q = (torch.rand(rows, nodes, vocabulary) for _ in range(2))
    p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    tokens = torch.zeros(rows, nodes, dtype=torch.long)
    children = kernels.tree_children(*_children(rows, nodes))
    return p, q[:, 1:], tokens, children, torch.rand(rows, _levels(nodes), 2), False


def _caches(rows: int, layers: int, width: int, path: int) -> Arguments:
    buffers = [torch.zeros(rows, 1024, width, dtype=torch.bfloat16) for _ in range(2 * layers)]
    lengths = torch.full((rows,), 512)
    return buffers, torch.arange(path).expand(rows, -1) * 2, lengths, torch.full_like(lengths, path)


def _attention(rows: int, heads: int, key_heads: int, nodes: int, length: int, dim: int = 128) -> Arguments:
    query = torch.randn(rows, heads, nodes, dim, dtype=torch.bfloat16)
    keys = torch.randn(2, rows, length + nodes, key_heads, dim)
    key, value = keys.to(torch.bfloat16).transpose(2, 3)
    lengths = torch.full((rows,), length, dtype=torch.int32)
    visible = torch.ones(nodes, nodes, dtype=torch.int32).tril().expand(rows, -1, -1).contiguous()
    first = torch.zeros(rows, nodes, dtype=torch.int32)
    return query, key, value, first, lengths, visible, dim**-0.5


def _sdpa(
    q: Tensor, k: Tensor, v: Tensor, first: Tensor, lengths: Tensor, visible: Tensor, scale: float
) -> Any:
    """SDPA of the same draft, with a dense mask; all lengths are equal."""
    committed = visible.new_ones(*visible.shape[:2], k.shape[2] - visible.shape[2])
    mask = torch.cat([committed, visible], -1).bool()[:, None]
    return lambda: scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)


def _flex(
    q: Tensor, k: Tensor, v: Tensor, first: Tensor, lengths: Tensor, visible: Tensor, scale: float
) -> Any:
    """FlexAttention of the same draft, compiled on a GPU; its block mask is made once."""
    before, sees = k.shape[2] - visible.shape[2], visible.bool()

    def seen(row: Tensor, head: Tensor, node: Tensor, column: Tensor) -> Tensor:
        return (column < before) | sees[row, node, (column - before).clamp_min(0)]

    blocks = create_block_mask(seen, len(q), None, q.shape[2], k.shape[2], device=q.device.type)
    attend = torch.compile(flex_attention, dynamic=False) if q.is_cuda else flex_attention
    return lambda: attend(q, k, v, block_mask=blocks, scale=scale, enable_gqa=True)


#: Ways to compute `tree_attention`: arguments -> a call without arguments.
ATTENTION_PEERS: dict[str, Callable[..., Callable[[], Any]]] = {
    "tree_attention": lambda *given: lambda: kernels.tree_attention(*given).transpose(1, 2),
    "sdpa": _sdpa,
    "flex": _flex,
}


def _delta(rows: int, nodes: int, heads: int, dim: int = 128) -> Arguments:
    q, k, v = (torch.randn(rows, nodes, heads, dim) for _ in range(3))
    g, beta = (torch.rand(rows, nodes, heads) for _ in range(2))
    ancestors = torch.ones(rows, nodes, nodes, dtype=torch.bool).tril()
    return q, k, v, -g, beta, torch.randn(rows, heads, dim, dim), ancestors


def _block(rows: int, width: int) -> Arguments:
    x, scale, shift = (torch.randn(rows, width) for _ in range(3))
    weight = torch.randn(width, width, dtype=torch.bfloat16)
    return x, scale, shift, weight, weight[0].clone(), 1e-6, True


def _gate(rows: int, width: int) -> Arguments:
    x, gate, _, weight, bias, _, _ = _block(rows, width)
    return x, x.to(weight.dtype), gate, weight, bias


def _block_cost(rows: int, width: int) -> Cost:
    return Cost(width * (2 * width + 14 * rows), 2 * rows * width**2)


def _transition(rows: int, width: int) -> Arguments:
    x, noise = torch.randn(2, rows, width)
    output, column = torch.randn(2, rows, width), torch.ones(rows, 1)
    return x, output, noise, torch.tensor([1.0, -0.1, 0.1, 0.0]), column, column


def _neighbours(rows: int, vocabulary: int, neighbours: int) -> Arguments:
    p = torch.rand(rows, vocabulary).softmax(-1)
    return p, torch.randint(vocabulary, (vocabulary, neighbours), dtype=torch.int32)


def _prefix(rows: int, vocabulary: int, neighbours: int) -> Arguments:
    given = _neighbours(rows, vocabulary, neighbours)
    return *given, _token(rows, vocabulary), torch.full((1, 1), 0.1)


def _states(rows: int, width: int, count: int) -> list[Tensor]:
    return list(torch.randn(count, rows, width).to(torch.bfloat16))


def _norm(rows: int, width: int) -> Arguments:
    x, residual, weights = _states(rows, width, 3)
    return x, residual, weights[0], 1e-6


def _rotary(rows: int, heads: int, key_heads: int, nodes: int, dim: int = 128) -> Arguments:
    states = torch.randn(rows, nodes, heads + 2 * key_heads, dim).to(torch.bfloat16)
    cos = states[:1, :, 0].clone()
    buffers = torch.zeros(2, rows, 1024, key_heads, dim, dtype=torch.bfloat16)
    slots = (torch.arange(rows)[:, None] * 1024 + torch.arange(nodes)).flatten()
    split = (heads, key_heads, key_heads)
    return *states.split(split, 2), cos, cos, slots, *buffers.unbind(0), []


def _two(rows: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    p, q = torch.randn(2, rows, vocabulary).softmax(-1)
    return p, q


def _token(rows: int, vocabulary: int) -> Tensor:
    return torch.arange(rows)[:, None] % vocabulary


def _chains(rows: int, nodes: int, count: int) -> Arguments:
    """Make chains with q = p, so that all candidates are accepted except for the last one of each row."""
    p = torch.randn(rows, nodes, count).softmax(-1)
    q, u = p[:, :-1].clone(), torch.full((rows, nodes - 1), 0.5)
    u[:, -1], q[:, -1, 0] = 1.0, 1.0
    tokens, place = torch.zeros(rows, nodes, dtype=torch.long), torch.arange(rows)
    valid, key = torch.ones_like(tokens, dtype=torch.bool), _key().expand(rows, 2)
    return p, q, tokens, valid, u, key, place, place * 0, place * 0


def _windows(rows: int, places: int, count: int) -> Arguments:
    """Make windows in which every second token is rejected."""
    p, q = torch.randn(2, rows, places, count).softmax(-1).unbind(0)
    old = torch.arange(places).expand(rows, places)
    tokens = torch.where(old % 2 == 0, (p / q).argmin(-1), (p / q).argmax(-1))
    u = torch.full((rows, places, 3), 0.5, dtype=torch.float64)
    return p, q[:, 1:], tokens, torch.ones_like(tokens, dtype=torch.bool), old, u


CASES = (
    KernelCase(
        op="philox4x32",
        shapes=({"count": 65_536},),
        tiny={"count": 8},
        arguments=_counters,
        least=lambda count: Cost(2 * 4 * 8 * count),
        floor="count x 4 words of 8 bytes, read and written",
    ),
    KernelCase(
        op="philox_uniform",
        shapes=ROWS,
        tiny={"rows": 2, "count": 8},
        arguments=_positions,
        least=lambda rows, count: Cost(4 * rows * count),
        floor="rows x count x 4 bytes, written",
        peer=lambda key, position, stream, count: torch.rand(*position.shape, count, device=position.device),
    ),
    KernelCase(
        op="philox_gumbel",
        shapes=ROWS,
        tiny={"rows": 2, "count": 8},
        arguments=_positions,
        least=lambda rows, count: Cost(4 * rows * count),
        floor="rows x count x 4 bytes, written",
        peer=lambda key, position, stream, count: (
            torch.empty(*position.shape, count, device=position.device).exponential_().log_().neg_()
        ),
    ),
    KernelCase(
        op="warp_logits",
        shapes=VOCABULARIES,
        tiny=FEW,
        arguments=_rows,
        least=lambda rows, vocabulary: Cost(8 * rows * vocabulary),
        floor="rows x vocabulary x 4 bytes, read and written",
    ),
    KernelCase(
        op="sample_tokens",
        shapes=VOCABULARIES,
        tiny=FEW,
        arguments=_sampled,
        least=lambda rows, vocabulary: Cost(rows * (4 * vocabulary + 9)),
        floor="rows x vocabulary x 4 bytes, read",
    ),
    KernelCase(
        op="tree_paths",
        shapes=TREES,
        tiny=TREE,
        arguments=lambda rows, nodes: (_parents(rows, nodes), _levels(nodes)),
        least=lambda rows, nodes: Cost(rows * nodes * (16 + nodes)),
        floor="rows x nodes x (16 + nodes) bytes: parents, depths and ancestors",
    ),
    KernelCase(
        op="tree_children",
        shapes=TREES,
        tiny=TREE,
        arguments=_children,
        least=lambda rows, nodes: Cost(rows * nodes * (9 + 16)),
        floor="rows x nodes x (9 + 16) bytes: parents, which are valid, two children",
    ),
    KernelCase(
        op="deepest_node",
        shapes=TREES,
        tiny=TREE,
        arguments=_passes,
        least=lambda rows, nodes: Cost(rows * (8 + nodes * (9 + nodes))),
        floor="rows x nodes x (9 + nodes) bytes: what passes, depths and ancestors",
    ),
    KernelCase(
        op="path_to",
        shapes=TREES,
        tiny=TREE,
        arguments=_ends,
        least=lambda rows, nodes: Cost(rows * nodes * (32 + nodes)),
        floor="rows x nodes x (32 + nodes) bytes: tokens, depths, ancestors, paths",
    ),
    KernelCase(
        op="match_path",
        shapes=TREES,
        tiny=TREE,
        arguments=_matched,
        least=lambda rows, nodes: Cost(rows * nodes * (49 + nodes)),
        floor="rows x nodes x (49 + nodes) bytes: tokens, choices, parents, depths, ancestors, paths",
    ),
    KernelCase(
        op="path_tokens",
        shapes=TREES,
        tiny=TREE,
        arguments=_path_tokens,
        least=lambda rows, nodes: Cost(8 * rows * (2048 + nodes * 2048)),
        floor="rows x (1 + nodes) x 2,048 x 8 bytes: tokens read once, written for each node",
    ),
    KernelCase(
        op="penalize_tokens",
        shapes=tuple({"rows": rows, "nodes": 60, "vocabulary": 151_936} for rows in (1, 8)),
        tiny={"rows": 2, "nodes": 3, "vocabulary": 12},
        arguments=_penalized,
        least=lambda rows, nodes, vocabulary: Cost(8 * rows * nodes * (vocabulary + 1024)),
        floor="rows x nodes x (vocabulary + 1,024) x 8 bytes: logits read and written, tokens read",
    ),
    KernelCase(
        op="reject_tree",
        shapes=tuple(
            {"rows": rows, "nodes": 15, "vocabulary": size}
            for rows, size in ((1, 16_384), (1, 151_936), (8, 16_384))
        ),
        tiny={"rows": 2, "nodes": 7, "vocabulary": 12},
        arguments=_drafted,
        least=lambda rows, nodes, vocabulary: Cost(8 * rows * (2 * vocabulary + 1)),
        floor="rows x vocabulary x 16 bytes: p and q of one node, what is left written",
    ),
    KernelCase(
        op="best",
        shapes=({"rows": 1, "count": 1024}, {"rows": 16, "count": 1024}),
        tiny={"rows": 2, "count": 64},
        arguments=lambda rows, count: (torch.rand(rows, count), 60),
        least=lambda rows, count: Cost(rows * (4 * count + 8 * 60)),
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
        arguments=_caches,
        least=lambda rows, layers, width, path: Cost(8 * rows * layers * width * path),
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
        arguments=_attention,
        least=lambda rows, heads, key_heads, nodes, length: Cost(
            512 * rows * (key_heads * (length + nodes) + heads * nodes),
            512 * rows * heads * nodes * (length + nodes),
        ),
        floor="rows x 512 bytes x (key heads x (length + nodes) + heads x nodes): keys, values, queries",
    ),
    KernelCase(
        op="gated_delta_tree",
        shapes=({"rows": 1, "nodes": 16, "heads": 32}, {"rows": 1, "nodes": 64, "heads": 32}),
        tiny={"rows": 1, "nodes": 3, "heads": 1},
        arguments=_delta,
        least=lambda rows, nodes, heads: Cost(4 * rows * heads * (128 * 128 + nodes * (6 * 128 + 3))),
        floor="rows x heads x 4 bytes x (128 x 128 + nodes x 6 x 128): states and six vectors of a node",
    ),
    KernelCase(
        op="modulated_linear",
        shapes=HEADS,
        tiny=HEAD,
        arguments=_block,
        least=_block_cost,
        floor="width x (width x 2 + rows x 14) bytes: weights, rows, modulation, output",
    ),
    KernelCase(
        op="gated_linear",
        shapes=HEADS,
        tiny=HEAD,
        arguments=_gate,
        least=_block_cost,
        floor="width x (width x 2 + rows x 14) bytes: weights, rows, gates, output",
    ),
    KernelCase(
        op="denoising_update",
        shapes=({"rows": 2, "width": 16}, {"rows": 64, "width": 64}),
        tiny={"rows": 2, "width": 4},
        arguments=_transition,
        least=lambda rows, width: Cost(20 * rows * width),
        floor="rows x width x 5 x 4 bytes: state, two predictions, noise, next state",
    ),
    KernelCase(
        op="rms_norm",
        shapes=WIDTHS,
        tiny=HEAD,
        arguments=lambda **shape: _norm(**shape)[1:],
        least=lambda rows, width: Cost(4 * rows * width),
        floor="rows x width x 2 x 2 bytes: states and their norm",
    ),
    KernelCase(
        op="add_rms_norm",
        shapes=WIDTHS,
        tiny=HEAD,
        arguments=_norm,
        least=lambda rows, width: Cost(8 * rows * width),
        floor="rows x width x 4 x 2 bytes: states, residual, sum and its norm",
    ),
    KernelCase(
        op="rotate_into_cache",
        shapes=tuple(
            {"rows": rows, "heads": 32, "key_heads": 32, "nodes": nodes} for rows, nodes in ((1, 60), (8, 1))
        ),
        tiny={"rows": 1, "heads": 4, "key_heads": 2, "nodes": 3},
        arguments=_rotary,
        least=lambda rows, heads, key_heads, nodes: Cost(512 * rows * nodes * (heads + 2 * key_heads)),
        floor="rows x nodes x 512 bytes x (heads + 2 key heads), read and written",
    ),
    *(
        KernelCase(
            op=op,
            shapes=({"rows": 1, "width": 11_008}, {"rows": 60, "width": 11_008}),
            tiny=HEAD,
            arguments=lambda rows, width: _states(rows, 2 * width, 1)[0].chunk(2, -1),
            least=lambda rows, width: Cost(6 * rows * width),
            floor="rows x width x 3 x 2 bytes: gate, up and product",
        )
        for op in ("silu_mul", "gelu_mul")
    ),
    KernelCase(
        op="nearby_mass",
        shapes=tuple({"rows": 8, "vocabulary": 16_384, "neighbours": count} for count in (100, 1000)),
        tiny={"rows": 2, "vocabulary": 20, "neighbours": 4},
        arguments=_neighbours,
        least=lambda rows, vocabulary, neighbours: Cost(4 * vocabulary * (neighbours + 2 * rows)),
        floor="vocabulary x 4 bytes x (neighbours + 2 rows): the table once, masses in and out",
    ),
    KernelCase(
        op="nearby_prefix",
        shapes=tuple({"rows": 60, "vocabulary": 16_384, "neighbours": count} for count in (100, 1000)),
        tiny={"rows": 2, "vocabulary": 20, "neighbours": 4},
        arguments=_prefix,
        least=lambda rows, vocabulary, neighbours: Cost(rows * (8 * neighbours + 20)),
        floor="rows x neighbours x 8 bytes: ids and their masses",
    ),
    KernelCase(
        op="rank_ratio",
        shapes=({"rows": 32, "vocabulary": 16_384}, {"rows": 32, "vocabulary": 65_536}),
        tiny=FEW,
        arguments=lambda **shape: (*_two(**shape), 14),
        least=lambda rows, vocabulary: Cost(12 * rows * vocabulary),
        floor="rows x vocabulary x 12 bytes: p, q and ratios",
    ),
    KernelCase(
        op="rank_ratio_at",
        shapes=({"rows": 32, "vocabulary": 16_384}, {"rows": 96, "vocabulary": 65_536}),
        tiny=FEW,
        arguments=lambda **shape: (*_two(**shape), _token(**shape), 14),
        least=lambda rows, vocabulary: Cost(4 * rows * (vocabulary + 1)),
        floor="rows x vocabulary x 4 bytes: p",
    ),
    KernelCase(
        op="verify_chain",
        shapes=tuple(
            {"rows": rows, "nodes": 6, "count": count}
            for rows, count in ((1, 16_384), (16, 16_384), (16, 151_936), (16, 184_622))
        ),
        tiny={"rows": 2, "nodes": 3, "count": 8},
        arguments=_chains,
        least=lambda rows, nodes, count: Cost(2 * 4 * rows * count),
        floor="rows x count x 4 bytes, of p and of q, read",
    ),
    KernelCase(
        op="redraw",
        shapes=({"rows": 1, "places": 32, "count": 16_384}, {"rows": 8, "places": 32, "count": 65_536}),
        tiny={"rows": 2, "places": 4, "count": 8},
        arguments=_windows,
        least=lambda rows, places, count: Cost(2 * 4 * rows * places * count // 2),
        floor="half of rows x places x count x 4 bytes, of p and of q, read",
    ),
)
