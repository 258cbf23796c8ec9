"""DFlash, DSpark and Domino heads of z-lab, DeepSpec and SpecForge, and in speculators' format."""

from __future__ import annotations

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
}
OF_DOMINO = {"emb_dim", "gru_hidden_dim", "pure_draft_prefix_len", "shift_label"}
OWN = {DFlashConfig.model_type, DSparkConfig.model_type}  # folders of ours, whose keys are the same
MARKOV = "markov_head.markov_w1.weight"
DOMINO = "markov_head.prefix_gru.weight_hh"
PROJECTORS = (None, "dflash", "dspark", "domino")
CONFIDENCE = "confidence_head.proj.weight"


def config_of(found: Found, kind: type[DFlashConfig]) -> DFlashConfig | None:
    """The config of a head, which is one of that kind; None for a folder of ours."""
    stored, tensors, file, layers = found.stored, found.tensors, found.file, found.layers
    if stored.get("model_type") in OWN:
        return None
    own = {**stored, **(stored.get("dflash_config") or {})}
    projector = own.get("projector_type")
    if projector not in PROJECTORS or (projector == "domino") != (DOMINO in tensors):
        allowed = (
            "a head whose dflash_config names dflash, dspark or domino as its projector_type, as its weights"
        )
        raise CheckpointError("drafter", f"{file.parent.name}: projector_type {projector!r}", allowed)
    if bool({MARKOV, DOMINO} & tensors.keys()) != issubclass(kind, DSparkConfig):
        other = "dflash" if issubclass(kind, DSparkConfig) else "dspark"
        allowed = f"another head; this is one for accelerator={other!r}"
        raise CheckpointError("drafter", str(file.parent), allowed)
    read_noise(file.parent, tensors, own)
    meant = int(own.get("num_target_layers") or layers)
    if meant != layers:
        allowed = f"a head that was trained for this target, whose layers are {layers}"
        raise CheckpointError("drafter", f"a head for a target whose layers are {meant}", allowed)
    obeyed = OBEYED | OF_DOMINO if DOMINO in tensors else OBEYED
    table = table_of_layer(found, (own, stored.get("transformer_layer_config") or {}), obeyed)
    shape = Qwen3Config(**{**table, "model_type": "qwen3"})
    depth = 1 + max(int(name.split(".")[1]) for name in tensors if name.startswith("layers."))
    if (stated := table.get("num_hidden_layers")) not in (None, depth):
        raise CheckpointError(f"{file}: num_hidden_layers", stated, f"{depth}, as its weights")
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
        **read_layer(file, shape),
    )
    if reduced:
        add_words(found.path, tensors, vocabulary)
    return config


def read_markov(own: Json, tensors: dict[str, Tensor]) -> Keywords:
    """Settings of what the tokens before say about a slot."""
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


def read_attention(
    file: Path, table: Json, shape: Qwen3Config, layers: int
) -> tuple[list[str], int | None, list[bool]]:
    """Types of the layers, their window, and in which of them slots see those before them alone.

    `use_swa` with `swa_window_size` (MiMo, Model-Optimizer) gives every layer a window. Where nothing says
    whether slots see later ones, they do not in layers that `layer_types` calls sliding (SpecForge,
    speculators, vLLM), unless speculators trained them so.

    Raises:
        CheckpointError: as of `read_windows`.
    """
    named = table.get("layer_types") or []
    everywhere = bool(table.get("use_swa")) and SLIDING not in named
    width = table.get("swa_window_size") or table.get("sliding_window")
    if everywhere:
        table = {**table, "layer_types": [SLIDING] * layers, "use_sliding_window": True}
    types, window = read_windows(file, {**table, "sliding_window": width}, shape, layers)
    said = next((table[name] for name in ("is_causal", "causal") if table.get(name) is not None), None)
    if said is not None:
        return types, window, [bool(said)] * layers
    both = everywhere or bool(table.get("sliding_window_non_causal"))
    return types, window, [kind == SLIDING and not both for kind in types]


def read_noise(folder: Path, tensors: dict[str, Tensor], own: Json) -> None:
    """Add the embedding of the noise, if it stands beside the weights (`mask_embedding.pt`)."""
    path = folder / f"{NOISE}.pt"
    if not path.is_file():
        if NOISE in tensors:
            tensors[NOISE] = tensors[NOISE].flatten()
        return
    allowed = "one embedding, or a table that holds one, saved by torch.save"
    try:
        held = torch.load(path, map_location="cpu", weights_only=True)
    except (UnpicklingError, OSError, RuntimeError, EOFError, ValueError) as error:
        raise CheckpointError("drafter", str(path), f"{allowed} ({str(error).splitlines()[0]})") from error
    token, named = None, held
    if isinstance(held, dict):
        token, tables = held.get("mask_token_id"), [*filter(torch.is_tensor, held.values())]
        named = tables[0] if len(tables) == 1 else None
    if not isinstance(named, Tensor) or named.numel() != named.shape[-1]:
        raise CheckpointError("drafter", str(path), allowed)
    meant = own.get("mask_token_id")
    if token is not None and meant is not None and int(token) != int(meant):
        raise CheckpointError(f"{path}: mask_token_id", token, f"{meant}, as its config.json says")
    tensors[NOISE] = named.flatten()


def anchor_predicts(stored: Json, own: Json) -> bool:
    """True if the slot of the newest token predicts too, as in everything that DeepSpec trains."""
    if own.get("projector_type") == "domino":
        return bool(own.get("shift_label"))
    if "sample_from_anchor" in own:
        return bool(own["sample_from_anchor"])
    return any("DSpark" in name for name in stored.get("architectures") or ())


def confidence_knows(own: Json, tensors: dict[str, Tensor], width: int) -> bool:
    """True if the confidence of a slot reads the token before it too: so says the width of its weights."""
    knows = CONFIDENCE not in tensors or tensors[CONFIDENCE].shape[-1] != width
    said = own.get("confidence_head_with_markov")
    if CONFIDENCE in tensors and said is not None and bool(said) != knows:
        shape = tuple(tensors[CONFIDENCE].shape)
        raise ValueError(f"confidence_head_with_markov={said}, and {CONFIDENCE} is {shape}")
    return knows


def read_taps(own: Json, layers: int, depth: int) -> list[int]:
    """Layers whose inputs a head reads.

    `aux_hidden_state_layer_ids` (speculators) are those. `target_layer_ids` are layers whose outputs are
    read, -1 for the embeddings; where they are left out, they are spread over the target's layers.
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
    what="the config of a DFlash or DSpark head for a target of {layers} layers",
    # Domino's parts, in early files of SpecForge behind `logit_head.`
    names=(
        (r"(?:logit_head\.)?prefix_gru\.weight_(ih|hh)_l0", r"markov_head.prefix_gru.weight_\1"),
        (r"(?:logit_head\.)?embed_proj\.(.*)", r"markov_head.embed_proj.\1"),
        (r"(.*\.self_attn)\.attention_sink_bias", r"\1.sinks"),
    ),
    marks=({"fc.weight", "hidden_norm.weight", "layers.0.self_attn.q_norm.weight"},),
    # copies of the target's matrices, and what d2t says already
    ignored=NOT_OWN + r"|lm_head\.weight|t2d",
)
read_dflash = layout(config=partial(config_of, kind=DFlashConfig))
read_dspark = layout(config=partial(config_of, kind=DSparkConfig))
