"""Reader of block heads of z-lab, DeepSpec, SpecForge and NVIDIA, and in speculators' format.

| keys of the config | meaning | source |
|---|---|---|
| `dflash_config.target_layer_ids`, `mask_token_id`, `block_size` | taps, noise, slots | z-lab/dflash |
| `markov_rank`, `markov_head_type`, `enable_confidence_head` | DSpark's two heads | deepseek-ai/DeepSpec |
| `architectures` with "DSpark" | the slot of the newest token predicts | SGLang, vLLM |
| `rope_is_neox_style: false` (Liquid's LFM2.5, LFM2.5-VL) | pairs (2i, 2i + 1) turn | SGLang #30776 |
| rotary type "mrope" with `mrope_section` | positions of three axes | SpecForge #583 |
| `conv_kernel_size`, `conv_group_size` | convolutions of DFlash 2 | z-lab/dflash |
| `selector_rank`, `selector_top_k` | choice among a slot's likeliest tokens | z-lab/dflash |
| `output_multiplier`, `final_logit_softcapping`, `input_embedding_scale` | scales | z-lab/dflash |
| `lilicorr_*` | LiLiCorr | NVIDIA/Model-Optimizer, TensorRT-LLM, vLLM |

| tensors of the last two choices, and of convolutions | shape |
|---|---|
| `layers.N.{attention,mlp}_conv.base_kernel`, `.kernel_projection.weight` | [2, t, d], [2 t d / group, d] |
| `candidate_selector.{predecessor,successor}_codebook`, `.hidden_projection.weight` | [V, r], [r, d] |
| `lilicorr.*` | as in `LatticeCorrelator` |

An `mrope_section` beside another rotary type is a copy of the target's config, which the published classes
ignore; so are positions of several axes then.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from pickle import UnpicklingError

import torch
from torch import Tensor
from transformers import Qwen3Config

from mmspec.errors import CheckpointError
from mmspec.heads.layers import SLIDING
from mmspec.heads.published import (
    NOT_OWN,
    Found,
    Layout,
    add_words,
    read_layer,
    read_windows,
    table_of_layer,
)
from mmspec.methods.dflash.head import DFlashConfig, DSparkConfig
from mmspec.open_types import Json, Keywords

__all__ = ["read_dflash", "read_dspark"]

NOISE = "mask_embedding"
SINKS = ("attention_sink_bias", "add_swa_attention_sink_bias")
OBEYED = {
    *("dflash_config", "transformer_layer_config", "block_size", "sample_from_anchor", "num_target_layers"),
    *("aux_hidden_state_layer_ids", "target_layer_ids", "mask_token_id", "attention_mode"),
    *("speculators_config", "speculators_model_type", "speculators_version", "projector_type"),
    *("markov_rank", "markov_head_type", "enable_confidence_head"),
    *("confidence_head_alpha", "confidence_head_with_markov"),
    *("use_swa", "swa_window_size", "causal", "is_causal", "sliding_window_non_causal", *SINKS),
    *("rope_is_neox_style", "is_neox_style"),
    *("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"),
    *("output_multiplier", "final_logit_softcapping", "input_embedding_scale"),
}
OF_DOMINO = {"emb_dim", "gru_hidden_dim", "pure_draft_prefix_len", "shift_label"}
OWN = {DFlashConfig.model_type, DSparkConfig.model_type}  # folders of mmspec, which have the same keys
MARKOV = "markov_head.markov_w1.weight"
DOMINO = "markov_head.prefix_gru.weight_hh"
PROJECTORS = (None, "dflash", "dspark", "domino", "dflash2", "lilicorr")
#: Fields of LiLiCorr by the names of its config, each with the prefix `lilicorr_`.
LATTICE = {
    "hidden_size": "lattice_width",
    "num_layers": "lattice_layers",
    "num_heads": "lattice_heads",
    "mlp_ratio": "lattice_ratio",
    "candidate_topk": "candidates",
    "factor_dim": "lattice_factors",
    "vector_eps": "lattice_eps",
    "logit_scale": "lattice_scale",
}
CONFIDENCE = "confidence_head.proj.weight"


def config_of(found: Found, kind: type[DFlashConfig]) -> DFlashConfig | None:
    """The config of a head, if it is one of that kind; None for a folder of mmspec."""
    stored, tensors, file, layers = found.stored, found.tensors, found.file, found.layers
    if stored.get("model_type") in OWN:
        return None
    own = {**stored, **(stored.get("dflash_config") or {})}
    projector = own.get("projector_type")
    if projector not in PROJECTORS or (projector == "domino") != (DOMINO in tensors):
        rule = "must name dflash, dspark or domino, matching its weights, as projector_type in dflash_config"
        raise CheckpointError("drafter", f"{file.parent.name}: projector_type {projector!r}", rule)
    if bool({MARKOV, DOMINO} & tensors.keys()) != issubclass(kind, DSparkConfig):
        other = "dflash" if issubclass(kind, DSparkConfig) else "dspark"
        rule = f"must be another head; this one is for accelerator={other!r}"
        raise CheckpointError("drafter", str(file.parent), rule)
    read_noise(file.parent, tensors, own)
    meant = int(own.get("num_target_layers") or layers)
    if meant != layers:
        rule = f"must be a head that was trained for this target of {layers} layers"
        raise CheckpointError("drafter", f"a head for a target of {meant} layers", rule)
    obeyed = OBEYED | OF_DOMINO if DOMINO in tensors else OBEYED
    if correlates := own.get("projector_type") == "lilicorr" or "lilicorr_num_layers" in own:
        obeyed |= {"lilicorr_enabled", *(f"lilicorr_{name}" for name in LATTICE)}
    table = table_of_layer(found, (own, stored.get("transformer_layer_config") or {}), obeyed)
    shape = Qwen3Config(**{**table, "model_type": "qwen3"})
    depth = 1 + max(int(name.split(".")[1]) for name in tensors if name.startswith("layers."))
    if (stated := table.get("num_hidden_layers")) not in (None, depth):
        raise CheckpointError(f"{file}: num_hidden_layers", stated, f"must be {depth}, as in its weights")
    vocabulary = int(found.text.vocab_size)
    reduced = "d2t" in tensors and len(tensors["d2t"]) < vocabulary
    types, window, causal = read_attention(file, {**table, **own}, shape, depth)
    config = kind(
        target_layers=layers,
        target_type="",
        vocabulary=vocabulary,
        taps=read_taps(own, layers, depth),
        num_layers=depth,
        block=int(own["block_size"]),
        anchor_predicts=anchor_predicts(stored, own),
        mask_token=None if NOISE in tensors else int(own["mask_token_id"]),
        draft_vocabulary=len(tensors["d2t"]) if reduced else 0,
        **read_markov(own, tensors),
        confidence=CONFIDENCE in tensors,
        confidence_with_markov=confidence_knows(own, tensors, int(shape.hidden_size)),
        attention_bias=bool(table.get("attention_bias")) or "layers.0.self_attn.q_proj.bias" in tensors,
        mlp_bias=bool(table.get("mlp_bias")),
        sinks=any(own.get(name) for name in SINKS) or "layers.0.self_attn.sinks" in tensors,
        layer_types=types,
        sliding_window=window,
        causal=causal,
        logit_scale=float(own.get("output_multiplier", 1.0)),
        logit_cap=float(own.get("final_logit_softcapping") or 0.0),
        embedding_scale=float(own.get("input_embedding_scale", 1.0)),
        **read_candidates(own, correlates),
        **read_axes(found, table),
        **read_layer(file, shape),
    )
    if not own.get("rope_is_neox_style", own.get("is_neox_style", True)):
        rotate_halves(tensors, config.head_dim, config.rotary_dim)
    if reduced:
        add_words(found.path, tensors, vocabulary)
    return config


def rotate_halves(tensors: dict[str, Tensor], head_dim: int, turning: int) -> None:
    """Reorder queries and keys whose pairs (2i, 2i + 1) are rotated, so that (i, i + turning / 2) are.

    Their products, which are all that attention reads, stay the same.
    """
    order = [*range(0, turning, 2), *range(1, turning, 2), *range(turning, head_dim)]
    for name, tensor in tensors.items():
        if re.fullmatch(r"layers\.\d+\.self_attn\.[qk]_(proj|norm)\.(weight|bias)", name):
            tensors[name] = tensor.unflatten(0, (-1, head_dim))[:, order].flatten(0, 1)


def read_axes(found: Found, table: Json) -> Keywords:
    """Settings of positions of several axes; none for one axis.

    Raises:
        CheckpointError: the target's positions have one axis.
    """
    rope = table.get("rope_parameters") or table.get("rope_scaling") or {}
    section = rope.get("mrope_section")
    if (rope.get("rope_type") or rope.get("type")) != "mrope" or section is None:
        return {}
    if (getattr(found.text, "rope_parameters", None) or {}).get("mrope_section") is None:
        rule = "must be absent for this target, whose positions have one axis"
        raise CheckpointError(f"{found.file}: mrope_section", section, rule)
    return {"mrope_section": section, "mrope_interleaved": bool(rope.get("mrope_interleaved", False))}


def read_markov(own: Json, tensors: dict[str, Tensor]) -> Keywords:
    """Settings of the correction of a slot by earlier tokens."""
    if DOMINO in tensors:
        return {
            "markov": "domino",
            "markov_rank": tensors["markov_head.embed_proj.0.weight"].shape[0],
            "memory": tensors[DOMINO].shape[-1],
            "plain_slots": int(own.get("pure_draft_prefix_len") or 0),
        }
    if MARKOV in tensors:
        return {
            "markov": str(own.get("markov_head_type", "vanilla")),
            "markov_rank": tensors[MARKOV].shape[1],
        }
    return {"markov": "", "markov_rank": 1}


def read_candidates(own: Json, correlates: bool) -> Keywords:
    """Settings of the convolutions of DFlash 2, and of the choice among candidates by it or by LiLiCorr."""
    made: Keywords = {}
    if own.get("conv_kernel_size"):
        made |= {"conv_taps": int(own["conv_kernel_size"]), "conv_group": int(own["conv_group_size"])}
    if own.get("selector_rank"):
        made |= {"selector_rank": int(own["selector_rank"]), "candidates": int(own["selector_top_k"])}
    if correlates:
        kinds = {"lattice_ratio": float, "lattice_eps": float, "lattice_scale": float}
        made |= {ours: kinds.get(ours, int)(own[f"lilicorr_{name}"]) for name, ours in LATTICE.items()}
    return made


def read_attention(
    file: Path, table: Json, shape: Qwen3Config, layers: int
) -> tuple[list[str], int | None, list[bool]]:
    """Return the types of the layers, their window, and whether slots see earlier slots alone in each.

    `use_swa` with `swa_window_size` (MiMo, Model-Optimizer) gives every layer a window. Without a field about
    causality, slots do not see later ones in layers of sliding attention in `layer_types` (SpecForge,
    speculators, vLLM), unless `sliding_window_non_causal` of speculators is set.

    Raises:
        CheckpointError: see `read_windows`.
    """
    named = table.get("layer_types") or []
    everywhere = bool(table.get("use_swa")) and SLIDING not in named
    width = table.get("swa_window_size") or table.get("sliding_window")
    if everywhere:
        table = {**table, "layer_types": [SLIDING] * layers, "use_sliding_window": True}
    types, window = read_windows(file, {**table, "sliding_window": width}, shape, layers)
    stated = next((table[name] for name in ("is_causal", "causal") if table.get(name) is not None), None)
    if stated is not None:
        return types, window, [bool(stated)] * layers
    both = everywhere or bool(table.get("sliding_window_non_causal"))
    return types, window, [kind == SLIDING and not both for kind in types]


def read_noise(folder: Path, tensors: dict[str, Tensor], own: Json) -> None:
    """Add the embedding of the noise, if it has a file beside the weights (`mask_embedding.pt`)."""
    path = folder / f"{NOISE}.pt"
    if not path.is_file():
        if NOISE in tensors:
            tensors[NOISE] = tensors[NOISE].flatten()
        return
    rule = "must hold one embedding, or a table with one, written by torch.save"
    try:
        held = torch.load(path, map_location="cpu", weights_only=True)
    except (UnpicklingError, OSError, RuntimeError, EOFError, ValueError) as error:
        raise CheckpointError("drafter", str(path), f"{rule} ({str(error).splitlines()[0]})") from error
    token, named = None, held
    if isinstance(held, dict):
        token, tables = held.get("mask_token_id"), [*filter(torch.is_tensor, held.values())]
        named = tables[0] if len(tables) == 1 else None
    if not isinstance(named, Tensor) or named.numel() != named.shape[-1]:
        raise CheckpointError("drafter", str(path), rule)
    meant = own.get("mask_token_id")
    if token is not None and meant is not None and int(token) != int(meant):
        raise CheckpointError(f"{path}: mask_token_id", token, f"must be {meant}, as in its config.json")
    tensors[NOISE] = named.flatten()


def anchor_predicts(stored: Json, own: Json) -> bool:
    """Return whether the slot of the newest token predicts too, as in all heads that DeepSpec trains."""
    if own.get("projector_type") == "domino":
        return bool(own.get("shift_label"))
    if "sample_from_anchor" in own:
        return bool(own["sample_from_anchor"])
    return any("DSpark" in name for name in stored.get("architectures") or ())


def confidence_knows(own: Json, tensors: dict[str, Tensor], width: int) -> bool:
    """Return whether the confidence of a slot also reads the token before it, by the width of its weights."""
    knows = CONFIDENCE not in tensors or tensors[CONFIDENCE].shape[-1] != width
    stated = own.get("confidence_head_with_markov")
    if CONFIDENCE in tensors and stated is not None and bool(stated) != knows:
        shape = tuple(tensors[CONFIDENCE].shape)
        raise ValueError(f"confidence_head_with_markov={stated} does not fit {CONFIDENCE}, which is {shape}")
    return knows


def read_taps(own: Json, layers: int, depth: int) -> list[int]:
    """Return the layers whose inputs a head reads.

    `aux_hidden_state_layer_ids` (speculators) lists them. `target_layer_ids` lists layers whose outputs are
    read, -1 for the embeddings; without it they are spread over the target's layers.
    """
    inputs = own.get("aux_hidden_state_layer_ids")
    if inputs:
        return [int(one) for one in inputs]
    outputs = own.get("target_layer_ids")
    if not outputs:
        span = layers - 4
        outputs = [layers // 2] if depth == 1 else [round(1 + i * span / (depth - 1)) for i in range(depth)]
    return [int(one) + 1 for one in outputs]


layout = partial(
    Layout,
    what="a DFlash or DSpark head for a target of {layers} layers",
    # Domino's parts have the prefix `logit_head.` in early files of SpecForge
    names=(
        (r"(?:logit_head\.)?prefix_gru\.weight_(ih|hh)_l0", r"markov_head.prefix_gru.weight_\1"),
        (r"(?:logit_head\.)?embed_proj\.(.*)", r"markov_head.embed_proj.\1"),
        (r"(.*\.self_attn)\.attention_sink_bias", r"\1.sinks"),
    ),
    marks=({"fc.weight", "hidden_norm.weight", "layers.0.self_attn.q_norm.weight"},),
    # copies of the target's matrices, and a table that follows from d2t
    ignored=NOT_OWN + r"|lm_head\.weight|t2d",
)
read_dflash = layout(config=partial(config_of, kind=DFlashConfig))
read_dspark = layout(config=partial(config_of, kind=DSparkConfig))
