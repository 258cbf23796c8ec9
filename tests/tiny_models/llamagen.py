"""Tiny LlamaGen models of classes and captions as whole folders: transformer, VQ, text encoder, tokenizer."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers.models.autoencoders.vq_model import VQModel
from safetensors.torch import save_file
from transformers import T5Config, T5EncoderModel

from mmspec.families.llamagen.configuration import LlamaGenConfig
from mmspec.families.llamagen.modeling import LlamaGenForCausalLM

from .processors import tiny_tokenizer
from .weights import randomise

CODES, GRID, STRIDE, CLASSES = 48, 6, 4, 5
CAPTION_WIDTH, CAPTION_LENGTH = 16, 8
SEED = 6  # of 8 tried: greedy images of captions have 14 and 19 different codes


def tiny_llamagen(condition: str, seed: int = SEED, grid: int = GRID) -> LlamaGenForCausalLM:
    """A transformer of 2 layers; its images have `grid` x `grid` cells."""
    config = LlamaGenConfig(
        vocab_size=CODES,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        grid_size=grid,
        condition_type=condition,
        num_classes=CLASSES,
        caption_length=CAPTION_LENGTH,
        caption_dim=CAPTION_WIDTH,
    )
    model = LlamaGenForCausalLM(config)
    randomise(model, seed)
    if condition == "caption":
        noise = torch.Generator().manual_seed(seed)
        model.model.cls_embedding.uncond_embedding.normal_(generator=noise)
    model.generation_config.guidance_scale = 2.0
    model.generation_config.temperature = 1.0
    model.generation_config.top_k = 0
    model.generation_config.do_sample = True
    return model


def tiny_vq(seed: int = 0, codes: int = CODES, levels: int = 3) -> VQModel:
    """An image tokenizer of 4 x 4 pixels a cell with three levels, and of twice the side with each more."""
    with torch.random.fork_rng(devices=[]):
        vq = VQModel(
            block_out_channels=(8,) * levels,
            down_block_types=("DownEncoderBlock2D",) * levels,
            up_block_types=("UpDecoderBlock2D",) * levels,
            layers_per_block=1,
            latent_channels=4,
            vq_embed_dim=4,
            num_vq_embeddings=codes,
            norm_num_groups=4,
        )
    with torch.no_grad():
        for index, (_, weight) in enumerate(sorted(vq.named_parameters())):
            noise = torch.Generator().manual_seed(seed * 1000 + index)
            if weight.dim() > 1:
                weight.normal_(std=weight[0].numel() ** -0.5, generator=noise)
    return vq.eval()


def tiny_text_encoder(seed: int = 0, words: int = 128, width: int = CAPTION_WIDTH) -> T5EncoderModel:
    """A T5 encoder of one layer."""
    config = T5Config(
        vocab_size=words,
        d_model=width,
        d_kv=8,
        d_ff=16,
        num_layers=1,
        num_heads=2,
        relative_attention_num_buckets=8,
        dropout_rate=0.0,
    )
    with torch.random.fork_rng(devices=[]):
        model = T5EncoderModel(config)
    with torch.no_grad():
        for index, (_, weight) in enumerate(sorted(model.named_parameters())):
            if weight.dim() > 1:
                weight.normal_(std=0.5, generator=torch.Generator().manual_seed(seed * 1000 + index))
    return model.eval()


def save_llamagen(folder: Path, condition: str, seed: int = SEED, grid: int = GRID) -> Path:
    """Write the folder that `from_pretrained` loads."""
    tiny_llamagen(condition, seed, grid).save_pretrained(folder)
    vq = tiny_vq()
    vq.save_pretrained(folder / "vq")
    raw = vq.quantize.embedding.weight.detach() * 1.5
    save_file({"codebook": raw}, folder / "vq" / "raw_codebook.safetensors")
    if condition == "caption":
        tokenizer = tiny_tokenizer()
        tiny_text_encoder().save_pretrained(folder / "text_encoder")
        tokenizer.save_pretrained(folder / "tokenizer")
    return folder
