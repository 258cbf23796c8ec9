"""LlamaGen's forward as its paper and files define it: one row, float64, no cache."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tests.families.parallel_layout import State, doubled, llama, rms

BASE = 10000.0


def class_prefix(state: dict[str, Tensor], label: int) -> Tensor:
    return state["cls_embedding.embedding_table.weight"][label : label + 1].double()


def caption_prefix(state: dict[str, Tensor], features: Tensor) -> Tensor:
    first, second = (state[f"cls_embedding.cap_proj.fc{index}.weight"].double() for index in (1, 2))
    inner = features.double() @ first.T
    inner = 0.5 * inner * (1 + torch.tanh(math.sqrt(2 / math.pi) * (inner + 0.044715 * inner**3)))
    return inner @ second.T


def naive_logits(state: State, prefix: Tensor, tokens: Sequence[int], padded: int = 0) -> Tensor:
    """[C + len(tokens), V] logits after every place; the first `padded` slots see only themselves."""
    state = doubled(state)
    rows = torch.cat([prefix, state["tok_embeddings.weight"][list(tokens)]])
    sees = torch.ones(len(rows), len(rows), dtype=torch.bool).tril()
    sees[:, :padded] = False
    sees.fill_diagonal_(True)
    states = llama(state, rows, [None] * len(prefix) + list(range(len(tokens))), sees)
    return rms(states[-1], state["norm.weight"]) @ state["output.weight"].T


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
