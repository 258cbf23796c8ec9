"""Folders of a small NextStep and a small MAR with random weights, as users have them."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL

from mmspec.families.mar.modeling import MARConfig, MARForImageGeneration
from mmspec.families.nextstep.modeling import SPECIAL_TOKENS, NextStepConfig, NextStepForImageGeneration
from reference.latent_model import build_latent_tokenizer

SIDE, SIZE, CLASSES = 4, 4, 5


def random_weights(model: Any, seed: int) -> Any:
    """Draw the weights anew: those of heads begin at zero."""
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        weight.data = torch.randn(weight.shape, generator=generator) * 0.2
    return model.eval()


def autoencoder(channels: int = SIZE, scaling_factor: float = 0.5) -> AutoencoderKL:
    """An autoencoder of 2 x 2 pixels."""
    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 8),
        norm_num_groups=4,
        latent_channels=channels,
        scaling_factor=scaling_factor,
    )
    random: AutoencoderKL = random_weights(vae, 7)
    return random


def nextstep(seed: int = 0, **changed: Any) -> NextStepForImageGeneration:
    """A NextStep that draws 4 x 4 tokens of 4 numbers."""
    vocabulary = build_latent_tokenizer().get_vocab()
    settings: dict[str, Any] = {
        "vocab_size": len(vocabulary),
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "latent_size": SIDE,
        "latent_patch_size": 1,
        "latent_channels": SIZE,
        "fm_head_dim": 16,
        "fm_head_layers": 1,
        "use_gen_pos_embed": True,
        "gen_pos_grid": SIDE,
        "max_position_embeddings": 64,
        "boi": vocabulary[SPECIAL_TOKENS[1]],
    }
    model: NextStepForImageGeneration = random_weights(
        NextStepForImageGeneration(NextStepConfig(**settings | changed)), seed
    )
    return model


def mar(seed: int = 0, **changed: Any) -> MARForImageGeneration:
    """A MAR of five classes that draws 4 x 4 tokens of 4 numbers."""
    settings: dict[str, Any] = {
        "hidden_size": 16,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "num_attention_heads": 2,
        "token_size": SIZE,
        "grid_size": SIDE,
        "buffer_size": 2,
        "num_classes": CLASSES,
        "head_width": 16,
        "head_depth": 1,
    }
    model: MARForImageGeneration = random_weights(
        MARForImageGeneration(MARConfig(**settings | changed)), seed
    )
    return model


def save(model: Any, folder: Path, vae: AutoencoderKL | None = None) -> Path:
    """Write a model as a folder, with its tokenizer and autoencoder."""
    model.save_pretrained(folder)
    if isinstance(model, NextStepForImageGeneration):
        build_latent_tokenizer().save_pretrained(folder)
    if vae is not None:
        vae.save_pretrained(folder / "vae")
    return folder


@functools.cache
def folder_of(kind: str) -> Path:
    """A folder of "nextstep", "mar", or a smaller draft of either ("nextstep-draft", "mar-draft")."""
    place = Path(tempfile.mkdtemp(prefix="continuous-")) / kind
    build: Any = nextstep if kind.startswith("nextstep") else mar
    if kind.endswith("draft"):
        return save(build(seed=1, scaling_factor=0.5), place)
    return save(build(), place, autoencoder())
