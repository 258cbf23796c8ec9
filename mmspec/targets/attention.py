"""Attention of scoring forward passes: the kernel `tree_attention` where possible, else the model's own.

A model loaded with sdpa passes queries, keys and values to a function that transformers looks up by name.
While a draft is scored, this function is replaced in that thread, and the mask is replaced by the inputs of
`tree_attention`. Only the module classes in the table below are supported: other attention options (soft
caps, sinks, biases) cannot be expressed by the kernel, and such modules keep their own attention, as does a
prefill. On a CPU the replacement is torch's own attention without copies of shared keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedConfig, PreTrainedModel

from mmspec.core.cache import MASKABLE_LAYERS, RaggedCache
from mmspec.core.draft import Nodes
from mmspec.errors import UnsupportedModelError
from mmspec.kernels import tree_attention
from mmspec.kernels.backend import use_triton
from mmspec.models.replaced import replaced_attention
from mmspec.open_types import AnyFunction

__all__ = [
    "PLAIN_ATTENTION",
    "attends_by_kernel",
    "attends_plainly",
    "attention_on_tree",
    "mask_dtype",
    "tree_mask",
]

Mask = Tensor | dict[str, Tensor | None] | None

#: Classes of attention modules that need only the options of `tree_attention` and its mask.
PLAIN_ATTENTION = frozenset(
    {
        "ChameleonAttention",
        "Emu3Attention",
        "Gemma3Attention",
        "GemmaAttention",
        "Glm4Attention",
        "Glm4vTextAttention",
        "GlmAttention",
        "GlmImageTextAttention",
        "Lfm2Attention",
        "LlamaAttention",
        "LlamaGenAttention",
        "MistralAttention",
        "MixtralAttention",
        "Olmo2Attention",
        "OlmoAttention",
        "Phi3Attention",
        "Qwen2Attention",
        "Qwen2MoeAttention",
        "Qwen2VLAttention",
        "Qwen2_5_VLAttention",
        "Qwen3Attention",
        "Qwen3MoeAttention",
        "Qwen3NextAttention",
        "Qwen3VLMoeTextAttention",
        "Qwen3VLTextAttention",
        "Qwen3_5Attention",
        "Qwen3_5MoeAttention",
        "SmolLM3Attention",
    }
)
#: Keyword arguments of attention functions that have no effect here: the mask includes sliding windows.
EXPRESSED = {"is_causal", "position_ids", "sliding_window", "use_cache"}


def unexpressed(kwargs: Mapping[str, object]) -> set[str]:
    """Names of the keyword arguments that the mask does not express."""
    return {name for name, wish in kwargs.items() if wish is not None and wish is not False} - EXPRESSED


def attends_plainly(decoder: nn.Module) -> bool:
    """Return whether all attention of a decoder is in `PLAIN_ATTENTION` and selected by its config."""
    found = [module for module in decoder.modules() if "attention" in type(module).__name__.lower()]
    return bool(found) and all(
        type(module).__name__ in PLAIN_ATTENTION
        and type(module).__module__.startswith(("transformers.models.", "mmspec.families."))
        and getattr(module, "config", None) is decoder.config
        for module in found
    )


def mask_dtype(decoder: PreTrainedModel) -> torch.dtype | None:
    """Data type of additive attention masks for a decoder; None for boolean masks.

    Eager attention needs additive masks. On a CPU, sdpa would convert a boolean mask to an additive one in
    every layer.
    """
    is_additive = decoder.config._attn_implementation == "eager" or decoder.device.type == "cpu"
    return decoder.dtype if is_additive else None


def attends_by_kernel(decoder: PreTrainedModel, plain: bool, device: torch.device) -> bool:
    """Whether `attention_on_tree` replaces a decoder's attention by the kernel, which reads row lengths."""
    return plain and use_triton(device) and decoder.config._attn_implementation == "sdpa"


@contextmanager
def attention_on_tree(
    decoder: PreTrainedModel, plain: bool, cache: RaggedCache, nodes: Nodes, additive: torch.dtype | None
) -> Iterator[Mask]:
    """Replace a decoder's attention during one scoring forward pass; yields the mask to pass.

    Args:
        decoder: the language model.
        plain: whether it `attends_plainly`.
        cache: prepared by `begin_score`.
        nodes: of the draft.
        additive: data type of additive masks; None for boolean ones.
    """
    config, device = decoder.config, cache.lengths.device
    by_kernel = use_triton(device)
    # in this order: reading a config of transformers costs more than building the mask
    on_cpu = device.type == "cpu" and not torch.compiler.is_compiling()  # dynamo cannot trace locks
    replaces = plain and (by_kernel or on_cpu) and config._attn_implementation == "sdpa"
    if not replaces or not (by_kernel or shares_keys(config)):
        yield cache.attention_mask(nodes, additive)
        return

    def on_tree(own: AnyFunction) -> AnyFunction:
        def attention(module: nn.Module, *args: Any, **given: Any) -> object:
            is_of_decoder = getattr(module, "config", None) is config
            ours = attend if by_kernel else partial(attend_grouped, own)
            return (ours if is_of_decoder else own)(module, *args, **given)

        return attention

    with replaced_attention(on_tree):
        yield tree_mask(cache, nodes) if by_kernel else cache.attention_mask(nodes, additive)


def shares_keys(config: PreTrainedConfig) -> bool:
    """Whether several query heads of a decoder share one key head (grouped-query attention)."""
    heads = getattr(config, "num_attention_heads", None)
    return heads != getattr(config, "num_key_value_heads", heads)


def attend_grouped(
    own: AnyFunction,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Attention function for transformers on a CPU, where `own` copies keys for each head that reads them.

    Returns:
        [B, n, heads, d] and, for the weights, None.
    """
    if attention_mask is None or query.shape[2] == 1 or dropout or unexpressed(kwargs):
        found: tuple[Tensor, None] = own(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return found
    read = scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, scale=scaling, enable_gqa=True
    )
    return read.transpose(1, 2).contiguous(), None


def tree_mask(cache: RaggedCache, nodes: Nodes) -> Mask:
    """Encode a draft for `tree_attention`, in the form of an attention mask.

    Returns:
        [B, 1, n or 1, 2 + m] int32: the first committed token that each node attends to, the number of
        committed tokens, and 1 for each slot that the node attends to; a dict of them for models that mix
        layer types.
    """
    masks: dict[str, Tensor | None] = dict.fromkeys(cache.layer_types)
    for kind in MASKABLE_LAYERS & masks.keys():
        window = cache.sliding_window if kind == "sliding_attention" else None
        masks[kind] = pack(cache.lengths[:, None], nodes, window)
    return masks if len(masks) > 1 else masks[cache.layer_types[0]]


def pack(lengths: Tensor, nodes: Nodes, window: int | None) -> Tensor:
    """Mask of layers in which a node attends to the newest `window` tokens of its path, or to all."""
    visible, first = nodes.visible, torch.zeros_like(lengths)
    if window is not None:
        depth = nodes.depth  # distances count tokens on the path
        visible = visible & (depth[:, :, None] - nodes.depths[:, None] < window)
        first = (lengths + depth - window + 1).clamp_min(0)
    mask = torch.empty(*visible.shape[:2], 2 + nodes.extent, dtype=torch.int32, device=lengths.device)
    mask[..., 0], mask[..., 1], mask[..., 2:] = first, lengths, visible
    return mask[:, None]


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Attention function for transformers with a mask of `tree_mask`.

    Returns:
        [B, n, heads, d] and, for the weights, None.

    Raises:
        UnsupportedModelError: the model needs more than `tree_attention` computes.
    """
    asked = unexpressed(kwargs)
    if dropout:
        asked.add("dropout")
    if attention_mask is None or attention_mask.dtype != torch.int32:
        asked.add("another mask")
    if asked or attention_mask is None:
        raise UnsupportedModelError(
            f"{type(module).__name__} needs attention with {', '.join(sorted(asked))}, which tree_attention "
            "does not support; set MMSPEC_BACKEND=torch"
        )
    seen = attention_mask[:, 0]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return tree_attention(query, key, value, seen[..., 0], seen[:, 0, 1], seen[..., 2:], scale), None
