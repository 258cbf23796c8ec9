"""The layer of a published EAGLE head as its config.json describes it, by each author in another way."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from mmspec.models.llamagen import LlamaGenConfig

__all__ = ["is_lantern", "layer_described"]

logger = logging.getLogger(__name__)

#: LANTERN's words for what its drafters for LlamaGen were trained on.
CONDITIONS = {"t2i": "caption", "t2i2": "caption", "c2i": "class"}
UNSAID = {"num_key_value_heads": None, "rms_norm_eps": 1e-6}  # what their code takes where nothing is said
CELLS = {"t2i": 256, "t2i2": 1024, "c2i": 576}
SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
    *("hidden_act", "rms_norm_eps"),
)


def is_lantern(stored: Mapping[str, Any]) -> bool:
    """True if a config.json is that of one of LANTERN's drafters for LlamaGen (2410.03355)."""
    return stored.get("model_type") == "llama" and stored.get("input_type") in CONDITIONS


def layer_described(stored: Mapping[str, Any], target: PreTrainedConfig) -> PreTrainedConfig:
    """The config of the language model that the layer of a head is of.

    Args:
        stored: its config.json. Its sizes may stand beside `model_type` though transformers nests those of
            that type: then they are those of the language model all the same (MSD, ViSpec).
        target: of what it is to draft for.

    Raises:
        TypeError, ValueError, AttributeError: it cannot be understood; the message says why.
    """
    text = target.get_text_config(decoder=True)
    if is_lantern(stored):
        return _layer_of_llamagen(stored, text)
    table = {name: value for name, value in stored.items() if name not in ("model_type", "visual")}
    kind = str(stored.get("model_type"))
    parts = CONFIG_MAPPING[kind].sub_configs if kind in CONFIG_MAPPING else {}
    if "text_config" in parts and "text_config" not in table and "hidden_size" in table:
        usual = CONFIG_MAPPING[kind]().get_text_config(decoder=True).model_type
        kind = text.model_type if kind == target.model_type else usual
        table = {name: value for name, value in table.items() if not name.endswith("_config")}
    return AutoConfig.for_model(kind, **table).get_text_config(decoder=True)


def _layer_of_llamagen(stored: Mapping[str, Any], text: PreTrainedConfig) -> PreTrainedConfig:
    """LlamaGen's own layer, of those sizes: its positions are those of the target's raster."""
    condition = CONDITIONS[stored["input_type"]]
    if not isinstance(text, LlamaGenConfig) or text.condition_type != condition:
        raise ValueError(
            f"input_type {stored['input_type']!r}: for a LlamaGen that is conditioned on a {condition}"
        )
    side = round(CELLS[stored["input_type"]] ** 0.5)
    if text.grid_size != side:
        logger.warning(
            "the drafter was trained for images of %d x %d cells, and this target's are %d x %d: fewer of "
            "its drafts are accepted",
            *(side, side, text.grid_size, text.grid_size),
        )
    sizes = {name: stored[name] for name in SIZES if name in stored}
    return LlamaGenConfig(**{**text.to_dict(), **UNSAID, **sizes})
