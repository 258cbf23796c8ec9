"""Conversion of official checkpoints of LlamaGen and related models to folders that `from_pretrained` loads.

All sizes are read from the shapes, except two. The number of heads is looked up by width and depth. The grid
is read from the file name (`c2i_B_256.pt`, `t2i_XL_stage2_512.pt`), or from an LPD's positions. Files of VAR
contain heads and scales. Folders of LANTERN (2410.03355) hold LlamaGen under the key names of Llama. Their
config names `LlamaForCausalLM`, which would load them without raster positions and without the condition; the
embedding of the condition identifies them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import save_file
from torch import Tensor
from transformers import Dinov2Config

from mmspec.atomic_file import new_folder
from mmspec.errors import CheckpointError, InputError
from mmspec.families.image_parts import RAW_CODEBOOK_FILE
from mmspec.families.llamagen.configuration import RESIZES, LlamaGenConfig
from mmspec.families.llamagen.modeling import LlamaGenForCausalLM
from mmspec.families.llamagen.official_layout import (
    build,
    check_size,
    config_of,
    grid_size_of,
    heads_of,
    renamed,
)
from mmspec.families.llamagen.vq import is_vq, vq_from_official
from mmspec.models.checkpoint import AnyModel, first_line
from mmspec.models.official_files import find_tensors, measure, open_checkpoint, read_config
from mmspec.open_types import Json
from mmspec.plugins import FAMILIES, load

CONDITIONS = {"c2i": "class", "t2i": "caption"}
# fields of LANTERN's config that have the same names here
FIELDS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "rms_norm_eps", "rope_base", "num_classes", "caption_dim"),
)

CONTAINERS = ("model", "module", "state_dict")
CONTROL = ("adapter.", "adapter_mlp.", "condition_layers.", "condition_mlp.cap_proj.")
HEAD_WIDTH = 64  # of every published DINOv2
# how the authors resize a control image, by the kind of control in the file name
RESIZE_OF = (("canny_base|edge|hed|lineart|depth", "bicubic"), ("canny|seg", "nearest"))

# the part of a name -> the official one; q, k and v are stacked in one official tensor
RENAMES = (
    # official files name the parts of DINOv2 as older versions of transformers do
    (r"\.attention\.q_proj\.", ".attention.attention.query."),
    (r"\.attention\.k_proj\.", ".attention.attention.key."),
    (r"\.attention\.v_proj\.", ".attention.attention.value."),
    (r"\.attention\.o_proj\.", ".attention.output.dense."),
    (r"^control_encoder\.adapter\.", "adapter.model."),
    (r"^control_encoder\.projection\.", "adapter_mlp."),
    (r"^control_encoder\.condition\.", "condition_mlp.cap_proj."),
    (r"^control_encoder\.layers\.", "condition_layers."),
    (r"^model\.", ""),
    (r"^lm_head\.", "output."),
    (r"^embed_tokens\.", "tok_embeddings."),
    (r"\.self_attn\.[qkv]_proj\.", ".attention.wqkv."),
    (r"\.self_attn\.o_proj\.", ".attention.wo."),
    (r"\.mlp\.gate_proj\.", ".feed_forward.w1."),
    (r"\.mlp\.up_proj\.", ".feed_forward.w3."),
    (r"\.mlp\.down_proj\.", ".feed_forward.w2."),
    (r"\.input_layernorm\.", ".attention_norm."),
    (r"\.post_attention_layernorm\.", ".ffn_norm."),
)


def is_lantern(tensors: Mapping[str, Tensor]) -> bool:
    """True if these are LlamaGen's weights under the names of Llama."""
    return any(name.startswith(("model.cls_embedding.", "model.layers.0.self_attn.")) for name in tensors)


def is_controlled(tensors: Mapping[str, Tensor]) -> bool:
    """True if these are the weights of a ControlAR."""
    return any(name.startswith(CONTROL) for name in tensors)


def config_from_lantern(path: Path) -> LlamaGenConfig:
    """Read the config of LANTERN beside the weights."""
    stored = read_config(path.parent)
    try:
        grid_size = math.isqrt(stored["block_size"])
        settings = {name: stored[name] for name in FIELDS if name in stored}
        condition = CONDITIONS[stored["input_type"]]
        if condition == "caption":
            settings["caption_length"] = stored["cls_token_num"]
        return LlamaGenConfig(condition_type=condition, grid_size=grid_size, **settings)
    except (KeyError, TypeError, ValueError, ArithmeticError, StrictDataclassError) as error:
        reason = first_line(error)
        rule = f"must be a LlamaGen config with block_size, input_type (c2i or t2i) and sizes ({reason})"
        raise CheckpointError("checkpoint", str(path.parent / "config.json"), rule) from error


def convert_checkpoint(
    checkpoint: str | Path,
    out: str | Path,
    *,
    image_size: int | None = None,
    num_heads: int | None = None,
    control_resize: str | None = None,
    dtype: torch.dtype | None = None,
) -> Json:
    """Convert an official transformer or image tokenizer (VQ-8, VQ-16, VAR's) to a safetensors folder.

    Transformers are LlamaGen (c2i, t2i), also with image control (ControlAR), LPD, NAR, PAR and VAR.

    Args:
        checkpoint: the official file, or a folder with the `config.json` and `model.safetensors` of LANTERN.
        out: folder to write; it appears complete or not at all.
        image_size: pixels per side that the transformer was trained for, if the file name lacks them.
        num_heads: attention heads, if width and depth are not those of a published size.
        control_resize: "nearest" or "bicubic", of control images, if the file name lacks the kind of control.
        dtype: number format of the written weights; None keeps the file's.

    Returns:
        What was written: `path`, `kind`, `parameters`, `dtype`, and `grid_size` or `stride`.

    Raises:
        CheckpointError: the file is damaged, or its keys or shapes are not those of such a model.
        InputError: an argument is missing, or contradicts the file.
    """
    path, out = Path(checkpoint), Path(out)
    if path.is_dir():
        path /= "model.safetensors"
    content = open_checkpoint(path)
    # without `parts`, the prefixes that identify LANTERN are kept
    tensors = find_tensors(path, content, (*CONTAINERS, "ema"), parts=False)
    if control_resize is not None and not is_controlled(tensors):
        rule = "must be None: this model is not controlled by an image"
        raise InputError("control_resize", control_resize, rule)
    model: AnyModel
    if is_vq(tensors):
        model, codebook = vq_from_official(path, find_tensors(path, content, ("ema", *CONTAINERS)))
    elif is_lantern(tensors):
        config = config_from_lantern(path)
        check_size(image_size, config.grid_size)
        model = build(path, tensors, LlamaGenForCausalLM, config, lambda name: name)
    else:
        model = model_of_kin(path, tensors, image_size, num_heads)
        if model is None:
            model = llamagen_from_official(path, tensors, image_size, num_heads, control_resize)
    summary: Json
    if isinstance(model, LlamaGenForCausalLM):
        summary = {"kind": model.config.condition_type, "grid_size": model.config.grid_size}
    else:
        summary = {"kind": "vq", "stride": 2 ** (len(model.config.block_out_channels) - 1)}
    if dtype is not None:
        model.to(dtype)
    with new_folder(out) as folder:
        model.save_pretrained(folder)
        if is_vq(tensors):
            save_file({"codebook": codebook}, folder / RAW_CODEBOOK_FILE)
    count = sum(parameter.numel() for parameter in model.parameters())
    return {
        "path": str(out),
        **summary,
        "parameters": count,
        "dtype": str(model.dtype).removeprefix("torch."),
    }


def model_of_kin(
    path: Path, tensors: Mapping[str, Tensor], image_size: int | None, num_heads: int | None
) -> AnyModel | None:
    """Build the model or image tokenizer of a related family, by its `official`; None for LlamaGen."""
    readers = (load(family.official) for family in FAMILIES.values() if family.official)
    read = (reader(path, tensors, image_size, num_heads) for reader in readers)
    return next((model for model in read if model is not None), None)


def llamagen_from_official(
    path: Path,
    tensors: Mapping[str, Tensor],
    image_size: int | None = None,
    num_heads: int | None = None,
    control_resize: str | None = None,
) -> LlamaGenForCausalLM:
    """Build the model of an official state dict; `path` gives the image size, and the name in messages."""
    control = _control(path, tensors, control_resize) if is_controlled(tensors) else {}
    return from_layout(path, tensors, image_size, num_heads, LlamaGenForCausalLM, **control)


def from_layout(
    path: Path,
    tensors: Mapping[str, Tensor],
    image_size: int | None,
    num_heads: int | None,
    kind: type[LlamaGenForCausalLM],
    renames: Sequence[tuple[str, str]] = (),
    **settings: Any,
) -> LlamaGenForCausalLM:
    """Build the model of a state dict in LlamaGen's layout; `renames` are for parts that LlamaGen lacks."""
    grid_size = grid_size_of(path, image_size)
    config = infer_config(path, tensors, grid_size, num_heads, kind.config_class, **settings)
    return build(path, tensors, kind, config, partial(renamed, (*renames, *RENAMES)))


def infer_config(
    path: Path,
    tensors: Mapping[str, Tensor],
    grid_size: int,
    num_heads: int | None,
    kind: type[LlamaGenConfig] = LlamaGenConfig,
    further_layers: int = 0,
    **settings: Any,
) -> LlamaGenConfig:
    """Infer the config of a state dict, which has `further_layers` more layers than its published size."""
    layers = {int(match[1]) for name in tensors if (match := re.match(r"layers\.(\d+)\.attention\.", name))}
    if not layers:
        rule = "must be an official LlamaGen transformer (keys layers.0.attention.*) or image tokenizer"
        raise CheckpointError("checkpoint", str(path), rule)
    depth = len(layers)
    if layers != {*range(depth)}:
        gap = min({*range(depth)} - layers)
        raise CheckpointError("checkpoint", str(path), f"has missing keys: layers.{gap}.attention.*")
    width = measure(path, tensors, r"(layers\.\d+\.(attention|ffn)_norm|norm)\.weight")
    heads = heads_of(path, depth - further_layers, width, num_heads)
    head_dim = width // heads
    stacked = measure(path, tensors, r"layers\.\d+\.attention\.wqkv\.weight") - width
    key_value_heads, rest = divmod(stacked, 2 * head_dim)
    if rest or key_value_heads < 1 or heads % key_value_heads:
        key_value_heads = heads  # the shape of wqkv is wrong; `build` reports it with its name
    return config_of(
        path,
        kind,
        **settings,
        vocab_size=measure(path, tensors, r"(tok_embeddings|output)\.weight"),
        hidden_size=width,
        intermediate_size=measure(path, tensors, r"layers\.\d+\.feed_forward\.w[13]\.weight"),
        num_hidden_layers=depth,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        grid_size=grid_size,
        **_condition(path, tensors),
    )


def _condition(path: Path, tensors: Mapping[str, Tensor]) -> Json:
    if any(name.startswith(("cls_embedding.cap_proj.", "cls_embedding.uncond_")) for name in tensors):
        return {
            "condition_type": "caption",
            "caption_length": measure(path, tensors, r"cls_embedding\.uncond_embedding"),
            "caption_dim": measure(path, tensors, r"cls_embedding\.cap_proj\.fc1\.weight", axis=1),
        }
    rows = measure(path, tensors, r"cls_embedding\.embedding_table\.weight")
    return {"condition_type": "class", "num_classes": rows - 1}


def _control(path: Path, tensors: Mapping[str, Tensor], resize: str | None) -> Json:
    """Config fields of a ControlAR: its DINOv2, and how it resizes control images."""
    if resize is None:
        found = (how for kinds, how in RESIZE_OF if re.search(kinds, path.stem.lower()))
        resize = next(found, None)
    if resize not in RESIZES:
        rule = (
            "must be 'nearest' for Canny edges and segmentations, or 'bicubic' for others (--control-resize)"
        )
        raise InputError("control_resize", resize, rule)
    of = partial(measure, path, tensors)
    part = r"adapter\.model\."
    width, patch = of(part + r"layernorm\.weight"), of(part + r"embeddings\.patch.*weight", axis=2)
    places = of(part + r"embeddings\.position_embeddings", axis=1) - 1
    layers = {name.split(".")[4] for name in tensors if re.match(part + r"encoder\.layer\.", name)}
    inner = of(part + r"encoder\.layer\.\d+\.mlp\.fc1\.weight")
    vision = Dinov2Config(
        hidden_size=width,
        num_hidden_layers=len(layers),
        num_attention_heads=max(1, width // HEAD_WIDTH),
        mlp_ratio=inner // width,
        image_size=patch * math.isqrt(places),
        patch_size=patch,
    )
    return {"control_config": vision, "control_resize": resize}
