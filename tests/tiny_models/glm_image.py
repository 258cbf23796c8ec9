"""GLM-Image, its autoregressive half: a preview and an image in one output."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    GlmImagePipeline,
    GlmImageTransformer2DModel,
)
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    ByT5Tokenizer,
    GlmImageConfig,
    GlmImageForConditionalGeneration,
    GlmImageImageProcessor,
    GlmImageProcessor,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5EncoderModel,
)

from .weights import randomise

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


def tiny_glm_pipeline(seed: int = 5) -> Any:
    """A whole `GlmImagePipeline` of diffusers; 64 by 64 pixels are 256 tokens of preview, and 4."""
    kinds = {"image_token": "<|image|>", "grid_bos_token": "<sop>", "grid_eos_token": "<eop>"}
    words = ["<pad>", *(f"<code {index}>" for index in range(1, BEGINNING)), "<|dit_token_16384|>", "<end>"]
    words += [f"<unused {index}>" for index in range(len(words), 110)]
    words += [*"0123456789", "16"]
    words += ["a", "red", "green", "blue", "circle", "square", "on", "the", "small"]
    vocabulary = {word: index for index, word in enumerate(words)} | {kinds["image_token"]: PLACEHOLDER}
    vocabulary |= {"<unk>": 199, "<sop>": 202, "<eop>": 203}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=words[BEGINNING],
        pad_token="<pad>",
        unk_token="<unk>",
        padding_side="left",
        **kinds,
    )
    template = (
        "{% for message in messages %}{% for part in message['content'] %}"
        "{{ part['text'] if part['type'] == 'text' else '<|image|>' }}{% endfor %}{% endfor %}"
    )
    images = GlmImageImageProcessor(patch_size=8, temporal_patch_size=1, merge_size=1)
    torch.manual_seed(seed)
    text = T5Config(vocab_size=384, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4)
    return GlmImagePipeline(
        tokenizer=ByT5Tokenizer(),
        processor=GlmImageProcessor(images, tokenizer, chat_template=template),
        text_encoder=T5EncoderModel(text).eval(),
        vision_language_encoder=tiny_glm_image(seed),
        vae=AutoencoderKL(
            in_channels=3,
            out_channels=3,
            down_block_types=["DownEncoderBlock2D"] * 4,
            up_block_types=["UpDecoderBlock2D"] * 4,
            block_out_channels=[8, 8, 8, 8],
            layers_per_block=1,
            norm_num_groups=4,
            latent_channels=4,
            latents_mean=[0.0] * 4,
            latents_std=[1.0] * 4,
        ).eval(),
        transformer=GlmImageTransformer2DModel(
            patch_size=2,
            in_channels=4,
            out_channels=4,
            num_layers=1,
            attention_head_dim=8,
            num_attention_heads=4,
            text_embed_dim=32,
            time_embed_dim=32,
            condition_dim=8,
            prior_vq_quantizer_codebook_size=CODES,
        ).eval(),
        scheduler=FlowMatchEulerDiscreteScheduler(),
    )
