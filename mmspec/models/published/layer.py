"""Readers of the layer of a published head, from the configs that its many publishers write.

A field that changes what a layer computes acts, or the head is refused by the field's name. Fields that are
known to change nothing are listed here; any other one is refused too, unless it is empty.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedConfig

from mmspec.errors import CheckpointError
from mmspec.models.head_layers import AXES, FULL, KNOWN, MORE, PART, SCALINGS, SLIDING
from mmspec.validation import is_integer

__all__ = ["check_fields", "read_layer", "read_windows", "with_one_rope"]

LAYER = {
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "hidden_act", "rms_norm_eps", "vocab_size", "attention_bias", "mlp_bias"),
    *("rope_theta", "rope_scaling", "rope_parameters", PART, KNOWN),
    *("sliding_window", "use_sliding_window", "max_window_layers", "layer_types"),
}
# of generation, training and targets; sizes, experts and norms of queries show in the weights
NO_EFFECT = {
    *PreTrainedConfig().to_dict(),
    *GenerationConfig().to_dict(),
    *("_name_or_path", "architectures", "auto_map", "dtype", "torch_dtype", "model_type", "modal_type"),
    *("target_model", "target_model_type", "target_model_name_or_path", "target_text_model_type"),
    *("attention_backend", "attention_dropout", "initializer_range", "pretraining_tp", "use_cache"),
    *("loss_decay_gamma", "max_anchors", "num_anchors", "step_loss_decay", "ttt_length"),
    *("attention_head_dim", "cla_share_factor", "dense_list", "draft_num_hidden_layers", "draft_vocab_size"),
    *("max_position_embeddings", "org_vocab_size", "pool_type", "target_hidden_size", "use_qk_norm"),
    *("decoder_sparse_step", "moe_intermediate_size", "mlp_only_layers", "norm_topk_prob", "num_experts"),
    *("num_experts_per_tok", "num_local_experts", "parallel_draft_heads_num_layers", "router_aux_loss_coef"),
    *("tie_word_embeddings", "transformers_version"),
}
NEUTRAL: Mapping[str, object] = {  # fields of other layers, and the value at which they are these
    "attention_value_scale": 1,
    "causal": True,
    "embedding_multiplier": 1,
    "has_lm_head": True,
    "is_causal": True,
    "is_neox_style": True,
    "logit_scale": 1,
    "next_layer_regular": True,
    "norm_type": "rms",
    "parallel_draft_step": 1,
    "residual_multiplier": 1,
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_rotary_pos_emb": True,
}


def check_fields(file: Path, table: Mapping[str, Any], obeyed: Collection[str]) -> None:
    """Refuse fields of a head's config that are not obeyed and might change what it computes.

    Args:
        file: for the message.
        table: the config, or a table inside it.
        obeyed: fields that the caller reads, beside those of every layer.

    Raises:
        CheckpointError: it names the first of them.
    """
    for name, value in table.items():
        if name in obeyed:
            continue
        if name in NEUTRAL:
            if value is not None and value != NEUTRAL[name]:
                allowed = f"{NEUTRAL[name]}: heads with another value cannot be run"
                raise CheckpointError(f"{file}: {name}", value, allowed)
        elif value and not {name} & {*LAYER, *NO_EFFECT} and not name.endswith("_id"):
            allowed = "a head without this field, which is not known here and may change what it computes"
            raise CheckpointError(f"{file}: {name}", value, allowed)


def with_one_rope(file: Path, table: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a layer's config in which all layers share their rotary positions.

    Where each type of layers has its own (`rope_parameters` of Gemma or Laguna, copied into a head's config),
    those of sliding layers count for all, as in speculators.

    Raises:
        CheckpointError: they are no table.
    """
    made = deepcopy(dict(table))
    for name in ("rope_parameters", "rope_scaling"):
        rope = made.get(name)
        if rope is not None and not isinstance(rope, dict):
            raise CheckpointError(f"{file}: {name}", rope, "a table, or null")
        own = [rope[kind] for kind in (SLIDING, FULL) if kind in rope] if rope else []
        if own:
            made[name] = own[0]
    return made


def read_layer(file: Path, shape: Any) -> dict[str, Any]:
    """Settings of a `PublishedLayerConfig` by the config of transformers that describes the layer.

    Raises:
        CheckpointError: its rotary positions are scaled in another way than in `SCALINGS`.
    """
    rope = dict(getattr(shape, "rope_parameters", None) or {})
    kind, theta = rope.pop("rope_type", None) or "default", rope.pop("rope_theta", None)
    rope.pop("type", None)
    section = rope.get("mrope_section")
    if kind not in SCALINGS or (kind == "mrope") > bool(section):
        allowed = f"one of {', '.join(SCALINGS)}: what changes with the length would not fit rows read before"
        raise CheckpointError(f"{file}: rope_type", kind, allowed)
    numbers = {name: value for name, value in rope.items() if value is not None and name not in AXES}
    for name, value in numbers.items():
        if name not in (PART, *SCALINGS[kind], *MORE.get(kind, ())):
            raise CheckpointError(f"{file}: {kind} rotary positions with {name}", value, "none of this field")
    if numbers.get(PART) == 1:
        del numbers[PART]
    plain = kind in ("default", "mrope")
    return {
        "hidden_size": int(shape.hidden_size),
        "intermediate_size": int(shape.intermediate_size),
        "num_attention_heads": int(shape.num_attention_heads),
        "num_key_value_heads": int(shape.num_key_value_heads),
        "head_dim": int(getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads),
        "hidden_act": shape.hidden_act,
        "rms_norm_eps": float(shape.rms_norm_eps),
        "rope_theta": float(theta or 10000.0),
        "rotary": numbers if plain else {"rope_type": kind, **numbers},
    }


def read_windows(
    file: Path, table: Mapping[str, Any], shape: Any, layers: int
) -> tuple[list[str], int | None]:
    """Which layers see a window, and how wide that is.

    A number in `sliding_window` says nothing alone: configs copy the target's. `layer_types` says which
    layers have it, or else `use_sliding_window` with `max_window_layers`, as in transformers.

    Args:
        file: for messages.
        table: as published.
        shape: the config of transformers made of it.
        layers: how many there are.

    Returns:
        The type of each layer, `FULL` or `SLIDING`; and the window, None where no layer has one.

    Raises:
        CheckpointError: other types, another number of them, or a window that is none.
    """
    types, used = table.get("layer_types"), table.get("use_sliding_window")
    if not types and used and table.get("sliding_window") is not None:
        known = getattr(shape, "layer_types", None)
        first = int(table.get("max_window_layers") or 0)
        types = known or [SLIDING if index >= first else FULL for index in range(layers)]
    types = list(types or [FULL] * layers)
    if len(types) != layers or not {*types} <= {FULL, SLIDING}:
        allowed = f"{FULL} or {SLIDING} for each of {layers} layers"
        raise CheckpointError(f"{file}: layer_types", types, allowed)
    if SLIDING not in types:
        return types, None
    window: Any = table.get("sliding_window")
    if not is_integer(window) or window < 1:
        raise CheckpointError(f"{file}: sliding_window", window, "a number of tokens, for its sliding layers")
    if used is False:
        allowed = f"true, or no layer of {SLIDING}: the two contradict each other"
        raise CheckpointError(f"{file}: use_sliding_window", used, allowed)
    return types, int(window)
