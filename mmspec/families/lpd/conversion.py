"""Conversion of official LPD checkpoints, whose layout is not LlamaGen's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from mmspec.families.llamagen.modeling import LlamaGenForCausalLM
from mmspec.families.llamagen.official_layout import build, check_size, config_of, heads_of, renamed
from mmspec.families.lpd.modeling import LPDForCausalLM
from mmspec.models.official_files import count, measure

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
NULL = "fake_latent"  # the null class


def lpd_from_official(
    path: Path, tensors: Mapping[str, Tensor], image_size: int | None, num_heads: int | None
) -> LlamaGenForCausalLM | None:
    """Build the LPD of an official state dict; None for another model's."""
    if NULL not in tensors:
        return None
    width = measure(path, tensors, r"(z_proj_ln|norm)\.weight")
    depth = count(tensors, r"blocks\.(\d+)\.")
    places = measure(path, tensors, r"pos_embed", axis=1)
    grid = math.isqrt(places - 1)
    check_size(image_size, grid)
    own = dict(tensors)
    # here the null class is the last one, and vectors of positions have no batch axis
    for name in ("mask_token", "pos_embed"):
        if name in own and own[name].dim() == 3:
            own[name] = own[name][0]
    null, classes = own.pop(NULL), own.get("class_emb.weight")
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
