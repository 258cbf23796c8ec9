"""Export of EAGLE-3 heads to the layouts of speculators (vLLM) and SpecForge (SGLang)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedConfig

from mmspec.errors import InputError
from mmspec.heads.layers import BY_LLAMAS_NAMES, PART, SLIDING
from mmspec.methods.eagle3.head import Eagle3Head
from mmspec.open_types import Json

__all__ = ["LAYOUTS", "export_head", "write_head"]

SPECULATORS_VERSION = "0.3.0"  # the first whose EAGLE-3 has these fields
OWN_LAYER = "decoder.layers.0."


def write_head(head: Eagle3Head, layout: str, target: str, config: PreTrainedConfig, folder: Path) -> Json:
    """Write a head in a layout; see `Head.exports`."""
    described, tensors = export_head(head, layout, target, config)
    (folder / "config.json").write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return {"taps": list(head.taps)}


def export_head(
    head: Eagle3Head, layout: str, name: str, target: PreTrainedConfig
) -> tuple[Json, dict[str, Tensor]]:
    """Return the config and the tensors of a head in a layout of `LAYOUTS`.

    Args:
        head: trained for that target.
        layout: "speculators" or "specforge".
        name: folder or hub id under which the target is served.
        target: config of the target.

    Raises:
        InputError: the head reads the target's final state, which engines do not provide, or has norms that
            the layout cannot describe.
    """
    if min(head.taps) < 0:
        rule = "must be inputs of layers: engines do not provide the target's final state"
        raise InputError("taps", list(head.taps), rule)
    config = head.config
    foreign = {
        "specforge": {"norm_before_fc": config.norm_before_fc, "norm_feedback": config.norm_feedback},
        "speculators": {"norm_logits": not config.norm_logits},
    }
    for setting, differs in foreign[layout].items():
        if differs:
            rule = f"must be {not getattr(config, setting)}: {layout} has no field for another value"
            raise InputError(setting, getattr(config, setting), rule)
    layer, describe = LAYOUTS[layout]
    tensors = {
        layer + key.removeprefix(OWN_LAYER) if key.startswith(OWN_LAYER) else key: value.contiguous()
        for key, value in head.state_dict().items()
    }
    return describe(head, name, target), tensors


def layer_config(head: Eagle3Head) -> Json:
    """The head's layer as the config of a Llama with one layer."""
    config, window = head.config, head.config.sliding_window
    shape = {name: getattr(config, name) for name in BY_LLAMAS_NAMES}
    windows = {"layer_types": [SLIDING], "use_sliding_window": True, "sliding_window": window}
    made = {
        "model_type": "qwen3" if config.qk_norm else "llama",
        "num_hidden_layers": 1,
        "vocab_size": config.vocabulary,
        "tie_word_embeddings": False,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
    }
    return shape | made | ({} if window is None else windows)


def speculators_config(head: Eagle3Head, name: str, target: PreTrainedConfig) -> Json:
    """The config for speculators and vLLM: layers are named by their inputs, the target by its name."""
    config, text = head.config, target.get_text_config(decoder=True)
    rope: Json = {"rope_type": "default", "rope_theta": config.rope_theta, **config.rotary}
    if config.mrope_section is not None:
        rope |= {"mrope_section": config.mrope_section, "mrope_interleaved": config.mrope_interleaved}
    length = getattr(text, "max_position_embeddings", None)
    reach = {} if length is None else {"max_position_embeddings": length}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": SPECULATORS_VERSION,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": config.depth, "verifier_accept_k": 1}
            ],
            "verifier": {"name_or_path": name, "architectures": list(target.architectures or [])},
        },
        "transformer_layer_config": layer_config(head)
        | reach
        | {"rope_parameters": rope, "rope_theta": config.rope_theta},
        "draft_vocab_size": config.draft_vocabulary,
        "target_hidden_size": config.hidden_size,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_feedback,
        "eagle_aux_hidden_state_layer_ids": list(config.taps),
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "dtype": str(head.dtype).removeprefix("torch."),
    }


def specforge_config(head: Eagle3Head, name: str, target: PreTrainedConfig) -> Json:
    """The config for SpecForge and SGLang: layers are named by their outputs; -1 are the embeddings."""
    config, text = head.config, target.get_text_config(decoder=True)
    part = {PART: config.rotary[PART]} if PART in config.rotary else {}
    scaling: Json | None = {name: value for name, value in config.rotary.items() if name != PART}
    if config.mrope_section is not None:
        kind = {"rope_type": "default", "mrope_interleaved": True} if config.mrope_interleaved else {}
        scaling = {"type": "mrope", **kind, "mrope_section": config.mrope_section}
    return layer_config(head) | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": config.draft_vocabulary,
        "target_hidden_size": config.hidden_size,
        "norm_before_residual": config.norm_before_residual,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_logits,
        "max_position_embeddings": getattr(text, "max_position_embeddings", 2048),
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling or None,
        **part,
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in config.taps],
        },
        "target_model": name,
        "torch_dtype": str(head.dtype).removeprefix("torch."),
    }


#: Prefix of the names of the layer's weights, and the function that makes the config.json.
LAYOUTS: Mapping[str, tuple[str, Callable[[Eagle3Head, str, PreTrainedConfig], Json]]] = {
    "speculators": ("layers.0.", speculators_config),
    "specforge": ("midlayer.", specforge_config),
}
