"""Models of official LPD and VAR checkpoints, whose layouts are not LlamaGen's."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from mmspec.errors import CheckpointError
from mmspec.families.llamagen.modeling import LlamaGenForCausalLM
from mmspec.families.llamagen.official_layout import build, check_size, config_of, heads_of, renamed
from mmspec.families.parallel_images.modeling import LPDForCausalLM
from mmspec.families.parallel_images.scales import VARForCausalLM
from mmspec.models.official_files import measure

__all__ = ["lpd_from_official", "var_from_official"]

# the part of a name -> the official one
LPD_RENAMES = (
    (r"^lm_head\.", "head."),
    (r"^model\.(mask_token)", r"\1"),
    (r"^model\.position_embedding\.weight", "pos_embed"),
    (r"^model\.embedding_norm\.", "z_proj_ln."),
    (r"^model\.embed_tokens\.", "token_emb."),
    (r"^model\.cls_embedding\.embedding_table\.", "class_emb."),
    (r"^model\.layers\.", "blocks."),
    (r"^model\.", ""),
    (r"\.self_attn\.[qkv]_proj\.", ".attn.qkv."),
    (r"\.self_attn\.o_proj\.", ".attn.proj."),
    (r"\.input_layernorm\.", ".norm1."),
    (r"\.post_attention_layernorm\.", ".norm2."),
)
VAR_RENAMES = (
    (r"^lm_head\.", "head."),
    (r"^model\.start", "pos_start"),
    (r"^model\.position_embedding\.weight", "pos_1LC"),
    (r"^model\.level_embedding\.", "lvl_embed."),
    (r"^model\.embed_tokens\.", "word_embed."),
    (r"^model\.cls_embedding\.embedding_table\.", "class_emb."),
    (r"^model\.head_modulation\.linear\.", "head_nm.ada_lin.1."),
    (r"^model\.shared_modulation\.linear\.", "shared_ada_lin.1."),
    (r"^model\.layers\.", "blocks."),
    (r"\.self_attn\.[qkv]_proj\.weight", ".attn.mat_qkv.weight"),
    (r"\.self_attn\.k_proj\.bias", ".attn.zero_k_bias"),
    (r"\.self_attn\.([qv])_proj\.bias", r".attn.\1_bias"),
    (r"\.self_attn\.o_proj\.", ".attn.proj."),
    (r"\.self_attn\.log_scale", ".attn.scale_mul_1H11"),
    (r"\.modulation\.linear\.", ".ada_lin.1."),
    (r"\.offsets", ".ada_gss"),
    (r"\.mlp\.", ".ffn."),
)
LEVELS = "lvl_1L"  # of a VAR: the scale of each place
VAR_HEAD = 64  # width of a head in every published size


def lpd_from_official(
    path: Path, tensors: Mapping[str, Tensor], image_size: int | None, num_heads: int | None
) -> LlamaGenForCausalLM:
    """The LPD of an official state dict."""
    width = measure(path, tensors, r"(z_proj_ln|norm)\.weight")
    depth = len({match[1] for name in tensors if (match := re.match(r"blocks\.(\d+)\.", name))})
    places = measure(path, tensors, r"pos_embed", axis=1)
    grid = math.isqrt(places - 1)
    check_size(image_size, grid)
    own = dict(tensors)
    # the null class is the last one here, and vectors of positions have no batch
    for name in ("mask_token", "pos_embed"):
        if name in own and own[name].dim() == 3:
            own[name] = own[name][0]
    null, classes = own.pop("fake_latent"), own.get("class_emb.weight")
    if classes is not None and null.shape == (1, *classes.shape[1:]):
        own["class_emb.weight"] = torch.cat([classes, null])
    config = config_of(
        path,
        LPDForCausalLM.config_class,
        body="vit",
        vocab_size=measure(path, tensors, r"(token_emb|head)\.weight"),
        hidden_size=width,
        intermediate_size=measure(path, tensors, r"blocks\.\d+\.mlp\.fc1\.weight"),
        num_hidden_layers=depth,
        num_attention_heads=heads_of(path, depth, width, num_heads),
        grid_size=grid,
        num_classes=measure(path, tensors, r"class_emb\.weight"),
    )
    return build(path, own, LPDForCausalLM, config, partial(renamed, LPD_RENAMES))


def var_from_official(
    path: Path, tensors: Mapping[str, Tensor], image_size: int | None, num_heads: int | None
) -> LlamaGenForCausalLM:
    """The VAR of an official state dict."""
    if LEVELS not in tensors:
        raise CheckpointError("checkpoint", str(path), f"missing keys: {LEVELS}, which tells the scales")
    sides = [math.isqrt(count) for count in tensors[LEVELS].flatten().long().bincount().tolist()]
    check_size(image_size, sides[-1])
    own, lone = dict(tensors), r"pos_1LC|pos_start|.*\.(scale_mul_1H11|ada_gss)"
    for name, tensor in tensors.items():  # these are broadcast over a batch
        if re.fullmatch(lone, name) and tensor.shape[:1] == (1,):
            own[name] = tensor.reshape(tensor.shape[-2:]) if name.endswith("ada_gss") else tensor[0]
    width = measure(path, own, r"(class_emb|lvl_embed)\.weight", axis=1)
    normalised = any(name.endswith("scale_mul_1H11") for name in own)
    known = measure(path, own, r".*\.scale_mul_1H11") if normalised else max(1, width // VAR_HEAD)
    config = config_of(
        path,
        VARForCausalLM.config_class,
        patch_nums=sides,
        latent_channels=measure(path, own, r"word_embed\.weight", axis=1),
        shared_modulation="shared_ada_lin.1.weight" in own,
        normalised_attention=normalised,
        vocab_size=measure(path, own, r"head\.(weight|bias)"),
        hidden_size=width,
        intermediate_size=measure(path, own, r"blocks\.\d+\.ffn\.fc1\.(weight|bias)"),
        num_hidden_layers=len({match[1] for name in own if (match := re.match(r"blocks\.(\d+)\.", name))}),
        num_attention_heads=known if num_heads is None else num_heads,
        num_classes=measure(path, own, r"class_emb\.weight") - 1,
    )
    return build(path, own, VARForCausalLM, config, partial(renamed, VAR_RENAMES))
