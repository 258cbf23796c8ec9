"""Reader of published EAGLE-3 and P-EAGLE heads, in layouts of EAGLE, SpecForge and vLLM's speculators."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from transformers import AutoConfig

from mmspec.errors import CheckpointError
from mmspec.heads.configuration import three_taps
from mmspec.heads.published import Found, Layout, add_words, read_layer, read_windows, table_of_layer
from mmspec.methods.eagle3.head import PREDICTIONS, Eagle3Config, ParallelConfig
from mmspec.open_types import Json

__all__ = ["read_eagle3"]

TAPS = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids")
OBEYED = {
    *TAPS,
    *("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "eagle_config"),
    *("transformer_layer_config", "speculators_config", "speculators_model_type", "speculators_version"),
    "num_target_layers",
}
# types whose layers differ only in sizes, biases and norms of queries and keys, which the weights show
LIKE_LLAMA = ("llama", "mistral", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
LAYER = "decoder.layers.0."
MASK, EMBEDDING = "mask_hidden", "embed_tokens.weight"  # of P-EAGLE
TOKEN = ("mask_token_id", "ptd_token_id", "pard_token")  # of speculators; of vLLM's reader


def config_of(found: Found) -> Eagle3Config:
    """The config of a head; without taps in its config.json it reads the usual hidden states."""
    if is_parallel := MASK in found.tensors:
        found.tensors[MASK] = found.tensors[MASK].flatten()
    shown = with_one_layer(found) if is_parallel else found
    file, stored, tensors, layers = found.file, shown.stored, found.tensors, found.layers
    taps = read_taps(file, stored, layers)
    parts = (stored, stored.get("eagle_config") or {}, stored.get("transformer_layer_config") or {})
    table = table_of_layer(shown, parts, OBEYED)
    kind = table.pop("model_type", None) or "llama"
    if kind not in LIKE_LLAMA:
        raise CheckpointError(f"{file}: model_type", kind, f"must be one of {', '.join(LIKE_LLAMA)}")
    shape = AutoConfig.for_model(kind, **table)
    rope = getattr(shape, "rope_parameters", None) or {}
    section, given = rope.get("mrope_section"), getattr(found.text, "rope_parameters", None) or {}
    if section is not None and given.get("mrope_section") is None:
        # the reverse works, by counting rows: such heads are published for Qwen-VL, with lower acceptance
        rule = "must be absent for this target, whose positions have one axis"
        raise CheckpointError(f"{file}: mrope_section", section, rule)
    norms = read_norms(stored)
    config = Eagle3Config(
        target_layers=layers,
        vocabulary=int(shape.vocab_size),
        taps=taps or three_taps(layers),
        draft_vocabulary=found.size(r"lm_head\.weight"),
        norm_before_residual=bool(stored.get("norm_before_residual", False)),
        norm_before_fc=bool(stored.get("norm_before_fc", "input_norm.weight" in tensors)),
        fc_norm=bool(stored.get("fc_norm", "fc_norm.0.weight" in tensors)),
        norm_feedback=norms[0],
        norm_logits=norms[1],
        qk_norm=f"{LAYER}self_attn.q_norm.weight" in tensors,
        attention_bias=bool(table.get("attention_bias")) or f"{LAYER}self_attn.q_proj.bias" in tensors,
        mlp_bias=bool(table.get("mlp_bias")) or f"{LAYER}mlp.gate_proj.bias" in tensors,
        sliding_window=read_windows(file, table, shape, 1)[1],
        mrope_section=section,
        mrope_interleaved=bool(rope.get("mrope_interleaved", False)),
        **read_layer(file, shape),
    )
    if config.draft_vocabulary == config.vocabulary:  # then the tables carry no information
        for name in ("d2t", "t2d"):
            tensors.pop(name, None)
    else:
        add_words(found.path, tensors, config.vocabulary)
    return parallel_config(found, config) if is_parallel else config


def read_norms(stored: Json) -> tuple[bool, bool]:
    """Return whether the state that is fed back is normed, and whether the output matrix's input is.

    `norm_output` means the former in the format of speculators, where the latter is always True. In SpecForge
    it means the latter, and is True if left out.
    """
    if "speculators_model_type" in stored or "speculators_config" in stored:
        return bool(stored.get("norm_output", False)), True
    return False, bool(stored.get("norm_output", True))


def read_taps(file: Path, stored: Json, layers: int) -> list[int]:
    """Return the layers whose inputs a published head reads; empty if its config does not list them.

    Ids at the top level (speculators, vLLM) are those layers, and take precedence. Ids in `eagle_config`
    (SpecForge, SGLang) are layers whose outputs are read, -1 for the embeddings.
    """
    nested = stored.get("eagle_config") or {}
    inputs, outputs = (
        next((list(table[name]) for name in TAPS if table.get(name)), []) for table in (stored, nested)
    )
    if inputs:
        return inputs
    if any(not -1 <= output < layers - 1 for output in outputs):
        rule = f"must have ids from -1 to {layers - 2}: outputs of the target's {layers} layers but the last"
        raise CheckpointError(f"{file}: eagle_config", outputs, rule)
    return [output + 1 for output in outputs]


def with_one_layer(found: Found) -> Found:
    """The same P-EAGLE head with the config of an EAGLE-3 head of one layer."""
    nested = found.stored.get("transformer_layer_config")
    table = {**(found.stored if nested is None else nested), "num_hidden_layers": 1}
    types = table.get("layer_types") or []
    if len({*types}) > 1 or (not types and table.get("use_sliding_window")):
        rule = "must be of one kind: all layers of a P-EAGLE head have a window, or none has"
        raise CheckpointError(f"{found.file}: layer_types", types, rule)
    table["layer_types"] = types[:1] or None
    made = table if nested is None else {**found.stored, "transformer_layer_config": table}
    dropped = ("embed_requires_grad", *TOKEN)
    return replace(found, stored={name: value for name, value in made.items() if name not in dropped})


def parallel_config(found: Found, config: Eagle3Config) -> ParallelConfig:
    """The config of a P-EAGLE head, from the config of its first layer as an EAGLE-3 head."""
    token = next((found.stored[name] for name in TOKEN if found.stored.get(name) is not None), None)
    if not isinstance(token, int) or not 0 <= token < config.vocabulary:
        rule = f"must be the token that the mask has the embedding of, from 0 to {config.vocabulary - 1}"
        raise CheckpointError(f"{found.file}: mask_token_id", token, rule)
    methods = (found.stored.get("speculators_config") or {}).get("proposal_methods") or [{}]
    most = int(methods[0].get("speculative_tokens") or PREDICTIONS)
    depths = {int(name.split(".")[2]) for name in found.tensors if name.startswith("decoder.layers.")}
    settings = {
        "model_type": ParallelConfig.model_type,
        "num_layers": 1 + max(depths),
        "mask_token": token,
        "own_embedding": EMBEDDING in found.tensors,
        "norm_feedback": False,
        "norm_logits": True,
        "num_draft_tokens": most,
        "depth": most,
        "top_k": 1,
    }
    return ParallelConfig(**{**config.to_dict(), **settings})


read_eagle3 = Layout(
    what="an EAGLE-3 head for a target of {layers} layers",
    config=config_of,
    # names of EAGLE and SpecForge; names of speculators
    names=((r"midlayer\.(.*)", r"decoder.layers.0.\1"), (r"layers\.(.*)", r"decoder.layers.\1")),
    marks=({"midlayer.hidden_norm.weight"}, {"layers.0.hidden_norm.weight"}),
)
