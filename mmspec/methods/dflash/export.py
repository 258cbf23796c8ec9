"""Export of block heads to the layout of SpecForge, which SGLang and vLLM read: inverse of `published`."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import PreTrainedConfig

from mmspec.errors import InputError
from mmspec.heads.layers import BY_LLAMAS_NAMES, SLIDING
from mmspec.methods.dflash.head import DFlashConfig, DFlashHead
from mmspec.methods.dflash.published import LATTICE, NOISE
from mmspec.models.official_files import replace_prefix
from mmspec.open_types import Json

__all__ = ["write_head"]

CLASSES = {
    "dflash": "DFlashDraftModel",
    "dflash2": "DFlash2DraftModel",
    "dspark": "DSparkDraftModel",
    "domino": "DominoDraftModel",
    "lilicorr": "LiLiCorrDraftModel",
}
DOMINO = {"markov_head.prefix_gru.weight_ih": "prefix_gru.weight_ih_l0"}
DOMINO |= {"markov_head.prefix_gru.weight_hh": "prefix_gru.weight_hh_l0", "markov_head.": ""}


def write_head(head: DFlashHead, layout: str, target: str, config: PreTrainedConfig, folder: Path) -> Json:
    """Write a head in a layout; see `Head.exports`.

    Raises:
        InputError: the layout has no field for a setting of the head.
    """
    own = head.config
    if min(head.taps) < 0:
        rule = "must be inputs of layers: engines do not provide the target's final state"
        raise InputError("taps", list(head.taps), rule)
    if own.draft_size:
        rule = f"must be 0: {layout} has no field for a part of the vocabulary"
        name = "draft_vocabulary" if own.draft_vocabulary else "frequent_tokens"
        raise InputError(name, own.draft_size, rule)
    described = layer_config(own, config) | block_config(own) | {"target_model": target}
    described["dtype"] = str(head.dtype).removeprefix("torch.")
    tensors = {name: tensor.contiguous() for name, tensor in head.state_dict().items()}
    if head.mask_embedding is not None:
        noise = {
            "mask_token_id": described["dflash_config"]["mask_token_id"],
            "embedding": tensors.pop(NOISE).clone(),
        }
        torch.save(noise, folder / f"{NOISE}.pt")
    names = DOMINO if own.markov == "domino" else {}
    stored = {
        replace_prefix(name.replace("self_attn.sinks", "self_attn.attention_sink_bias"), names): tensor
        for name, tensor in tensors.items()
    }
    (folder / "config.json").write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return {"taps": list(head.taps)}


def layer_config(own: DFlashConfig, target: PreTrainedConfig) -> Json:
    """The head's layers as the config of a Qwen3."""
    types = [kind for kind, _ in own.layers]
    causal = [causal for _, causal in own.layers]
    rope: Json = {"rope_type": "default", "rope_theta": own.rope_theta, **own.rotary}
    if own.mrope_section is not None:
        rope |= {"rope_type": "mrope", "mrope_section": own.mrope_section}
        rope["mrope_interleaved"] = own.mrope_interleaved
    made: Json = {name: getattr(own, name) for name in BY_LLAMAS_NAMES} | {
        "model_type": "qwen3",
        "num_hidden_layers": own.num_layers,
        "vocab_size": own.vocabulary,
        "attention_bias": own.attention_bias,
        "layer_types": types,
        "use_sliding_window": SLIDING in types,
        "sliding_window": own.sliding_window,
        "rope_parameters": rope,
        "tie_word_embeddings": False,
    }
    if len({*causal}) == 1:
        made["is_causal"] = causal[0]
    elif causal != [kind == SLIDING for kind in types]:
        raise InputError("causal", causal, "must be the same in all layers, or true in sliding layers alone")
    reach = getattr(target.get_text_config(decoder=True), "max_position_embeddings", None)
    return made | ({} if reach is None else {"max_position_embeddings": reach})


def block_config(own: DFlashConfig) -> Json:
    """The fields of blocks, and of the corrections of their slots."""
    kind = own.markov if own.markov == "domino" else "dspark" if own.markov else "dflash"
    if own.lattice_layers:
        kind = "lilicorr"
    elif own.selector_rank:
        kind = "dflash2"
    settings: Json = {
        "projector_type": kind,
        "target_layer_ids": [tap - 1 for tap in own.taps],
        # without a token of its own, the noise has a file, and this one is never drafted
        "mask_token_id": own.vocabulary - 1 if own.mask_token is None else own.mask_token,
        "attention_sink_bias": own.sinks,
    }
    if kind == "domino":
        settings |= {"emb_dim": own.markov_rank, "gru_hidden_dim": own.memory}
        settings |= {"pure_draft_prefix_len": own.plain_slots, "shift_label": own.anchor_predicts}
    else:
        settings["sample_from_anchor"] = own.anchor_predicts
    if kind == "dspark":
        settings |= {"markov_rank": own.markov_rank, "markov_head_type": own.markov}
        settings |= {"enable_confidence_head": own.confidence}
        settings["confidence_head_with_markov"] = own.confidence_with_markov
    scales = {"output_multiplier": own.logit_scale, "input_embedding_scale": own.embedding_scale}
    settings |= scales | {"final_logit_softcapping": own.logit_cap or None}
    if own.conv_taps:
        settings |= {"conv_kernel_size": own.conv_taps, "conv_group_size": own.conv_group}
    if own.selector_rank:
        settings |= {"selector_rank": own.selector_rank, "selector_top_k": own.candidates}
    if own.lattice_layers:
        settings |= {f"lilicorr_{name}": getattr(own, ours) for name, ours in LATTICE.items()}
    return {
        "architectures": [CLASSES[kind]],
        "block_size": own.block,
        "num_target_layers": own.target_layers,
        "dflash_config": settings,
    }
