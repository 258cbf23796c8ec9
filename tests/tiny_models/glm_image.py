"""GLM-Image, its autoregressive half: a preview and an image in one output."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GlmImageConfig, GlmImageForConditionalGeneration, PreTrainedModel

from .weights import randomise

__all__ = ["glm_image_inputs", "tiny_glm_image"]

CODES, BEGINNING, END, PLACEHOLDER = 100, 100, 101, 201


def tiny_glm_image(seed: int = 5) -> PreTrainedModel:
    """100 codes, marks 100 and 101, a head of 128 of the 240 tokens; words are 110 to 198."""
    config = GlmImageConfig(
        text_config=dict(
            vocab_size=240,
            vision_vocab_size=128,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            pad_token_id=200,
            eos_token_id=END,
            rope_parameters=dict(
                rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5, mrope_section=[1, 1, 2]
            ),
        ),
        vision_config=dict(
            depth=1, hidden_size=32, num_heads=2, intermediate_size=32, image_size=64, patch_size=8
        ),
        vq_config=dict(embed_dim=16, num_embeddings=CODES, latent_channels=32),
        image_token_id=PLACEHOLDER,
        image_start_token_id=BEGINNING,
        image_end_token_id=END,
    )
    return randomise(GlmImageForConditionalGeneration(config), seed, silent_ids=range(CODES, 128))


def glm_image_inputs(
    rows: int, columns: int, preview: tuple[int, int] | None = (2, 3), words: int = 9, seed: int = 0
) -> dict[str, Any]:
    """A prompt of words for an image of that many cells; without a preview, it is about an image of 2 x 2."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(110, 199, (1, words), generator=generator)
    start = torch.tensor([[BEGINNING]])
    if preview is not None:
        grids = [[1, rows, columns], [1, *preview]]
        return _inputs(torch.cat([ids, start], 1), grids)
    source = torch.tensor([[BEGINNING, *[PLACEHOLDER] * 4, END]])
    pixels = torch.randn(4, 3 * 8 * 8, generator=generator)
    inputs = _inputs(torch.cat([ids[:, :3], source, ids[:, 3:], start], 1), [[1, 2, 2], [1, rows, columns]])
    return {**inputs, "pixel_values": pixels}


def _inputs(ids: torch.Tensor, grids: list[list[int]]) -> dict[str, Any]:
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "image_grid_thw": torch.tensor(grids),
        "images_per_sample": torch.tensor([len(grids)]),
    }
