"""Layers of drafting heads: of Llama, with extensions of published heads, or of the target's family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from torch.nn.functional import linear, silu
from transformers import (
    AutoConfig,
    AutoModel,
    Emu3TextConfig,
    LlamaConfig,
    LlamaModel,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.emu3.modeling_emu3 import Emu3TextModel
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeRotaryEmbedding

from mmspec.errors import UnsupportedModelError
from mmspec.heads.configuration import HeadConfig, SizedHeadConfig
from mmspec.open_types import Keywords
from mmspec.plugins import register_families

FULL, SLIDING = "full_attention", "sliding_attention"
PartialRotary: Any = Glm4MoeRotaryEmbedding  # tables for the rotary part of a head, for every scaling
KNOWN = "original_max_position_embeddings"
# rope types of transformers whose frequencies are constant, with the numbers that each needs
SCALINGS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "mrope": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", KNOWN),
    "yarn": ("factor", KNOWN),
}
# and the numbers that it may have
MORE = {"yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")}
PART, AXES = "partial_rotary_factor", ("mrope_section", "mrope_interleaved")

BY_LLAMAS_NAMES = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("hidden_act", "rms_norm_eps"),
)

#: Decoders that `AutoModel` lacks, by their configs.
UNLISTED: dict[type[PreTrainedConfig], type[PreTrainedModel]] = {Emu3TextConfig: Emu3TextModel}


@strict
class LlamaLayerConfig(SizedHeadConfig):
    """Config of a head with a Llama layer, which counts its positions by itself.

    Attributes:
        intermediate_size: of the layer's feed-forward.
        num_attention_heads, num_key_value_heads, head_dim: of the layer's grouped-query attention.
        rope_theta: base of the rotary frequencies.
    """

    intermediate_size: int = 11008
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    head_dim: int = 128
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0

    def validate_heads(self) -> None:
        """Raise ValueError for groups of heads of different sizes; called by `strict`."""
        heads, groups = self.num_attention_heads, self.num_key_value_heads
        if groups < 1 or heads % groups:
            raise ValueError(f"num_key_value_heads must divide the {heads} heads; got {groups}")

    def layer_settings(self) -> Keywords:
        """Return the settings of the layer by the names of Llama's config."""
        return {name: getattr(self, name) for name in BY_LLAMAS_NAMES} | {
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
        }

    @classmethod
    def sizes_for(cls, text: PreTrainedConfig, vocabulary: int) -> Keywords:
        width, heads = int(text.hidden_size), int(text.num_attention_heads)
        return super().sizes_for(text, vocabulary) | {
            "intermediate_size": int(getattr(text, "intermediate_size", None) or 4 * width),
            "num_attention_heads": heads,
            "num_key_value_heads": next(n for n in range(max(1, heads // 4), 0, -1) if heads % n == 0),
            "head_dim": int(getattr(text, "head_dim", None) or width // heads),
        }


def one_layer(config: LlamaLayerConfig, *, norm: bool = False) -> LlamaModel:
    """Build a decoder of one layer, without embedding and, by default, without a final norm."""
    decoder = LlamaModel(LlamaConfig(vocab_size=1, num_hidden_layers=1, **config.layer_settings()))
    for name in ("embed_tokens", *(() if norm else ("norm",))):
        setattr(decoder, name, nn.Identity())
    return decoder


@strict
class PublishedLayerConfig(LlamaLayerConfig):
    """Config of a head whose layers may have the extensions of published heads.

    Attributes:
        rotary: entries of transformers' `rope_parameters` beside `rope_theta`: the scaling of rotary
            positions, and the rotary part of each head; empty for whole heads without scaling.
        mrope_section: numbers of frequencies for the time, height and width of a position, as in the target
            (M-RoPE); None for positions of one axis, which count the head's rows.
        mrope_interleaved: whether the axes alternate (Qwen3-VL) instead of following one another (Qwen2-VL).
        sliding_window: tokens that a layer with a window sees, its own included; None if no layer has one.
        attention_bias, mlp_bias: whether the projections of the attention, and of the feed-forward, have one.
    """

    rotary: Keywords = field(default_factory=dict)
    mrope_section: list[int] | None = None
    mrope_interleaved: bool = False
    sliding_window: int | None = None
    attention_bias: bool = False
    mlp_bias: bool = False

    @property
    def rotary_dim(self) -> int:
        """Number of rotary channels of each head."""
        return int(self.head_dim * self.rotary.get(PART, 1.0))

    def validate_rotary(self) -> None:
        """Raise ValueError for unsupported rotary settings or windows; called by `strict`."""
        kind, given = self.rotary.get("rope_type", "default"), self.rotary.keys() - {"rope_type", PART}
        needed = {*SCALINGS.get(kind, ("rope_type",))}
        if not needed <= given <= needed | {*MORE.get(kind, ())}:
            kinds = "; ".join(f"{name} with {', '.join(numbers)}" for name, numbers in SCALINGS.items())
            raise ValueError(f"rotary must be one of: {kinds}; got {self.rotary}")
        if not 2 <= self.rotary_dim <= self.head_dim or self.rotary_dim % 2:
            part = self.rotary.get(PART)
            raise ValueError(f"{PART} must give an even part of a head of {self.head_dim}; got {part}")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(f"sliding_window must be at least 1, or None; got {self.sliding_window}")
        section, half, axes = self.mrope_section, self.rotary_dim // 2, 3
        if section is not None and (len(section) != axes or min(section) < 0 or sum(section) != half):
            raise ValueError(f"mrope_section must be {axes} numbers that add up to {half}; got {section}")
        if section is not None and kind != "default":
            raise ValueError(f"rotary must not scale positions of several axes; got {self.rotary}")

    def multimodal_rotary(self) -> MultimodalRotary | None:
        """Make the rotary tables of three axes; None for positions of one axis."""
        if self.mrope_section is None:
            return None
        shape = self.rotary_dim, self.rope_theta, self.mrope_section
        return MultimodalRotary(*shape, interleaved=self.mrope_interleaved)

    def layer_settings(self) -> Keywords:
        rope = {"rope_type": "default", "rope_theta": self.rope_theta, **self.rotary}
        known = rope.get(KNOWN)
        reach = {} if known is None else {"max_position_embeddings": int(known * rope["factor"])}
        biases = {"attention_bias": self.attention_bias, "mlp_bias": self.mlp_bias}
        return super().layer_settings() | {"rope_parameters": rope, **biases, **reach}


@strict
class TargetLayerConfig(HeadConfig):
    """Config of a head with one decoder layer of its target's own family.

    Attributes:
        layer: the config of the target's language model, with one layer; as a plain table.
    """

    layer: Keywords = field(default_factory=dict)

    @classmethod
    def sizes_for(cls, text: PreTrainedConfig, vocabulary: int) -> Keywords:
        layer = text.to_dict() | {"num_hidden_layers": 1}
        types = getattr(text, "layer_types", None)
        if types is not None:
            layer["layer_types"] = ["full_attention" if "full_attention" in types else types[-1]]
        for name in ("dtype", "architectures", "_name_or_path", "transformers_version"):
            layer.pop(name, None)
        cls(layer=layer).layer_config()  # raises for an unknown family
        return super().sizes_for(text, vocabulary) | {"layer": layer}

    def layer_config(self) -> PreTrainedConfig:
        """Return the config of the decoder of one layer."""
        table = dict(self.layer)
        kind = table.pop("model_type", None)
        try:
            register_families()
            config: PreTrainedConfig = AutoConfig.for_model(kind, **table)
        except ValueError as error:
            raise no_layer(f"transformers builds no {kind!r} decoder by itself") from error
        return config

    @property
    def hidden_size(self) -> int:
        return int(self.layer.get("hidden_size", 0))

    @property
    def target_type(self) -> str:
        """Model type of the target's language model."""
        return str(self.layer.get("model_type", ""))


def no_layer(reason: str) -> UnsupportedModelError:
    """Return the error for a target whose family has no layer for a head, with what works instead."""
    return UnsupportedModelError(
        f"The head needs a layer of its target's family, but {reason}; use a head with layers of its own "
        "(eagle3, medusa), draft_model or copy"
    )


def single_layer(layer: PreTrainedConfig, *, norm: str | None = None) -> PreTrainedModel:
    """Build a decoder of the target's family with one layer, and the final norm of that name if any.

    Raises:
        UnsupportedModelError: the family's decoder is not a stack of `layers`, as those of encoder-decoders,
            or has no norm of that name.
    """
    unlisted = UNLISTED.get(type(layer))
    make: Any = AutoModel.from_config if unlisted is None else unlisted._from_config
    try:
        decoder: PreTrainedModel = make(layer)
    except ValueError as error:  # a decoder that exists in encoder-decoders alone: TrOCR's
        raise no_layer(f"transformers builds no {layer.model_type!r} decoder by itself") from error
    if not isinstance(getattr(decoder, "layers", None), nn.ModuleList):
        raise no_layer(f"{type(decoder).__name__} is not a stack of `layers`")
    if norm is not None and not hasattr(decoder, norm):
        raise no_layer(f"{type(decoder).__name__} has no final norm of the name {norm!r}")
    for name, child in list(decoder.named_children()):
        if name not in ("layers", norm) and any(True for _ in child.parameters()):
            setattr(decoder, name, nn.Identity())  # the target's embeddings are used
    return decoder


class MultimodalRotary(nn.Module):
    """Rotary tables of three axes, time, height and width (M-RoPE; Qwen2-VL, 2409.12191, section 2.1).

    The tables are computed for each call, so that a checkpoint does not store them.

    Args:
        head_dim: number of rotary channels of each head.
        theta: base of the frequencies.
        section: number of frequencies of each axis; they add up to head_dim / 2.
        interleaved: the axes alternate, and time has the rest (Qwen3-VL); else they follow one another.
    """

    def __init__(self, head_dim: int, theta: float, section: Sequence[int], *, interleaved: bool) -> None:
        super().__init__()
        self.head_dim, self.theta, self.section, self.interleaved = head_dim, theta, section, interleaved

    @torch.no_grad()
    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Make the tables [B, n, head_dim], in x's dtype, for positions [3, B, n], or [B, n] of one axis."""
        index = torch.arange(self.head_dim // 2, device=position_ids.device)
        time, height, width = self.section
        if self.interleaved:
            is_height = (index % 3 == 1) & (index < 3 * height)
            is_width = (index % 3 == 2) & (index < 3 * width)
        else:
            is_width = index >= time + height
            is_height = (index >= time) & ~is_width
        over_time, over_height, over_width = position_ids.expand(3, *position_ids.shape[-2:])[..., None]
        position = torch.where(is_height, over_height, torch.where(is_width, over_width, over_time))
        angle = position * self.theta ** (-2.0 * index.float() / self.head_dim)
        angle = torch.cat([angle, angle], -1)
        return angle.cos().to(x.dtype), angle.sin().to(x.dtype)


class ResidualBlock(nn.Module):
    """x + SiLU(W x + b); with W and b at zero it is the identity, and still has a gradient."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width, width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, state: Tensor) -> Tensor:
        return state + silu(linear(state, self.weight, self.bias))


def new_blocks(width: int, layers: int) -> nn.Sequential:
    """Return the blocks of one head, each with weights of its own; the released code repeats one object."""
    return nn.Sequential(*(ResidualBlock(width) for _ in range(layers)))
