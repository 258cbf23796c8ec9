"""Report on a transformers model by its config: whether it can be accelerated, and the memory of a draft."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import transformers
from transformers import MODEL_MAPPING, AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)

from mmspec.core.cache import check_layer_types
from mmspec.errors import CheckpointError, UnsupportedModelError
from mmspec.models.checkpoint import check_source, first_line, split_gguf
from mmspec.models.masked_language import MASKED_MODELS
from mmspec.open_types import Json
from mmspec.plugins import family_of, load, register_families
from mmspec.targets.admission import check_model
from mmspec.targets.memory import cached_bytes, measure_states

__all__ = ["examine_model"]


def examine_model(source: str) -> Json:
    """Examine the model of a folder, hub id or GGUF file by its config alone, on the meta device.

    Returns:
        `ok`, and `problem` if it is not; else its layers by kind, the bytes that a token, a row and a drafted
        token take, and its recurrent mixers with how they are computed over a draft. Of a model that draws
        images in any order (MAR), which caches nothing, there are no layers and no bytes.

    Raises:
        CheckpointError: there is no such model, or none of transformers.
    """
    place, inside = split_gguf(source)
    folder = check_source(place)
    try:
        register_families()
        config = AutoConfig.from_pretrained(folder, **inside)
    except (OSError, ValueError) as error:
        allowed = f"a folder or hub id with a config ({first_line(error)})"
        raise CheckpointError("model", source, allowed) from error
    found = {"name": type(config).__name__, "ok": True, "problem": None}
    try:
        model = skeleton(config)
        found["name"] = type(model).__name__
        family = family_of(config)
        if family is not None and load(family.target).any_order:
            sizes = dict.fromkeys(("token_bytes", "row_bytes", "node_bytes"), 0)
            return found | {"layers": {}, "mixers": []} | sizes
        check_model(model)
    except UnsupportedModelError as error:
        return found | {"ok": False, "problem": str(error)}
    states = measure_states(model)
    mixers = Counter((one.mixer, one.is_closed, one.row, one.node) for one in states)
    return found | {
        "layers": dict(Counter(check_layer_types(config.get_text_config(decoder=True)))),
        "token_bytes": cached_bytes(config, model.dtype),
        "row_bytes": sum(one.row for one in states),
        "node_bytes": sum(one.node for one in states),
        "mixers": [
            {"name": name, "count": count, "closed_form": is_closed, "row_bytes": row, "node_bytes": node}
            for (name, is_closed, row, node), count in mixers.items()
        ],
    }


def skeleton(config: PreTrainedConfig) -> PreTrainedModel:
    """Build the model of a config on the meta device, in the config's dtype."""
    usual = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type, "")  # a GGUF file does not say
    (name, *_) = getattr(config, "architectures", None) or [usual]
    model_class: Any = MASKED_MODELS.get(type(config))
    family = family_of(config)
    if family is not None and family.draws:  # published with other names of classes
        kinds: Any = (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING)
        model_class = next(kind[type(config)] for kind in kinds if type(config) in kind)
    model_class = model_class or getattr(transformers, name, None)
    if model_class is None:
        allowed = "a model of text, of text and images, or one that draws images"
        raise CheckpointError("model", name or type(config).__name__, allowed)
    with torch.device("meta"):
        model: PreTrainedModel = model_class._from_config(config, dtype=config.dtype or torch.float32)
    model.eval()
    return model
