"""Recurrent mixers of transformers models, computed over a draft tree.

The `forward` of a mixer processes a sequence and changes its state. While a draft is scored, it is replaced
in that thread: by one of the closed forms below, which use the module's own projections, convolution, norm
and activation; or, for every other mixer with its state in the cache, by its own `forward` token by token,
each from its parent's state.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu, softplus
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from mmspec.core.cache import RaggedCache, check_layer_types
from mmspec.core.draft import Nodes
from mmspec.core.recurrent import HYBRID_LAYER, RECURRENT_LAYERS, Paths, RecurrentLayer
from mmspec.errors import UnsupportedModelError
from mmspec.models.replaced import Maker, Replacement, replaced_forwards
from mmspec.transformers_versions import cache_name

__all__ = ["CLOSED_FORMS", "find_mixers", "mixers_in_turn", "mixers_on_tree"]

POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
Mixer = Any  # a module of transformers, with parts that depend on its class
Projections = tuple[Tensor, Tensor, Tensor, Tensor]
"""Queries, keys and values [B, n, C], unconvolved; gates [B, n, d]; step sizes and decays [B, n, heads]."""


def qwen3_5(mixer: Mixer, hidden: Tensor) -> Projections:
    """Projections of Qwen3.5: one module each."""
    return (
        mixer.in_proj_qkv(hidden),
        mixer.in_proj_z(hidden),
        mixer.in_proj_b(hidden),
        mixer.in_proj_a(hidden),
    )


def qwen3_next(mixer: Mixer, hidden: Tensor) -> Projections:
    """Projections of Qwen3-Next: two modules, whose order the mixer restores."""
    *qkv, gate, beta, decay = mixer.fix_query_key_value_ordering(
        mixer.in_proj_qkvz(hidden), mixer.in_proj_ba(hidden)
    )
    return torch.cat([part.flatten(2) for part in qkv], 2), gate, beta, decay


def gated_delta_net(
    project: Callable[[Mixer, Tensor], Projections],
    mixer: Mixer,
    layer: RecurrentLayer,
    paths: Paths,
    hidden: Tensor,
) -> Tensor:
    """Gated DeltaNet (2412.06464): a short convolution, the gated delta rule and a gated norm."""
    mixed, gate, beta, decay = project(mixer, hidden)
    mixed = ACT2FN[mixer.activation](convolve(mixer.conv1d, layer.convolved(mixed, paths)))
    q, k, v = mixed.split([mixer.key_dim, mixer.key_dim, mixer.value_dim], 2)
    q, k = q.unflatten(2, (-1, mixer.head_k_dim)), k.unflatten(2, (-1, mixer.head_k_dim))
    v = v.unflatten(2, (-1, mixer.head_v_dim))
    g = -mixer.A_log.float().exp() * softplus(decay.float() + mixer.dt_bias)
    out = layer.delta_rule(q, k, v, g, beta.sigmoid(), paths).to(hidden.dtype)
    # the norm gets two dimensions, because replacement kernels accept no more
    out = mixer.norm(out.reshape(-1, mixer.head_v_dim), gate.reshape(-1, mixer.head_v_dim))
    projected: Tensor = mixer.out_proj(out.reshape(*hidden.shape[:2], -1))
    return projected


def falcon_h1(mixer: Mixer, hidden: Tensor) -> Tensor:
    """Projection of Falcon-H1, with a scale for each of its parts."""
    projected: Tensor = mixer.in_proj(hidden * mixer.ssm_in_multiplier) * mixer.mup_vector
    return projected


def mamba2(
    project: Callable[[Mixer, Tensor], Tensor],
    mixer: Mixer,
    layer: RecurrentLayer,
    paths: Paths,
    hidden: Tensor,
) -> Tensor:
    """Mamba-2 (2405.21060): a short convolution, a selective state space and a gated norm."""
    inner, groups = mixer.intermediate_size, mixer.n_groups * mixer.ssm_state_size
    gate, mixed, step = project(mixer, hidden).split([inner, mixer.conv_dim, mixer.num_heads], 2)
    mixed = ACT2FN[mixer.activation](convolve(mixer.conv1d, layer.convolved(mixed, paths)))
    x, b, c = mixed.split([inner, groups, groups], 2)
    x = x.unflatten(2, (-1, mixer.head_dim))
    b, c = b.unflatten(2, (mixer.n_groups, -1)), c.unflatten(2, (mixer.n_groups, -1))
    # as in decoding: transformers limits step sizes only in its form for prompts
    step = softplus(step + mixer.dt_bias).float()
    g = -mixer.A_log.float().exp() * step
    out = layer.state_space(step[..., None] * x, b, c, g, paths) + mixer.D[:, None] * x
    out = out.flatten(2).to(hidden.dtype)
    # Falcon-H1 may have no norm
    out = mixer.norm(out, gate) if getattr(mixer, "mamba_rms_norm", True) else out * silu(gate)
    projected: Tensor = mixer.out_proj(out)
    return projected


def short_convolution(mixer: Mixer, layer: RecurrentLayer, paths: Paths, hidden: Tensor) -> Tensor:
    """Gated short convolution of LFM2 (2511.23404)."""
    before, after, x = mixer.in_proj(hidden).chunk(3, -1)
    projected: Tensor = mixer.out_proj(after * convolve(mixer.conv, layer.convolved(before * x, paths)))
    return projected


def convolve(convolution: nn.Conv1d, taps: Tensor) -> Tensor:
    """Outputs [B, n, C] of a causal depthwise convolution, from its inputs [B, n, k, C] at every node."""
    # call the module, so that its hooks run; exactly one output does not depend on its zero padding
    out: Tensor = convolution(taps.flatten(0, 1).transpose(1, 2))
    return out[:, :, taps.shape[2] - 1].view(*taps.shape[:2], -1)


plain_mamba2 = partial(mamba2, lambda mixer, hidden: mixer.in_proj(hidden))

#: Mixers with a closed form over a tree, by class name in transformers.
CLOSED_FORMS: dict[str, Callable[..., Tensor]] = {
    "Qwen3_5GatedDeltaNet": partial(gated_delta_net, qwen3_5),
    "Qwen3_5MoeGatedDeltaNet": partial(gated_delta_net, qwen3_5),
    "Qwen3NextGatedDeltaNet": partial(gated_delta_net, qwen3_next),
    "Mamba2Mixer": plain_mamba2,
    "BambaMixer": plain_mamba2,
    "GraniteMoeHybridMambaLayer": plain_mamba2,
    "NemotronHMamba2Mixer": plain_mamba2,
    "Zamba2MambaMixer": plain_mamba2,
    "FalconH1Mixer": partial(mamba2, falcon_h1),
    "Lfm2ShortConv": short_convolution,
    "Lfm2MoeShortConv": short_convolution,
    "Lfm3ShortConv": short_convolution,
}


def closed_form(mixer: nn.Module) -> Callable[..., Tensor] | None:
    """Return the closed form of a mixer over a tree; None if it is computed token by token."""
    # a subclass may compute something else
    if not type(mixer).__module__.startswith("transformers.models."):
        return None
    return CLOSED_FORMS.get(type(mixer).__name__)


def find_mixers(model: PreTrainedModel) -> list[nn.Module]:
    """Find the mixer of every recurrent layer of a model, in the order of the layers.

    Raises:
        UnsupportedModelError: a layer does not have exactly one mixer with its state in the cache, or the
            mixer needs more than its input; the message names the layer.
    """
    kinds = check_layer_types(model.config.get_text_config(decoder=True))
    blocks = getattr(model.get_decoder(), "layers", ())
    mixers = []
    for index, kind in enumerate(kinds):
        if kind not in RECURRENT_LAYERS and kind != HYBRID_LAYER:
            continue
        parts = [*blocks[index].modules()][1:] if index < len(blocks) else []
        found = [part for part in parts if closed_form(part) is not None]
        if not found and kind != HYBRID_LAYER:  # its attention may keep states too
            found = [part for part in parts if keeps_state(part)]
        if len(found) != 1:
            raise UnsupportedModelError(
                f"layer {index} of {type(model).__name__} ({kind}) keeps a recurrent state, which mmspec "
                "cannot restore after a rejection: exactly one of its modules must take the cache and a "
                f"single other input, but {len(found)} do"
            )
        mixers += found
    return mixers


def keeps_state(module: nn.Module) -> bool:
    """True for a mixer whose only required inputs are its hidden states and the cache."""
    forward = inspect.signature(type(module).forward).parameters
    # before 5.24, this name distinguished mixers from attention, whose cache is `past_key_values`
    if not {"cache", "cache_params"} & set(forward) or not hasattr(module, "layer_idx"):
        return False
    needed = [name for name, one in forward.items() if one.default is one.empty and one.kind in POSITIONAL]
    return len(needed) == 2  # self and the input


def mixers_in_turn(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Run mixers without a closed form token by token, continuing from their state.

    Mamba's form for several tokens starts without a state, regardless of the cache.
    """

    def in_turn(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def forward(hidden_states: Tensor, **kwargs: object) -> Tensor:
            return torch.cat([own(token, **kwargs) for token in hidden_states.split(1, 1)], 1)

        return forward

    return replaced_forwards(
        [Replacement(each, in_turn) for each in find_mixers(model) if closed_form(each) is None]
    )


def mixers_on_tree(model: PreTrainedModel, cache: RaggedCache, nodes: Nodes) -> AbstractContextManager[None]:
    """Run the recurrent mixers of a model on a draft tree, in one scoring forward pass."""
    if not cache.recurrent:
        return nullcontext()
    paths: dict[int, Paths] = {}
    replacements = []
    for layer, mixer in zip(cache.recurrent, find_mixers(model), strict=True):
        taps = layer.taps
        if taps not in paths:
            paths[taps] = Paths.of(nodes, taps)
        replacements.append(Replacement(mixer, mixer_on_tree(mixer, layer, paths[taps].to(layer.place))))
    return replaced_forwards(replacements)


def mixer_on_tree(mixer: nn.Module, layer: RecurrentLayer, paths: Paths) -> Maker:
    """Return the function that turns a mixer's `forward` into one over a tree."""
    compute, cache_argument = closed_form(mixer), cache_name(type(mixer).forward)

    def on_tree(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def forward(hidden_states: Tensor, **kwargs: object) -> Tensor:
            if compute is not None:
                return compute(mixer, layer, paths, hidden_states)
            passed = {cache_argument: kwargs[cache_argument]}
            return layer.step(lambda one: own(one, **passed), hidden_states, paths.parents)

        return forward

    return on_tree
