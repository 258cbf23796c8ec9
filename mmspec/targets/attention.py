"""Attention of scoring forwards: by the kernel `tree_attention` where it can be, else by the model's own.

A model that was loaded with sdpa hands queries, keys and values to a function that transformers looks up by
name. While a draft is scored another one stands there for that thread, and in place of the mask goes what
`tree_attention` takes. This is for modules in the table below alone: what others ask of attention (soft caps,
sinks, biases) the kernel cannot express, and they keep the attention that they have. So does a prefill. On a
CPU it is torch's own attention that stands there, which reads shared keys where they lie.
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

__all__ = ["PLAIN_ATTENTION", "attends_plainly", "attention_on_tree", "mask_dtype", "tree_mask"]

Mask = Tensor | dict[str, Tensor | None] | None

#: Attention modules that hand a function nothing but what `tree_attention` or its mask expresses, by class.
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
#: Keyword arguments of attention functions that change nothing here: windows are part of what a node sees.
EXPRESSED = {"is_causal", "position_ids", "sliding_window", "use_cache"}


def unexpressed(kwargs: Mapping[str, object]) -> set[str]:
    """Names of the keywords that ask attention functions for more than the mask expresses."""
    return {name for name, wish in kwargs.items() if wish is not None and wish is not False} - EXPRESSED


def attends_plainly(decoder: nn.Module) -> bool:
    """Return whether all attention of a decoder is in `PLAIN_ATTENTION` and looked up in its config."""
    found = [module for module in decoder.modules() if "attention" in type(module).__name__.lower()]
    return bool(found) and all(
        type(module).__name__ in PLAIN_ATTENTION
        and type(module).__module__.startswith(("transformers.models.", "mmspec.families."))
        and getattr(module, "config", None) is decoder.config
        for module in found
    )


def mask_dtype(decoder: PreTrainedModel) -> torch.dtype | None:
    """Number format of additive attention masks for a decoder; None where masks are boolean.

    Eager attention takes nothing else. On a CPU, sdpa makes an additive mask of a boolean one in every layer.
    """
    is_additive = decoder.config._attn_implementation == "eager" or decoder.device.type == "cpu"
    return decoder.dtype if is_additive else None


@contextmanager
def attention_on_tree(
    decoder: PreTrainedModel, plain: bool, cache: RaggedCache, nodes: Nodes, additive: torch.dtype | None
) -> Iterator[Mask]:
    """Let the attention of a decoder read a draft tree in one scoring forward; gives the mask to pass.

    Args:
        decoder: whose layers attend.
        plain: whether it `attends_plainly`.
        cache: told of the nodes by `begin_score`.
        nodes: of the draft.
        additive: number format of additive masks; None where they are boolean.
    """
    config, device = decoder.config, cache.lengths.device
    by_kernel = use_triton(device)
    # in this order: to ask a config of transformers costs more than the mask
    on_cpu = device.type == "cpu" and not torch.compiler.is_compiling()  # it traces no locks
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
    """Whether several query heads of a decoder read the keys of one (grouped-query attention)."""
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
    """Attention function of transformers on a CPU, where `own` copies keys for each head that reads them.

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
    """A draft as `tree_attention` reads it, in the form of an attention mask.

    Returns:
        [B, 1, n or 1, 2 + m] int32: the first committed token that each node sees, the number of committed
        tokens, and 1 for each slot that the node sees; one for each type of layers where a model mixes them.
    """
    masks: dict[str, Tensor | None] = dict.fromkeys(cache.layer_types)
    for kind in MASKABLE_LAYERS & masks.keys():
        window = cache.sliding_window if kind == "sliding_attention" else None
        masks[kind] = pack(cache.lengths[:, None], nodes, window)
    return masks if len(masks) > 1 else masks[cache.layer_types[0]]


def pack(lengths: Tensor, nodes: Nodes, window: int | None) -> Tensor:
    """The mask of layers in which a node sees the newest `window` tokens of its path, or all."""
    visible, first = nodes.visible, torch.zeros_like(lengths)
    if window is not None:
        depth = nodes.depth  # of a key, like that of a node: it counts tokens on the path
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
    """Attention function of transformers over a mask by `tree_mask`.

    Returns:
        [B, n, heads, d] and, for the weights, None.

    Raises:
        UnsupportedModelError: the model asks for more than `tree_attention` computes.
    """
    asked = unexpressed(kwargs)
    if dropout:
        asked.add("dropout")
    if attention_mask is None or attention_mask.dtype != torch.int32:
        asked.add("another mask")
    if asked or attention_mask is None:
        raise UnsupportedModelError(
            f"{type(module).__name__} asks attention for {', '.join(sorted(asked))}, which tree_attention "
            "cannot express; set MMSPEC_BACKEND=torch"
        )
    seen = attention_mask[:, 0]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return tree_attention(query, key, value, seen[..., 0], seen[:, 0, 1], seen[..., 2:], scale), None
