"""Tiny masked language models: LLaDA, SDAR and Dream, and their folders.

The last id of the vocabulary is the mask token. Their outputs vary from place to place although all open
places hold the same token: attention looks hard at positions, and the mask's own embedding says little.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from mmspec.families.masked_language.modeling import DreamConfig, LLaDAConfig, SDARConfig
from mmspec.families.masked_language.target import MaskedTarget

from .processors import VOCABULARY_SIZE, tiny_tokenizer
from .text import _sizes
from .weights import randomise, scale_head_to_entropy

CONFIGS: dict[str, type[Any]] = {"llada": LLaDAConfig, "sdar": SDARConfig, "dream": DreamConfig}
OWN = {"llada": {}, "sdar": {"head_dim": 8, "block_size": 4}, "dream": {}}


def tiny_masked_model(kind: str, vocab: int, seed: int, dtype: torch.dtype, nats: float) -> PreTrainedModel:
    """A model by the name of its config, with mean entropy `nats` at the places of random words."""
    config = CONFIGS[kind](**_sizes(vocab, 2), **OWN[kind], mask_token_id=vocab - 1)
    model: PreTrainedModel = randomise(AutoModelForCausalLM.from_config(config), seed).to(dtype)
    scale_head_to_entropy(model, nats)
    with torch.no_grad():
        model.get_input_embeddings().weight[vocab - 1] *= 0.1
        model.get_output_embeddings().weight[vocab - 1] *= 2.0  # likely, so that it shows where it is drawn
        for layer in model.model.layers:
            attention = layer.self_attn
            for part in ("q", "k"):  # where there is a norm, the matrix before it has no scale
                name = f"{part}_norm" if hasattr(attention, "q_norm") else f"{part}_proj"
                getattr(attention, name).weight.mul_(3.0)
    return model


def tiny_llada(
    vocab: int = 32, seed: int = 3, dtype: torch.dtype = torch.float64, nats: float = 2.0
) -> PreTrainedModel:
    """A LLaDA: Llama whose places all see each other."""
    return tiny_masked_model("llada", vocab, seed, dtype, nats)


def tiny_sdar(
    vocab: int = 32, seed: int = 3, dtype: torch.dtype = torch.float64, nats: float = 2.0
) -> PreTrainedModel:
    """An SDAR: Qwen3 in blocks of four, each of which sees itself and those before it."""
    return tiny_masked_model("sdar", vocab, seed, dtype, nats)


def tiny_dream(
    vocab: int = 32, seed: int = 3, dtype: torch.dtype = torch.float64, nats: float = 2.0
) -> PreTrainedModel:
    """A Dream: Qwen2 whose places all see each other, and each predicts the next."""
    return tiny_masked_model("dream", vocab, seed, dtype, nats)


def masked_target(model: PreTrainedModel, **settings: object) -> MaskedTarget:
    """The target of a copy of a model whose text config has these settings."""
    model = copy.deepcopy(model)
    for name, value in settings.items():
        setattr(model.config.get_text_config(decoder=True), name, value)
    return MaskedTarget(model)


#: By the name that tests have for them.
MASKED_MODELS = {"llada": tiny_llada, "sdar": tiny_sdar, "dream": tiny_dream}


def save_masked(kind: str, folder: str | Path) -> Path:
    """Write a masked model, and the tokenizer of the text models, as a checkpoint folder; return it."""
    MASKED_MODELS[kind](VOCABULARY_SIZE).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return Path(folder)
