"""Reader of the attention and of the noise of DFlash heads, in the fields of several publishers."""

from __future__ import annotations

from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from mmspec.errors import CheckpointError
from mmspec.models.published_layer import SLIDING, read_windows

__all__ = ["NOISE", "OBEYED", "OF_DOMINO", "SINKS", "read_attention", "read_noise"]

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


def read_attention(
    file: Path, table: dict[str, Any], shape: Any, layers: int
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


def read_noise(folder: Path, tensors: dict[str, Tensor], own: dict[str, Any]) -> None:
    """Add the embedding of the noise, if it stands beside the weights (`mask_embedding.pt`).

    Raises:
        CheckpointError: it holds no such embedding, or one for another token than the config names.
    """
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
