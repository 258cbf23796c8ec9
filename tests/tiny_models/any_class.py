"""Tiny models of any class that the auto classes know, made by shrinking the values of its default config."""

from __future__ import annotations

import re
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
)

from .weights import randomise

VOCABULARY, FIRST_SPECIAL, LAYERS, HEAD = 128, 100, 4, 16
MOST_PARAMETERS = 20_000_000
# the last pattern that a name matches counts; values are only ever made smaller
SIZES = {
    r".*hidden_size|.*embd|d_model|.*dim|.*embed.*|width": 64,
    r".*intermediate_size.*|.*ffn_dim|.*ffn_hidden_size|n_inner|d_ff|.*mlp_dim": 96,
    r".*heads|n_head": 4,
    r".*rank|.*head_dim|d_kv|.*kv_channels|d_head": HEAD,
    r"rotary_dim|.*rope_head_dim|hidden_size_per_layer_input|.*window.*": 8,
    r".*layers|n_layer": LAYERS,
    r"depth|.*experts_per_tok.*|moe_topk|.*kv_shared_layers": 2,
    r".*experts": 4,
    r".*group|first_k_dense_replace": 1,
    r".*vocab_size.*": VOCABULARY,
    r".*position_embeddings|n_positions|n_ctx|.*seq_len.*|seq_length": 512,
    r"num_feat_extract_layers": 7,  # one for each entry of `conv_dim`
}
SPECIAL = r".*(token_ids?|token_index|_id)"
BANDS = ("num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim")  # of a sound's features


def generative_classes() -> list[str]:
    """Names of the classes that write text: from text, images or sound."""
    tables = (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    )
    names = [name for table in tables for name in table.values()]
    return sorted({one for name in names for one in ([name] if isinstance(name, str) else name)})


def tiny_of_class(name: str) -> PreTrainedModel:
    """A model of that class with random weights; some cannot be built so, and fail in their own ways."""
    made: Any = getattr(transformers, name)
    config = shrink(made.config_class())
    if config.model_type == "moonshine_streaming":  # its default lacks what its attention reads
        config.num_key_value_heads = config.num_attention_heads
    if config.model_type == "qwen3_omni_moe_thinker":  # which checkpoints state
        config.vision_start_token_id = FIRST_SPECIAL
    if hasattr(config, "is_decoder") and not config.is_encoder_decoder:
        config.is_decoder = True
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in made(config).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"{name}: {size} parameters after shrinking")
    model = randomise(made(config), seed=1)
    if config.is_encoder_decoder:  # without forced tokens, which trees of the bare loop would not have
        model.generation_config.update(forced_bos_token_id=None, forced_eos_token_id=None)
        model.generation_config.update(decoder_start_token_id=3, pad_token_id=0)
    return model


def text_inputs(seed: int = 1, length: int = 21) -> dict[str, torch.Tensor]:
    """A prompt of words."""
    ids = torch.randint(5, FIRST_SPECIAL, (1, length), generator=torch.Generator().manual_seed(seed))
    ids[0, 12:20] = ids[0, 2:10]  # longer than a window of 8, and with something to copy
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def encoder_inputs(model: PreTrainedModel, seed: int = 1) -> dict[str, torch.Tensor]:
    """Words, an image or a sound for the encoder of a model; another seed gives another length."""
    config, generator = model.config, torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {"input_values": (1, 3300 + 700 * seed)}
    if model.main_input_name == "input_features":
        named = vars(config) | vars(getattr(config, "encoder_config", config))
        bands = next(named[name] for name in BANDS if name in named)
        shapes["input_features"] = (1, 64 + 8 * seed, bands)
        if config.model_type == "whisper":
            shapes["input_features"] = (1, bands, 2 * config.max_source_positions)
    elif model.main_input_name == "pixel_values":
        shapes["pixel_values"] = (1, 3, config.encoder.image_size, config.encoder.image_size)
    elif model.main_input_name == "input_ids":
        return text_inputs(seed, 20 + seed)
    name = "input_values" if model.main_input_name == "inputs" else model.main_input_name
    return {name: torch.randn(shapes[name], generator=generator)}


def shrink(config: PreTrainedConfig) -> PreTrainedConfig:
    """A config of the same class with the same structure and small sizes."""
    values = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    for name in ("transformers_version", "architectures", "dtype", "ignore_keys_at_rope_validation"):
        values.pop(name, None)
    layers = getattr(config, "num_hidden_layers", None)
    heads = getattr(config, "num_attention_heads", None)
    small = {name: smaller(name, value, layers) for name, value in values.items()}
    for name in ("num_key_value_heads", "num_kv_heads"):
        if values.get(name) is not None:
            small[name] = 4 if values[name] == heads else min(values[name], 2)
    if "qk_rope_head_dim" in small and "head_dim" in small:
        small["head_dim"] = small["qk_rope_head_dim"]
    elif small.get("head_dim", HEAD) is None:
        small["head_dim"] = HEAD
    if config.model_type == "fun_asr_nano":
        small["adaptor_config"].intermediate_size = small["text_config"].hidden_size // 4
    return type(config)(**small | {"tie_word_embeddings": False})


def smaller(name: str, value: Any, layers: int | None) -> Any:
    if isinstance(value, PreTrainedConfig):
        return shrink(value)
    if isinstance(value, dict):
        rotated = int(HEAD * (value.get("partial_rotary_factor") or 1.0)) // 2
        axes = len(value.get("mrope_section") or ())
        split = {"mrope_section": [(rotated + axis) // axes for axis in range(axes)]} if axes else {}
        return {key: smaller(str(key), part, layers) for key, part in value.items()} | split
    if isinstance(value, list) and layers and len(value) == layers:  # one value for every layer
        kinds = list({str(part): part for part in value}.values())[:LAYERS]
        return [kinds[index % len(kinds)] for index in range(LAYERS)]
    if isinstance(value, list) and re.fullmatch(SPECIAL, name):
        return [special(part) for part in value]
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    if re.fullmatch(SPECIAL, name):
        return special(value)
    sizes = [size for pattern, size in SIZES.items() if re.fullmatch(pattern, name)]
    return min(value, sizes[-1]) if sizes and value > 0 else value


def special(token: int) -> int:
    """A special token's id within the small vocabulary, behind all words."""
    return token if token < FIRST_SPECIAL else FIRST_SPECIAL + token % (VOCABULARY - FIRST_SPECIAL - 1)
