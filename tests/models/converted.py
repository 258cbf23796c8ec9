"""Official checkpoints on disk, converted and loaded again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from mmspec.models.llamagen import LlamaGenForCausalLM
from mmspec.models.llamagen.conversion import convert_checkpoint
from tests.models.official_layout import HEADS, IMAGE_SIZE


def convert_and_load(
    folder: Path, content: Any, *, heads: int = HEADS, name: str = "tiny.pt", **loading: Any
) -> LlamaGenForCausalLM:
    """Save as a pickle, convert, load by the auto class."""
    torch.save(content, folder / name)
    size = {} if name != "tiny.pt" else {"image_size": IMAGE_SIZE}
    convert_checkpoint(folder / name, folder / "converted", num_heads=heads, **size)
    return AutoModelForCausalLM.from_pretrained(folder / "converted", **loading)


def same_weights(model: LlamaGenForCausalLM, state: dict[str, Tensor]) -> bool:
    """Whether the model's weights are those of the official state dict."""
    own = model.state_dict()
    layers = [f"model.layers.{index}." for index in range(model.config.num_hidden_layers)]
    pairs = [
        ("tok_embeddings.weight", own["model.embed_tokens.weight"]),
        ("norm.weight", own["model.norm.weight"]),
        ("output.weight", own["lm_head.weight"]),
    ]
    pairs += [(n.removeprefix("model."), t) for n, t in own.items() if n.startswith("model.cls_embedding.")]
    for index, layer in enumerate(layers):
        official = f"layers.{index}."
        stacked = torch.cat([own[f"{layer}self_attn.{part}_proj.weight"] for part in "qkv"])
        pairs += [
            (official + "attention.wqkv.weight", stacked),
            (official + "attention.wo.weight", own[layer + "self_attn.o_proj.weight"]),
            (official + "feed_forward.w1.weight", own[layer + "mlp.gate_proj.weight"]),
            (official + "feed_forward.w2.weight", own[layer + "mlp.down_proj.weight"]),
            (official + "feed_forward.w3.weight", own[layer + "mlp.up_proj.weight"]),
            (official + "attention_norm.weight", own[layer + "input_layernorm.weight"]),
            (official + "ffn_norm.weight", own[layer + "post_attention_layernorm.weight"]),
        ]
    return {name for name, _ in pairs} == {*state} and all(
        torch.equal(tensor, state[name]) for name, tensor in pairs
    )
