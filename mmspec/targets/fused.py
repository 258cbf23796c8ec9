"""Fused kernels in scoring forward passes: fewer launches for the layers of Llama and its like.

While `tree_attention` scores a draft, the `forward` of modules of known classes is replaced in the thread.
Replacements call the module's own projections, and their kernels round as the module does. Other classes,
prefills, and a `forward` that a user or a library replaced stay as they are. So does every model on a CPU,
which scores drafts by other functions. Hooks run as always: a norm with a hook is called as a module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as of_all

from mmspec.kernels import add_rms_norm, rms_norm, silu_mul
from mmspec.models.replaced import Confined, Replacement, forward_name, replaced_forwards
from mmspec.open_types import AnyFunction
from mmspec.targets.attention import attend
from mmspec.transformers_versions import CACHE_NAMES

__all__ = ["FUSED", "find_fused", "fused"]

#: Modules whose hooks only watch: those that collect hidden states, and those that name modules in a capture.
WATCHING = "mmspec.targets.steps"


def fused_layer(layer: Any, own: AnyFunction) -> AnyFunction:
    """Return the `forward` x + attention(norm(x)), then x + feed-forward(norm(x)), with x: [B, n, D]."""
    norm = layer.post_attention_layernorm

    def forward(hidden_states: Tensor, **kwargs: object) -> Tensor:
        attended, _ = layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **kwargs)
        total, normed = add_rms_norm(attended, hidden_states, norm.weight, norm.variance_epsilon)
        output: Tensor = total + layer.mlp(normed)
        return output

    return forward


def fused_attention(module: Any, own: AnyFunction) -> AnyFunction:
    """Return the `forward` of attention [B, n, D] that rotates into the cache and reads it by the kernel."""

    def forward(
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        query, key, value = (
            projection(hidden_states).unflatten(-1, (-1, module.head_dim))
            for projection in (module.q_proj, module.k_proj, module.v_proj)
        )
        if hasattr(module, "q_norm"):
            query, key = module.q_norm(query), module.k_norm(key)
        cache = next(kwargs[name] for name in CACHE_NAMES if name in kwargs)
        layer = cache.layers[module.layer_idx]
        query, keys, values = layer.update_rotated(query, key, value, *position_embeddings)
        attended, _ = attend(module, query, keys, values, attention_mask, scaling=module.scaling)
        return module.o_proj(attended.flatten(2)), None

    return forward


def fused_feed_forward(module: Any, own: AnyFunction) -> AnyFunction:
    """Return the `forward` of a gated feed-forward network, [..., D] -> [..., D]."""

    def forward(x: Tensor) -> Tensor:
        output: Tensor = module.down_proj(silu_mul(module.gate_proj(x), module.up_proj(x)))
        return output

    return forward


def fused_norm(module: Any, own: AnyFunction) -> AnyFunction:
    """Return the `forward` of an RMSNorm, [..., d] -> [..., d]."""

    def forward(hidden_states: Tensor) -> Tensor:
        return rms_norm(hidden_states, module.weight, module.variance_epsilon)

    return forward


#: Names of classes in transformers, and what makes the replacement of their `forward`.
FUSED: dict[str, Callable[[Any, AnyFunction], AnyFunction]] = {
    "LlamaDecoderLayer": fused_layer,
    "MistralDecoderLayer": fused_layer,
    "Qwen2DecoderLayer": fused_layer,
    "Qwen3DecoderLayer": fused_layer,
    "LlamaAttention": fused_attention,
    "MistralAttention": fused_attention,
    "Qwen2Attention": fused_attention,
    "Qwen3Attention": fused_attention,
    "LlamaMLP": fused_feed_forward,
    "MistralMLP": fused_feed_forward,
    "Qwen2MLP": fused_feed_forward,
    "Qwen3MLP": fused_feed_forward,
    "LlamaRMSNorm": fused_norm,
    "MistralRMSNorm": fused_norm,
    "Qwen2RMSNorm": fused_norm,
    "Qwen3RMSNorm": fused_norm,
}


def find_fused(decoder: nn.Module) -> list[Replacement]:
    """Find the modules of a decoder whose classes have a fused `forward`."""
    return [
        Replacement(module, partial(FUSED[name], module))
        for module in decoder.modules()
        if (name := type(module).__name__) in FUSED
        and type(module).__module__.startswith("transformers.models.")
    ]


def fused(found: Sequence[Replacement], mask: object) -> AbstractContextManager[None]:
    """Replace the `forward` of modules in one scoring forward pass.

    Args:
        found: modules from `find_fused`.
        mask: the attention mask; nothing is replaced unless it is one of `tree_mask`.
    """
    part = next(iter(mask.values())) if isinstance(mask, dict) else mask
    if not isinstance(part, Tensor) or part.dtype != torch.int32:
        return nullcontext()
    return replaced_forwards(each for each in found if is_own(each.module) and fits(each.module))


def is_own(module: nn.Module) -> bool:
    """Whether a module's `forward` is that of its class, for every thread."""
    stands = vars(module).get(forward_name(module))
    if isinstance(stands, Confined):  # another thread is scoring
        stands = stands.stood
    return stands is None or getattr(stands, "__func__", None) is type(module).forward


def fits(module: Any) -> bool:
    """Whether parts that a fused `forward` does not call as modules are of known classes, without hooks."""
    make = FUSED[type(module).__name__]
    if make is fused_layer:
        norm = module.post_attention_layernorm
        return FUSED.get(type(norm).__name__) is fused_norm and is_bare(norm)
    if make is fused_feed_forward:
        return type(module.act_fn).__name__ in ("SiLU", "SiLUActivation") and is_bare(module.act_fn)
    return True


def is_bare(module: nn.Module) -> bool:
    """Whether calling a module only calls its class's `forward`."""
    hooks = [
        *(*module._forward_hooks.values(), *module._forward_pre_hooks.values()),
        *(*of_all._global_forward_hooks.values(), *of_all._global_forward_pre_hooks.values()),
    ]
    others = (hook for hook in hooks if getattr(hook, "func", hook).__module__ != WATCHING)
    return is_own(module) and "_hf_hook" not in vars(module) and next(others, None) is None
