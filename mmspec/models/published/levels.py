"""Medusa's and Hydra's heads as their authors publish them: `medusa_lm_head.pt`, `hydra_lm_head.pt`.

Which target they were trained for is not written in a way that can be checked; its width and vocabulary are
checked when heads are fit to it. Sizes are measured: the config of medusa-vicuna-7b-v1.3 speaks of two heads
and its file holds five, and Hydra's says nothing of the prefix layer, a layer of the target's sizes.
"""

from __future__ import annotations

import re
from typing import Any

from mmspec.errors import CheckpointError
from mmspec.models.head_layers import LlamaLayerConfig
from mmspec.models.hydra import HydraConfig
from mmspec.models.medusa import MedusaConfig
from mmspec.models.published.layout import Found, Layout

__all__ = ["read_hydra", "read_medusa"]

OUTPUT = r"lm_heads\.\d+\.weight"
ALLOWED = {"hydra_head_arch": ("mlp", "prefix-mlp"), "grounded_heads": (True,), "hidden_state_offset": (0,)}


def sizes_of(found: Found) -> dict[str, Any]:
    """Settings that both kinds of heads have, which all have output matrices of their own."""
    return {
        "vocabulary": found.size(OUTPUT),
        "hidden_size": found.size(OUTPUT, axis=1),
        "num_heads": found.count(OUTPUT),
        "own_lm_heads": True,
    }


def medusa_config(found: Found) -> MedusaConfig:
    """The config of Medusa's heads."""
    layers = [int(match[1]) for name in found.tensors if (match := re.match(r"blocks\.\d+\.(\d+)\.", name))]
    return MedusaConfig(**sizes_of(found), num_layers=1 + max(layers, default=-1))


def hydra_config(found: Found) -> HydraConfig:
    """The config of Hydra's heads."""
    for name, allowed in ALLOWED.items():
        if found.stored.get(name, allowed[0]) not in allowed:
            what = f"Hydra's heads, whose config has {' or '.join(map(str, allowed))} there"
            raise CheckpointError(f"{found.file}: {name}", found.stored[name], what)
    number_layers(found)
    blocks, attention = found.count(r"mlps\.0\.blocks\.\d+\.weight"), r"decoder\.layers\.0\.self_attn\."
    shape = sizes_of(found) | {"num_layers": 1 + blocks, "prefix_attention": False}
    if any(name.startswith("decoder.") for name in found.tensors):
        text = found.text
        wide = LlamaLayerConfig.sizes_for(text, 0)["head_dim"]
        shape |= {
            "prefix_attention": True,
            "head_dim": wide,
            "num_attention_heads": found.size(rf"{attention}q_proj\.weight") // wide,
            "num_key_value_heads": found.size(rf"{attention}k_proj\.weight") // wide,
            "intermediate_size": found.size(r"decoder\.layers\.0\.mlp\.up_proj\.weight"),
            "rms_norm_eps": float(getattr(text, "rms_norm_eps", 1e-6)),
            "rope_theta": float((getattr(text, "rope_parameters", None) or {}).get("rope_theta", 10000.0)),
        }
    return HydraConfig(**shape)


def number_layers(found: Found) -> None:
    """Number the layers of heads, which stand in a sequence, for Hydra++ with dropout between them."""
    step = re.compile(r"mlps\.(\d+)\.step\.(\d+)\.(weight|bias)")
    places = {name: match.groups() for name in found.tensors if (match := step.fullmatch(name))}
    order = sorted({(head, int(number)) for head, number, _ in places.values()})
    for name, (head, number, kind) in places.items():
        layer = [other for own, other in order if own == head].index(int(number))
        block = f"blocks.{layer - 1}." if layer else ""
        found.tensors[f"mlps.{head}.{block}{kind}"] = found.tensors.pop(name)


read_medusa = Layout(
    what="Medusa's heads",
    config=medusa_config,
    # head i is a sequence: residual blocks 0 ... n - 1, then its output matrix at n
    names=(
        (r"(?:medusa_head\.)?(\d+)\.(\d+)\.linear\.(weight|bias)", r"blocks.\1.\2.\3"),
        (r"(?:medusa_head\.)?(\d+)\.\d+\.weight", r"lm_heads.\1.weight"),
    ),
    files=("medusa_lm_head.safetensors", "medusa_lm_head.pt"),
    has_config=False,
    ignored="",
)
read_hydra = Layout(
    what="Hydra's heads",
    config=hydra_config,
    names=(
        (r"hydra_mlp\.(\d+)\.\d+\.res_connection\.(weight|bias)", r"mlps.\1.shortcut.\2"),
        (r"hydra_mlp\.(\d+)\.(\d+)\.linear\.(weight|bias)", r"mlps.\1.step.\2.\3"),
        (r"hydra_lm_head\.(\d+)\.(?:1\.)?(weight|bias)", r"lm_heads.\1.\2"),
        (r"prefix_embeding_layer\.(.*)", r"decoder.\1"),  # their spelling
    ),
    files=("hydra_lm_head.safetensors", "hydra_lm_head.pt"),
    ignored=r"input_embed_fn\.weight|decoder\.embed_tokens\.weight|.*\.rotary_emb\..*",
)
