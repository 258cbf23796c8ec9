"""Tiny models that draw images token by token, with tokenizers: Janus, both Emu3, Anole, Lumina-mGPT.

    model, tokenizer = tiny_emu3()

Seeded, float32, 24 codes, random weights. An image has 4 x 4 cells where the size is the model's own (Janus:
64 pixels, Anole: 32). The tokenizers are word-level; image tokens lie behind their words.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    ChameleonConfig,
    ChameleonForConditionalGeneration,
    Emu3Config,
    Emu3ForConditionalGeneration,
    GenerationConfig,
    JanusConfig,
    JanusForConditionalGeneration,
    LlamaConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from mmspec.families.emu3.emu3_5 import Emu3p5Config, Emu3p5ForCausalLM

from .processors import Special, tiny_tokenizer
from .weights import randomise

CODES = 24
FIRST_CODE = 140  # behind the words, with a gap
TOKENS = 180
BODY: dict[str, Any] = dict(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    tie_word_embeddings=False,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
Drawer = tuple[Any, PreTrainedTokenizerFast]


def tiny_janus(seed: int = 4) -> Drawer:
    """Janus: 4 x 4 cells of 16 pixels; the table and the head of image tokens are its own."""
    names = ("<|User|>", "<|Assistant|>", "<begin_of_image>")
    tokenizer = tiny_tokenizer(Special("<image>", more=names))
    vision = dict(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        mlp_ratio=2.0,
        image_size=64,
        patch_size=16,
        projection_dim=32,
        num_image_tokens=16,
    )
    vq = dict(
        embed_dim=8,
        num_embeddings=CODES,
        latent_channels=16,
        base_channels=32,
        channel_multiplier=[1, 1, 1, 1, 1],
        num_res_blocks=1,
        projection_dim=32,
        image_token_embed_dim=32,
    )
    config = JanusConfig(
        text_config=LlamaConfig(**BODY, vocab_size=TOKENS).to_dict(),
        vision_config=vision,
        vq_config=vq,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        tie_word_embeddings=False,
    )
    model = randomise(JanusForConditionalGeneration(config), seed)
    model.model.generation_head.vision_head.weight.mul_(6)
    boi = tokenizer.convert_tokens_to_ids("<begin_of_image>")
    model.generation_config = GenerationConfig(
        pad_token_id=0, bos_token_id=1, eos_token_id=2, generation_kwargs={"boi_token_id": boi}
    )
    return model, tokenizer


def tiny_emu3(seed: int = 1) -> Drawer:
    """Emu3: cells of 2 pixels, any grid at least 3 wide."""
    names = ("<|image start|>", "<|image token|>", "<|image end|>", "<|extra_200|>", "<|extra_201|>")
    tokenizer = tiny_tokenizer(Special("<image>", more=names))
    codes = {f"<|visual token {code:06}|>": FIRST_CODE + code for code in range(CODES)}
    vq = dict(
        codebook_size=CODES,
        embed_dim=4,
        latent_channels=4,
        base_channels=32,
        channel_multiplier=[1, 2],
        num_res_blocks=1,
        attn_resolutions=[1],
        hidden_size=64,
        temporal_downsample_factor=2,
    )
    config = Emu3Config(
        text_config={**BODY, "vocab_size": TOKENS, "attention_dropout": 0.0},
        vq_config=vq,
        vocabulary_map={**tokenizer.get_vocab(), **codes},
        tie_word_embeddings=False,
    )
    return randomise(Emu3ForConditionalGeneration(config), seed), tokenizer


def tiny_emu3_5(seed: int = 1) -> Drawer:
    """Emu3.5: its codes are the last tokens, behind the image's end; any grid."""
    names = ("<|extra_200|>", "<|extra_100|>", "<|extra_203|>", "<|image token|>", "<|image start|>")
    tokenizer = tiny_tokenizer(Special("<image>", more=(*names, "<|image end|>")))
    known = tokenizer.get_vocab()
    config = Emu3p5Config(
        **BODY,
        head_dim=8,
        vocab_size=FIRST_CODE + CODES,
        eol_token_id=known["<|extra_200|>"],
        img_token_id=known["<|image token|>"],
        boi_token_id=known["<|image start|>"],
        eoi_token_id=FIRST_CODE - 1,
    )
    return randomise(Emu3p5ForCausalLM(config), seed), tokenizer


def tiny_anole(seed: int = 6) -> Drawer:
    """Anole: 4 x 4 cells of 8 pixels; the ids of its image tokens are in no order."""
    order = torch.randperm(CODES, generator=torch.Generator().manual_seed(0)).tolist()
    return tiny_chameleon([FIRST_CODE + place for place in order], seed)


def tiny_lumina(seed: int = 0) -> Drawer:
    """Lumina-mGPT: cells of 8 pixels, size tokens for 32 and 64 pixels."""
    model, tokenizer = tiny_chameleon(list(range(FIRST_CODE, FIRST_CODE + CODES)), seed)
    model.config.architectures = ["ChameleonXLLMXForConditionalGeneration"]
    return model, tokenizer


def tiny_chameleon(code_ids: list[int], seed: int) -> Drawer:
    sizes = [f"<reserved{8800 + n:05}>" for n in (1, 2, 3)]
    names = ("<racm3:break>", "<eoss>", "<reserved08706>", "<reserved08799>", *sizes)
    tokenizer = tiny_tokenizer(Special("<image>", more=names))
    letters = str.maketrans("0123456789", "ABCDEFGHIJ")
    codes = {f"IMGIMG{str(code).translate(letters)}Z": token for code, token in enumerate(code_ids)}
    config = ChameleonConfig(
        **BODY,
        vocab_size=TOKENS,
        vocabulary_map={**tokenizer.get_vocab(), **codes},
        vq_config=dict(
            embed_dim=8,
            num_embeddings=CODES,
            latent_channels=16,
            resolution=32,
            base_channels=32,
            channel_multiplier=[1, 1, 1, 2],
            num_res_blocks=1,
        ),
    )
    model: PreTrainedModel = randomise(ChameleonForConditionalGeneration(config), seed)
    return model, tokenizer
