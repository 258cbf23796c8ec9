"""EAGLE-3 heads as published: by EAGLE's authors, by SpecForge, and in the format of vLLM's speculators."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig

from mmspec.errors import CheckpointError
from mmspec.models.eagle3 import (
    PREDICTIONS,
    Eagle3Config,
    Eagle3Head,
    ParallelConfig,
    ParallelHead,
    three_taps,
)
from mmspec.models.official_files import (
    NOT_OWN,
    WEIGHTS,
    fill,
    find_file,
    find_tensors,
    measure,
    open_checkpoint,
    read_config,
    replace_prefix,
    tensor_names,
)
from mmspec.models.published.layer import check_fields, read_layer, read_windows, with_one_rope

__all__ = [
    "read_eagle3",
]

MASK, EMBEDDING = "mask_hidden", "embed_tokens.weight"  # of P-EAGLE
TOKEN = ("mask_token_id", "ptd_token_id", "pard_token")  # of speculators; of vLLM's reader
MARKS = ("midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight")
# of EAGLE and SpecForge; of speculators
LAYER = "decoder.layers.0."
RENAMED = {"midlayer.": LAYER, "layers.0.": LAYER}
TAPS = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids")
OWN = {
    *TAPS,
    *("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "eagle_config"),
    *("transformer_layer_config", "speculators_config", "speculators_model_type", "speculators_version"),
    "num_target_layers",
}
# whose layers differ in their sizes, biases and norms of queries and keys alone, which the weights show
LIKE_LLAMA = ("llama", "mistral", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")


def read_eagle3(folder: Path, target: PreTrainedConfig) -> Eagle3Head | None:
    """Read the head in a folder of that layout; None if it is no such folder.

    Args:
        folder: with the weights and a config.json.
        target: of what it is to draft for. Where the folder does not say which hidden states are read, they
            are the usual ones of this target.

    Raises:
        CheckpointError: the file is damaged; keys are missing, unknown or of another shape; positions have
            several axes and the target's one; or the two tables of its vocabulary contradict each other. Of a
            P-EAGLE head: no mask token is named, or its layers have windows.
    """
    path = find_file(folder, WEIGHTS)
    if path is None or not tensor_names(path) & {*MARKS}:
        return None
    found = find_tensors(path, open_checkpoint(path))
    tensors = {replace_prefix(name, RENAMED): tensor for name, tensor in found.items()}
    file, stored = folder / "config.json", read_config(folder)
    if is_parallel := MASK in tensors:
        tensors = parallel_tensors(tensors)
    shape = first_layer_of(file, stored) if is_parallel else stored
    config = read_shape(path, tensors, shape, target)
    if config.draft_vocabulary == config.vocabulary:  # then the tables say nothing
        tensors = {name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")}
    else:
        add_words(path, tensors, config.vocabulary)
    head = Eagle3Head(config)
    if is_parallel:
        head = ParallelHead(parallel_config(file, config, stored, tensors))
    fill(path, head, tensors, NOT_OWN)
    return head


def read_shape(
    path: Path, tensors: dict[str, Tensor], stored: dict[str, Any], target: PreTrainedConfig
) -> Eagle3Config:
    """The config of a head whose tensors have our names.

    Raises:
        CheckpointError: its own config asks for what is not known here, or cannot be understood.
    """
    file = path.parent / "config.json"
    layers = int(target.get_text_config(decoder=True).num_hidden_layers)
    try:
        taps = read_taps(file, stored, layers)
        for each in (stored, stored.get("eagle_config") or {}, stored.get("transformer_layer_config") or {}):
            check_fields(file, each, OWN)
        table = with_one_rope(file, stored.get("transformer_layer_config", stored))
        kind = table.pop("model_type", None) or "llama"
        if kind not in LIKE_LLAMA:
            raise CheckpointError(f"{file}: model_type", kind, f"one of {', '.join(LIKE_LLAMA)}")
        shape: Any = AutoConfig.for_model(kind, **table)
        rope = getattr(shape, "rope_parameters", None) or {}
        section = rope.get("mrope_section")
        check_axes(file, section, target)
        norms = read_norms(stored)
        return Eagle3Config(
            target_layers=layers,
            vocabulary=int(shape.vocab_size),
            taps=taps or three_taps(layers),
            draft_vocabulary=measure(path, tensors, r"lm_head\.weight"),
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
    except (TypeError, ValueError, AttributeError, KeyError, StrictDataclassError) as error:
        if isinstance(error, CheckpointError):
            raise
        allowed = f"the config of an EAGLE-3 head for a target of {layers} layers ({error})"
        raise CheckpointError("drafter", str(file), allowed) from error


def read_norms(stored: dict[str, Any]) -> tuple[bool, bool]:
    """Whether the state that is fed back is normed, and whether what the output matrix reads is.

    In the format of speculators `norm_output` means the former, and the latter is always so. SpecForge means
    the latter by that name, which is True if left out.
    """
    if "speculators_model_type" in stored or "speculators_config" in stored:
        return bool(stored.get("norm_output", False)), True
    return False, bool(stored.get("norm_output", True))


def check_axes(file: Path, section: Any, target: PreTrainedConfig) -> None:
    """Refuse a head with positions of several axes for a target that has one.

    The reverse is served, by counting rows: such heads are published for Qwen-VL, and only accept less.
    """
    given = (getattr(target.get_text_config(decoder=True), "rope_parameters", None) or {}).get(
        "mrope_section"
    )
    if section is not None and given is None:
        allowed = "positions of one axis, as this target has them"
        raise CheckpointError(f"{file}: mrope_section", section, allowed)


def read_taps(file: Path, stored: dict[str, Any], layers: int) -> list[int]:
    """Layers whose inputs a published head reads; empty where its config does not say.

    Ids at the top level (speculators, vLLM) are those layers. Ids in `eagle_config` (SpecForge, SGLang) are
    layers whose outputs are read, -1 for the embeddings. vLLM knows the top level alone, so that counts
    where both are given.

    Raises:
        CheckpointError: an output is read that no layer of the target reads.
    """
    nested = stored.get("eagle_config") or {}
    inputs, outputs = (
        next((list(table[name]) for name in TAPS if table.get(name)), []) for table in (stored, nested)
    )
    if inputs:
        return inputs
    if any(not -1 <= output < layers - 1 for output in outputs):
        allowed = f"ids from -1 to {layers - 2}: outputs that another of the target's {layers} layers reads"
        raise CheckpointError(f"{file}: eagle_config", outputs, allowed)
    return [output + 1 for output in outputs]


def add_words(path: Path, tensors: dict[str, Tensor], vocabulary: int) -> None:
    """Check the tables of a reduced vocabulary, and add `t2d` where it was left out.

    Raises:
        CheckpointError: a token is none of the target's, comes twice, or is in one table alone.
    """
    offsets = tensors.get("d2t")
    if offsets is None or offsets.dim() != 1:
        return  # the comparison of layouts says so
    tokens = torch.arange(len(offsets)) + offsets
    known = torch.zeros(vocabulary, dtype=torch.bool)
    if tokens.min() >= 0 and tokens.max() < vocabulary:
        known[tokens] = True
    if int(known.sum()) != len(tokens):
        allowed = f"different tokens from 0 to {vocabulary - 1}"
        raise CheckpointError("drafter", f"d2t of {path.parent.name}", allowed)
    if not torch.equal(tensors.setdefault("t2d", known).bool(), known):
        raise CheckpointError("drafter", f"t2d of {path.parent.name}", "the tokens that d2t leads to")


def first_layer_of(file: Path, stored: dict[str, Any]) -> dict[str, Any]:
    """The config of an EAGLE-3 head of one layer in that of a P-EAGLE head.

    Raises:
        CheckpointError: some of its layers have windows, and others none.
    """
    nested = stored.get("transformer_layer_config")
    table = {**(stored if nested is None else nested), "num_hidden_layers": 1}
    types = table.get("layer_types") or []
    if len({*types}) > 1 or (not types and table.get("use_sliding_window")):
        allowed = "layer_types of one kind: layers of a P-EAGLE head that all have a window, or none"
        raise CheckpointError(f"{file}: layer_types", types, allowed)
    table["layer_types"] = types[:1] or None
    made = table if nested is None else {**stored, "transformer_layer_config": table}
    return {name: value for name, value in made.items() if name not in ("embed_requires_grad", *TOKEN)}


def parallel_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of a P-EAGLE head by the names here."""
    made = {f"decoder.{name}" if name.startswith("layers.") else name: each for name, each in tensors.items()}
    return made | {MASK: tensors[MASK].flatten()}


def parallel_config(
    file: Path, config: Eagle3Config, stored: dict[str, Any], tensors: dict[str, Tensor]
) -> ParallelConfig:
    """The config of a P-EAGLE head.

    Args:
        file: for messages.
        config: of its first layer, as of an EAGLE-3 head.
        stored: its config.json.
        tensors: by the names here.

    Raises:
        CheckpointError: the config names no mask token, or none of the target's.
    """
    token = next((stored[name] for name in TOKEN if stored.get(name) is not None), None)
    if not isinstance(token, int) or not 0 <= token < config.vocabulary:
        allowed = f"the token whose embedding a mask has, from 0 to {config.vocabulary - 1}"
        raise CheckpointError(f"{file}: mask_token_id", token, allowed)
    methods = (stored.get("speculators_config") or {}).get("proposal_methods") or [{}]
    most = int(methods[0].get("speculative_tokens") or PREDICTIONS)
    known = config.to_dict()
    depths = {int(name.split(".")[2]) for name in tensors if name.startswith("decoder.layers.")}
    own = {"num_layers": 1 + max(depths), "mask_token": token, "own_embedding": EMBEDDING in tensors}
    shape = {"norm_feedback": False, "norm_logits": True, "num_draft_tokens": most, "depth": most, "top_k": 1}
    return ParallelConfig(**{**known, **own, **shape, "model_type": ParallelConfig.model_type})
