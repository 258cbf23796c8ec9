"""A tiny CLIP of random weights, with its processor."""

from __future__ import annotations

import json
import string
from pathlib import Path

import torch
from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor, CLIPTokenizer

SIDE, WIDTH, SHARED, LENGTH = 32, 16, 8, 32


def save_clip(folder: Path) -> Path:
    """Write it to a folder; its tokens are letters."""
    letters = list(string.ascii_lowercase)
    tokens = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({token: index for index, token in enumerate(tokens)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    tower = {
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "projection_dim": SHARED,
    }
    ends = {"bos_token_id": len(tokens) - 2, "eos_token_id": len(tokens) - 1}
    text = {**tower, **ends, "vocab_size": len(tokens), "max_position_embeddings": LENGTH}
    config = CLIPConfig(
        text_config=text,
        vision_config={**tower, "image_size": SIDE, "patch_size": SIDE // 2},
        projection_dim=SHARED,
    )
    torch.manual_seed(0)
    CLIPModel(config).save_pretrained(folder)
    images = CLIPImageProcessor(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE})
    tokenizer = CLIPTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"))
    CLIPProcessor(images, tokenizer).save_pretrained(folder)
    return folder
