"""Hydra's heads as their authors publish them: a folder with `hydra_lm_head.pt` (or .safetensors).

Its config says how many heads there are, but nothing of the prefix layer, which has the sizes of a layer of
the target.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig

from mmspec.errors import CheckpointError
from mmspec.models.head_layers import LlamaLayerConfig
from mmspec.models.hydra import HydraConfig, HydraHead
from mmspec.models.official_files import fill, find_file, find_tensors, measure, open_checkpoint, read_config

__all__ = [
    "read_hydra",
]

FILES = ("hydra_lm_head.safetensors", "hydra_lm_head.pt")
# layers of a head stand in a sequence, for Hydra++ with dropout between them
LAYER = re.compile(r"hydra_mlp\.(\d+)\.(\d+)\.(linear|res_connection)\.(weight|bias)")
OUTPUT = re.compile(r"hydra_lm_head\.(\d+)\.(?:1\.)?(weight|bias)")
PREFIX = "prefix_embeding_layer."  # their spelling
# embeddings are the target's; old versions of transformers kept tables of the rotary embedding
IGNORED = r"input_embed_fn\.weight|decoder\.embed_tokens\.weight|.*\.rotary_emb\..*"
ARCHITECTURES = ("mlp", "prefix-mlp")


def read_hydra(folder: Path, target: PreTrainedConfig) -> HydraHead | None:
    """Read the heads in a folder of that layout; None if it is no such folder.

    Args:
        folder: with the file and a config.json.
        target: of what they are to draft for. Which target they were trained for is not written in a way
            that can be checked; its width and vocabulary are checked when they are fit to it.

    Raises:
        CheckpointError: the file is damaged, of another architecture, or keys are missing, unknown or of
            another shape.
    """
    path = find_file(folder, FILES)
    if path is None:
        return None
    check_architecture(path, read_config(folder))
    tensors = rename(find_tensors(path, open_checkpoint(path)))
    head = HydraHead(read_shape(path, tensors, target))
    fill(path, head, tensors, IGNORED)
    return head


def check_architecture(path: Path, stored: dict[str, Any]) -> None:
    """Refuse heads of Hydra's repository that are not Hydra's.

    Raises:
        CheckpointError: they are.
    """
    for name, allowed in (
        ("hydra_head_arch", ARCHITECTURES),
        ("grounded_heads", (True,)),
        ("hidden_state_offset", (0,)),
    ):
        if stored.get(name, allowed[0]) not in allowed:
            what = f"Hydra's heads, whose config has {' or '.join(map(str, allowed))} there"
            raise CheckpointError(f"{path.parent / 'config.json'}: {name}", stored[name], what)


def read_shape(path: Path, tensors: dict[str, Tensor], target: PreTrainedConfig) -> HydraConfig:
    """The config of heads whose tensors have our names, for a target of that config."""
    block = r"mlps\.0\.blocks\.\d+\.weight"
    shape: dict[str, Any] = {
        "vocabulary": measure(path, tensors, r"lm_heads\.\d+\.weight"),
        "hidden_size": measure(path, tensors, r"lm_heads\.\d+\.weight", axis=1),
        "num_heads": len([name for name in tensors if re.fullmatch(r"lm_heads\.\d+\.weight", name)]),
        "num_layers": 1 + len([name for name in tensors if re.fullmatch(block, name)]),
        "own_lm_heads": True,
        "prefix_attention": any(name.startswith("decoder.") for name in tensors),
    }
    if shape["prefix_attention"]:
        text, attention = target.get_text_config(decoder=True), r"decoder\.layers\.0\.self_attn\."
        wide = LlamaLayerConfig.sizes_for(text, 0)["head_dim"]
        shape |= {
            "head_dim": wide,
            "num_attention_heads": measure(path, tensors, rf"{attention}q_proj\.weight") // wide,
            "num_key_value_heads": measure(path, tensors, rf"{attention}k_proj\.weight") // wide,
            "intermediate_size": measure(path, tensors, r"decoder\.layers\.0\.mlp\.up_proj\.weight"),
            "rms_norm_eps": float(getattr(text, "rms_norm_eps", 1e-6)),
            "rope_theta": float((getattr(text, "rope_parameters", None) or {}).get("rope_theta", 10000.0)),
        }
    return HydraConfig(**shape)


def rename(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Published tensors by our names; what is unknown keeps its own."""
    steps = {(match[1], int(match[2])) for name in found if (match := LAYER.fullmatch(name))}
    order = {head: sorted(step for other, step in steps if other == head) for head, _ in steps}
    renamed = {}
    for name, tensor in found.items():
        if match := LAYER.fullmatch(name):
            head, step, part, kind = match.groups()
            layer = order[head].index(int(step))
            if part == "res_connection":
                own = f"shortcut.{kind}"
            else:
                own = f"blocks.{layer - 1}.{kind}" if layer else kind
            renamed[f"mlps.{head}.{own}"] = tensor
        elif match := OUTPUT.fullmatch(name):
            renamed[f"lm_heads.{match[1]}.{match[2]}"] = tensor
        elif name.startswith(PREFIX):
            renamed["decoder." + name.removeprefix(PREFIX)] = tensor
        else:
            renamed[name] = tensor
    return renamed
