"""Randomly initialised checkpoints in the key layout of the official LlamaGen files (2406.06525)."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

WIDTH, HEADS, VOCABULARY, GRID = 32, 2, 48, 4
CLASSES = {"classes": 5}
CAPTIONS = {"slots": 6, "caption_width": 12}
IMAGE_SIZE = 16 * GRID


def transformer_shapes(
    layers: int = 2,
    width: int = WIDTH,
    heads: int = HEADS,
    kv_heads: int | None = None,
    hidden: int = 48,
    vocabulary: int = VOCABULARY,
    classes: int | None = None,
    slots: int = 0,
    caption_width: int = 0,
) -> dict[str, tuple[int, ...]]:
    stacked = width + 2 * (kv_heads or heads) * (width // heads)
    shapes: dict[str, tuple[int, ...]] = {"tok_embeddings.weight": (vocabulary, width)}
    if classes is not None:
        shapes["cls_embedding.embedding_table.weight"] = (classes + 1, width)
    else:
        shapes["cls_embedding.uncond_embedding"] = (slots, caption_width)
        shapes["cls_embedding.cap_proj.fc1.weight"] = (width, caption_width)
        shapes["cls_embedding.cap_proj.fc2.weight"] = (width, width)
    for index in range(layers):
        layer = f"layers.{index}."
        shapes[layer + "attention.wqkv.weight"] = (stacked, width)
        shapes[layer + "attention.wo.weight"] = (width, width)
        shapes[layer + "feed_forward.w1.weight"] = (hidden, width)
        shapes[layer + "feed_forward.w3.weight"] = (hidden, width)
        shapes[layer + "feed_forward.w2.weight"] = (width, hidden)
        shapes[layer + "attention_norm.weight"] = (width,)
        shapes[layer + "ffn_norm.weight"] = (width,)
    return {**shapes, "norm.weight": (width,), "output.weight": (vocabulary, width)}


def transformer_state(seed: int = 0, **settings: Any) -> dict[str, Tensor]:
    return fill(transformer_shapes(**settings), seed, embeddings=("tok_embeddings", "cls_embedding.e"))


#: Tensors that replace those of a file; None removes a tensor.
Changes = dict[str, Tensor | None]


def changed(tensors: dict[str, Tensor], changes: Changes) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in (tensors | changes).items() if tensor is not None}


def fill(shapes: dict[str, tuple[int, ...]], seed: int, embeddings: tuple[str, ...]) -> dict[str, Tensor]:
    """Matrices at 1 / sqrt(fan-in), embeddings and norms at 1, biases about 0, a head of clear winners."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        if name.startswith(embeddings):
            state[name] = noise
        elif len(shape) == 1:
            state[name] = 0.1 * noise + ("norm" in name and name.endswith("weight"))
        else:
            state[name] = noise / math.sqrt(math.prod(shape[1:])) * (3 if name == "output.weight" else 1)
    return state


def store(
    folder: Path, tensors: dict[str, Tensor], config: dict[str, Any], file: str = "pytorch_model.bin"
) -> Path:
    """A folder as authors publish it: weights in a pickle or in safetensors, beside their config.json."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if file.endswith(".safetensors"):
        save_file(tensors, folder / file, metadata={"format": "pt"})
    else:
        torch.save(tensors, folder / file)
    return folder
