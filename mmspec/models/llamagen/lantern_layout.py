"""The folders of LANTERN (2410.03355): LlamaGen with the key names of Llama, and a config that says so.

Their `config.json` claims `LlamaForCausalLM`, which would load them without raster positions and without the
condition; the embedding of the condition gives them away.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from huggingface_hub.errors import StrictDataclassError
from torch import Tensor

from mmspec.errors import CheckpointError
from mmspec.models.llamagen.configuration import LlamaGenConfig
from mmspec.models.official_files import read_config

__all__ = ["config_from_lantern", "is_lantern"]

CONDITIONS = {"c2i": "class", "t2i": "caption"}
# fields that their config has under our names, where it has them
FIELDS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "rms_norm_eps", "rope_base", "num_classes", "caption_dim"),
)


def is_lantern(tensors: Mapping[str, Tensor]) -> bool:
    """True if these are LlamaGen's weights under the names of Llama."""
    return any(name.startswith(("model.cls_embedding.", "model.layers.0.self_attn.")) for name in tensors)


def config_from_lantern(path: Path) -> LlamaGenConfig:
    """The config that stands beside the weights.

    Raises:
        CheckpointError: it is not there, not JSON, or does not describe a LlamaGen.
    """
    stored = read_config(path.parent)
    try:
        grid_size = math.isqrt(stored["block_size"])
        settings = {name: stored[name] for name in FIELDS if name in stored}
        condition = CONDITIONS[stored["input_type"]]
        if condition == "caption":
            settings["caption_length"] = stored["cls_token_num"]
        return LlamaGenConfig(condition_type=condition, grid_size=grid_size, **settings)
    except (KeyError, TypeError, ValueError, ArithmeticError, StrictDataclassError) as error:
        allowed = f"a LlamaGen config with block_size, input_type (c2i or t2i) and sizes ({error})"
        raise CheckpointError("checkpoint", str(path.parent / "config.json"), allowed) from error
