"""A tiny DiffusionGemma with sliding and full attention, experts, and a vision encoder."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf
from transformers import PreTrainedModel

from .weights import randomise

HAS_DIFFUSION_GEMMA = hasattr(hf, "DiffusionGemmaForBlockDiffusion")
IMAGE, BEGIN, END = 60, 61, 62  # ids of an image's tokens


def tiny_diffusion_gemma(
    canvas_length: int = 6,
    window: int = 8,
    vocab: int = 64,
    seed: int = 21,
    dtype: torch.dtype = torch.float32,
) -> PreTrainedModel:
    """A model of canvases of noise; its words vary from place to place and step to step."""
    text: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "global_head_dim": 16,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 16,
        "sliding_window": window,
        "layer_types": ["sliding_attention", "full_attention"],
        "use_bidirectional_attention": "vision",
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
    }
    vision = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
    config = hf.DiffusionGemmaConfig(
        text_config=text,
        vision_config=vision,
        canvas_length=canvas_length,
        image_token_id=IMAGE,
        boi_token_id=BEGIN,
        eoi_token_id=END,
    )
    model: PreTrainedModel = hf.DiffusionGemmaForBlockDiffusion(config)
    return randomise(model, seed).to(dtype).eval()
