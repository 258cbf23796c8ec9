"""Reader of Hydra's heads as their authors publish them: `hydra_lm_head.pt`.

The files do not name the target; width and vocabulary are checked when the heads are fitted to one. The
config does not describe the prefix layer, whose sizes are read from its tensors.
"""

from __future__ import annotations

import re

from mmspec.errors import CheckpointError
from mmspec.heads.layers import LlamaLayerConfig
from mmspec.heads.published import Found, Layout, level_sizes
from mmspec.methods.hydra.head import HydraConfig

__all__ = ["read_hydra"]

ALLOWED = {"hydra_head_arch": ("mlp", "prefix-mlp"), "grounded_heads": (True,), "hidden_state_offset": (0,)}


def hydra_config(found: Found) -> HydraConfig:
    """The config of Hydra's heads."""
    for name, allowed in ALLOWED.items():
        if found.stored.get(name, allowed[0]) not in allowed:
            rule = f"must be {' or '.join(map(str, allowed))} in the config of Hydra's heads"
            raise CheckpointError(f"{found.file}: {name}", found.stored[name], rule)
    number_layers(found)
    blocks, attention = found.count(r"mlps\.0\.blocks\.\d+\.weight"), r"decoder\.layers\.0\.self_attn\."
    shape = level_sizes(found) | {"num_layers": 1 + blocks, "prefix_attention": False}
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
    """Number the layers of heads without gaps; Hydra++ has dropout between them in its sequences."""
    step = re.compile(r"mlps\.(\d+)\.step\.(\d+)\.(weight|bias)")
    places = {name: match.groups() for name in found.tensors if (match := step.fullmatch(name))}
    order = sorted({(head, int(number)) for head, number, _ in places.values()})
    for name, (head, number, kind) in places.items():
        layer = [other for own, other in order if own == head].index(int(number))
        block = f"blocks.{layer - 1}." if layer else ""
        found.tensors[f"mlps.{head}.{block}{kind}"] = found.tensors.pop(name)


read_hydra = Layout(
    what="a file of Hydra's heads",
    config=hydra_config,
    names=(
        (r"hydra_mlp\.(\d+)\.\d+\.res_connection\.(weight|bias)", r"mlps.\1.shortcut.\2"),
        (r"hydra_mlp\.(\d+)\.(\d+)\.linear\.(weight|bias)", r"mlps.\1.step.\2.\3"),
        (r"hydra_lm_head\.(\d+)\.(?:1\.)?(weight|bias)", r"lm_heads.\1.\2"),
        (r"prefix_embeding_layer\.(.*)", r"decoder.\1"),  # spelled so in the release
    ),
    files=("hydra_lm_head.safetensors", "hydra_lm_head.pt"),
    ignored=r"input_embed_fn\.weight|decoder\.embed_tokens\.weight|.*\.rotary_emb\..*",
)
