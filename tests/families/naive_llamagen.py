"""LlamaGen's forward as its paper and files define it: one row, plain loops, float64, no cache, no mask."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import torch
from torch import Tensor

EPS, BASE = 1e-5, 10000.0


def class_prefix(state: dict[str, Tensor], label: int) -> Tensor:
    return state["cls_embedding.embedding_table.weight"][label : label + 1].double()


def caption_prefix(state: dict[str, Tensor], features: Tensor) -> Tensor:
    first, second = (state[f"cls_embedding.cap_proj.fc{index}.weight"].double() for index in (1, 2))
    inner = features.double() @ first.T
    inner = 0.5 * inner * (1 + torch.tanh(math.sqrt(2 / math.pi) * (inner + 0.044715 * inner**3)))
    return inner @ second.T


def naive_logits(
    state: dict[str, Tensor], heads: int, grid: int, prefix: Tensor, tokens: Sequence[int], padded: int = 0
) -> Tensor:
    """[C + len(tokens), V] logits after every place; the first `padded` slots see only themselves."""
    state = {name: tensor.double() for name, tensor in state.items()}
    slots = len(prefix)
    rows = [*prefix, *(state["tok_embeddings.weight"][token] for token in tokens)]
    depth = 1 + max(int(match[1]) for name in state if (match := re.match(r"layers\.(\d+)", name)))
    for index in range(depth):
        rows = block(state, f"layers.{index}.", heads, grid, rows, slots, padded)
    return torch.stack([state["output.weight"] @ norm(row, state["norm.weight"]) for row in rows])


def block(
    state: dict[str, Tensor], layer: str, heads: int, grid: int, rows: list[Tensor], slots: int, padded: int
) -> list[Tensor]:
    width = len(rows[0])
    size = width // heads
    stacked = state[layer + "attention.wqkv.weight"]
    kv_width = (len(stacked) - width) // 2
    group = width // kv_width
    wq, wk, wv = stacked.split([width, kv_width, kv_width])
    normed = [norm(row, state[layer + "attention_norm.weight"]) for row in rows]
    queries, keys, values = ([weight @ row for row in normed] for weight in (wq, wk, wv))
    attended = []
    for place in range(len(rows)):
        seen = [other for other in range(padded, place + 1)] or [place]
        parts = []
        for head in range(heads):
            own = slice(head * size, (head + 1) * size)
            shared = slice(head // group * size, (head // group + 1) * size)
            query = rotated(queries[place][own], place, slots, grid)
            scores = [query @ rotated(keys[other][shared], other, slots, grid) for other in seen]
            weights = torch.softmax(torch.stack(scores) / math.sqrt(size), dim=0)
            parts.append(sum(w * values[other][shared] for w, other in zip(weights, seen, strict=True)))
        attended.append(state[layer + "attention.wo.weight"] @ torch.cat(parts))
    rows = [row + new for row, new in zip(rows, attended, strict=True)]
    w1, w2, w3 = (state[f"{layer}feed_forward.w{index}.weight"] for index in (1, 2, 3))
    output = []
    for row in rows:
        inner = norm(row, state[layer + "ffn_norm.weight"])
        gate = w1 @ inner
        output.append(row + w2 @ (gate / (1 + torch.exp(-gate)) * (w3 @ inner)))
    return output


def norm(row: Tensor, weight: Tensor) -> Tensor:
    return row / torch.sqrt((row * row).mean() + EPS) * weight


def rotated(vector: Tensor, place: int, slots: int, grid: int) -> Tensor:
    """Adjacent pairs turn, the first half of them with the row, the second with the column."""
    cell = place - slots
    if not 0 <= cell < grid * grid:
        return torch.zeros_like(vector)
    pairs = len(vector) // 2
    turned = vector.clone()
    for pair in range(pairs):
        along, index = (cell // grid, pair) if pair < pairs // 2 else (cell % grid, pair - pairs // 2)
        angle = along * BASE ** (-2 * index / pairs)
        x, y = vector[2 * pair], vector[2 * pair + 1]
        turned[2 * pair] = x * math.cos(angle) - y * math.sin(angle)
        turned[2 * pair + 1] = x * math.sin(angle) + y * math.cos(angle)
    return turned
