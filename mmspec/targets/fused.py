"""Fused kernels in scoring forward passes: fewer launches for the layers of Llama and its like.

While `tree_attention` scores a draft, the `forward` of modules of known classes is replaced in the thread.
Replacements call the module's own projections, merged where `merge_projections` has merged them, and their
kernels round as the module does. Other classes, prefills, and a `forward` that a user or a library replaced
stay as they are. So does every model on a CPU, which scores drafts by other functions. Hooks run as always: a
part with a hook is called as a module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mmspec.kernels import add_rms_norm, gelu_mul, rms_norm, silu_mul
from mmspec.models.replaced import Replacement, replaced_forwards
from mmspec.open_types import AnyFunction, Keywords
from mmspec.targets.attention import attend
from mmspec.targets.merged import GATE_UP, QUERY_KEY_VALUE, is_bare, is_own, project
from mmspec.transformers_versions import CACHE_NAMES

__all__ = ["FUSED", "find_fused", "fused"]


def fused_layer(layer: Any, own: AnyFunction) -> AnyFunction:
    """Return the `forward` x + attention(norm(x)), then x + feed-forward(norm(x)), with x: [B, n, D]."""
    add_norm = adding_norm(layer.post_attention_layernorm)

    def forward(hidden_states: Tensor, **kwargs: object) -> Tensor:
        attended, _ = layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **kwargs)
        total, normed = add_norm(attended, hidden_states)
        output: Tensor = total + layer.mlp(normed)
        return output

    return forward


def fused_chameleon_layer(layer: Any, own: AnyFunction) -> AnyFunction:
    """Return the `forward` of Chameleon's layers: that of Llama's, in a tuple."""
    forward = fused_layer(layer, own)
    return lambda hidden_states, **kwargs: (forward(hidden_states, **kwargs),)


def fused_sandwich_layer(layer: Any, own: AnyFunction) -> AnyFunction:
    """Return the `forward` of Gemma 3's layers, x + norm(attention(norm(x))), and so for the feed-forward."""
    add_norm = adding_norm(layer.pre_feedforward_layernorm)

    def forward(hidden_states: Tensor, **kwargs: object) -> Tensor:
        attended, _ = layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **kwargs)
        total, normed = add_norm(layer.post_attention_layernorm(attended), hidden_states)
        output: Tensor = total + layer.post_feedforward_layernorm(layer.mlp(normed))
        return output

    return forward


def fused_attention(module: Any, own: AnyFunction) -> AnyFunction:
    """Return the `forward` of attention [B, n, D] that rotates into the cache and reads it by the kernel."""
    norms, how = norms_of_heads(module)
    how = {**how, "pairs": type(module).__name__.startswith(OF_PAIRS)}

    def forward(
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None,
        attention_mask: Tensor,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        if position_embeddings is None or position_embeddings[0].dim() != 3:
            how_else = {"position_embeddings": position_embeddings, "attention_mask": attention_mask}
            found: tuple[Tensor, None] = own(hidden_states, **how_else, **kwargs)
            return found
        query, key, value = (
            each.unflatten(-1, (-1, module.head_dim))
            for each in project(module, QUERY_KEY_VALUE, hidden_states)
        )
        if norms is not None:
            query, key = (norm(x) for norm, x in zip(norms, (query, key), strict=True))
        cache = next(kwargs[name] for name in CACHE_NAMES if name in kwargs)
        layer = cache.layers[module.layer_idx]
        query, keys, values = layer.update_rotated(query, key, value, *position_embeddings, **how)
        attended, _ = attend(module, query, keys, values, attention_mask, scaling=module.scaling)
        return module.o_proj(attended.flatten(2)), None

    return forward


def norms_of_heads(module: Any) -> tuple[tuple[nn.Module, nn.Module] | None, Keywords]:
    """The norms of queries and keys: modules to call, if they are not plain, or arguments of the kernel."""
    if not hasattr(module, "q_norm"):
        return None, {"weights": []}
    norms = module.q_norm, module.k_norm
    kind = NORMS.get(type(norms[0]).__name__)
    if kind is None or type(norms[0]) is not type(norms[1]) or not all(map(is_bare, norms)):
        return norms, {"weights": []}
    if kind == "layer":
        weights = [norm.weight for norm in norms] + [norm.bias for norm in norms]
        return None, {"norm": kind, "weights": weights, "eps": 1e-5}
    return None, {"norm": kind, "weights": [norm.weight for norm in norms], "eps": eps_of(norms[0])}


def fused_feed_forward(module: Any, own: AnyFunction) -> AnyFunction:
    """Return the `forward` of a gated feed-forward network, [..., D] -> [..., D]."""
    by_tanh = type(module.act_fn).__name__ in GELU_BY_TANH

    def forward(x: Tensor) -> Tensor:
        gate, up = project(module, GATE_UP, x)
        output: Tensor = module.down_proj(gelu_mul(gate, up) if by_tanh else silu_mul(gate, up))
        return output

    return forward


def fused_norm(module: Any, own: AnyFunction) -> AnyFunction:
    """Return the `forward` of an RMSNorm, [..., d] -> [..., d]."""
    eps, centered = eps_of(module), NORMS[type(module).__name__] == "centered"
    return lambda hidden_states: rms_norm(hidden_states, module.weight, eps, centered)


def adding_norm(norm: nn.Module) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return the function (x, residual) -> residual + x and its norm."""
    eps, centered = eps_of(norm), NORMS[type(norm).__name__] == "centered"
    return lambda x, residual: add_rms_norm(x, residual, norm.weight, eps, centered)


def eps_of(norm: Any) -> float:
    """Epsilon of an RMSNorm."""
    eps: float = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
    return eps


#: Families of layers in transformers as Llama's: prefixes of the names of their classes.
LIKE_LLAMA = ("Llama", "Mistral", "Qwen2", "Qwen2VL", "Qwen2_5_VL", "Qwen3", "Qwen3VLText", "Gemma")
FAMILIES = (*LIKE_LLAMA, "Gemma3", "Chameleon")
#: The family of ours whose rotation turns adjacent pairs.
OF_PAIRS = "LlamaGen"
#: Norms: their kind, as `rotate_into_cache` names it.
NORMS = {f"{family}RMSNorm": "centered" if "Gemma" in family else "rms" for family in FAMILIES}
NORMS["ChameleonLayerNorm"] = "layer"
#: Activations that have a kernel.
SILU, GELU_BY_TANH = ("SiLU", "SiLUActivation"), ("GELUTanh",)

#: Names of classes in transformers, and what makes the replacement of their `forward`.
FUSED: dict[str, Callable[[Any, AnyFunction], AnyFunction]] = {
    **{f"{family}DecoderLayer": fused_layer for family in (*LIKE_LLAMA, OF_PAIRS)},
    "ChameleonDecoderLayer": fused_chameleon_layer,
    "Gemma3DecoderLayer": fused_sandwich_layer,
    **{f"{family}Attention": fused_attention for family in (*FAMILIES, OF_PAIRS)},
    **{f"{family}MLP": fused_feed_forward for family in FAMILIES},
    **{f"{family}RMSNorm": fused_norm for family in FAMILIES},
}


def find_fused(decoder: nn.Module) -> list[Replacement]:
    """Find the modules of a decoder whose classes have a fused `forward`."""
    return [
        Replacement(module, partial(FUSED[name], module))
        for module in decoder.modules()
        if (name := type(module).__name__) in FUSED
        and type(module).__module__.startswith(("transformers.models.", "mmspec.families.llamagen."))
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


def fits(module: Any) -> bool:
    """Whether parts that a fused `forward` does not call as modules are of known classes, without hooks."""
    make = FUSED[type(module).__name__]
    if make in (fused_layer, fused_chameleon_layer, fused_sandwich_layer):
        is_sandwich = make is fused_sandwich_layer
        norm = module.pre_feedforward_layernorm if is_sandwich else module.post_attention_layernorm
        return FUSED.get(type(norm).__name__) is fused_norm and is_bare(norm)
    if make is fused_feed_forward:
        return type(module.act_fn).__name__ in (*SILU, *GELU_BY_TANH) and is_bare(module.act_fn)
    return True
