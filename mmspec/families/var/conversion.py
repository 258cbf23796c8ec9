"""Conversion of official VAR checkpoints and image tokenizers, whose layouts are not LlamaGen's.

The tokenizer has the names of latent diffusion, except that q, k and v of its attention are one tensor.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from torch import Tensor

from mmspec.errors import CheckpointError
from mmspec.families.llamagen.modeling import LlamaGenForCausalLM
from mmspec.families.llamagen.official_layout import build, check_size, config_of, renamed
from mmspec.families.var.modeling import VARForCausalLM
from mmspec.families.var.tokenizer import ScaleVQModel
from mmspec.models.autoencoders import build_autoencoder, vq_settings
from mmspec.models.official_files import count, measure

# the part of a name -> the official one
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
LEVELS = "lvl_1L"  # key of the scale of each place
VAR_HEAD = 64  # width of a head in every published size

# of the tokenizer: one convolution for each scale, for several scales, or for all
SMOOTHING = r"quantize\.quant_resi\.(?:qresi_ls\.|qresi\b|)(\d*)\.?(weight|bias)"
STACKED = r"(.*attn(?:_1|\.\d+))\.qkv\.(weight|bias)"


def var_from_official(
    path: Path, tensors: Mapping[str, Tensor], image_size: int | None, num_heads: int | None
) -> LlamaGenForCausalLM | ScaleVQModel | None:
    """Build the VAR, or its image tokenizer, of an official state dict; None for another model's."""
    if any(name.startswith("quantize.quant_resi.") for name in tensors):
        return scale_vq_from_official(path, tensors)
    if "pos_1LC" not in tensors:
        return None
    if LEVELS not in tensors:
        raise CheckpointError("checkpoint", str(path), f"has missing keys: {LEVELS}, the scale of each place")
    sides = [math.isqrt(count) for count in tensors[LEVELS].flatten().long().bincount().tolist()]
    check_size(image_size, sides[-1])
    own, lone = dict(tensors), r"pos_1LC|pos_start|.*\.(scale_mul_1H11|ada_gss)"
    for name, tensor in tensors.items():  # official tensors of these names have a batch axis
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
        num_hidden_layers=count(own, r"blocks\.(\d+)\."),
        num_attention_heads=known if num_heads is None else num_heads,
        num_classes=measure(path, own, r"class_emb\.weight") - 1,
    )
    return build(path, own, VARForCausalLM, config, partial(renamed, VAR_RENAMES))


def scale_vq_from_official(path: Path, tensors: Mapping[str, Tensor]) -> ScaleVQModel:
    """Build the tokenizer of a state dict of VAR (2404.02905), which lacks the sizes of the scales."""
    own: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if match := re.fullmatch(SMOOTHING, name):
            own[f"quantize.smoothing.{match[1] or 0}.{match[2]}"] = tensor
        elif match := re.fullmatch(STACKED, name):
            parts = zip("qkv", tensor.chunk(3), strict=False)
            own |= {f"{match[1]}.{part}.{match[2]}": each for part, each in parts}
        else:
            own[name] = tensor
    settings = vq_settings(path, own)
    del settings["vq_embed_dim"]  # that of the latents
    settings["convolutions"] = sum(bool(re.fullmatch(r"quantize\.smoothing\.\d+\.weight", n)) for n in own)
    vq: ScaleVQModel = build_autoencoder(ScaleVQModel, settings, path, own)
    return vq
