"""The EAGLE-3 head: a Llama layer over embedding and feature side by side, its own norm and output matrix.

It uses the frozen embedding of its target. Unlike EAGLE-1 it need not predict the target's hidden states, so
that the state it feeds back is free: its layer's output before the last norm, as in the release, or after it
(EAGLE-3.1, as speculators calls its later heads).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import field
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import Cache, LlamaConfig, PreTrainedConfig
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeAttention
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from mmspec.core.cache import additive_mask
from mmspec.heads.configuration import check_taps, three_taps
from mmspec.heads.layers import (
    SLIDING,
    PartialRotary,
    PublishedLayerConfig,
    one_layer,
)
from mmspec.heads.model import FeatureHead
from mmspec.open_types import Keywords

__all__ = ["ParallelConfig", "ParallelHead", "Eagle3Config", "Eagle3Head"]

PREDICTIONS = 8  # of a forward pass of a P-EAGLE head whose config has no number
DRAFT_VOCABULARY = 32000  # the published heads'
LARGE = 2 * DRAFT_VOCABULARY  # smaller vocabularies save too little to leave tokens out


@strict
class Eagle3Config(PublishedLayerConfig):
    """Config of an EAGLE-3 head.

    Attributes:
        taps: hidden states of the target that are read: k for the input of layer k, -1 for the final one.
        draft_vocabulary: number of tokens that the head can draft, at most those of the target.
        norm_before_residual: whether the layer adds its output to the normed feature, as in most heads of
            speculators, instead of the feature itself.
        norm_before_fc: whether the target's states are normed together before they are projected to one width
            (EAGLE-3.1).
        fc_norm: whether each of them is normed separately.
        norm_feedback: whether the state that is fed back is normed.
        norm_logits: whether the input of the output matrix is normed.
        qk_norm: whether queries and keys are normed, as in Qwen3.
        depth: of the default dynamic tree.
    """

    model_type = "mmspec_eagle3"

    taps: list[int] = field(default_factory=lambda: [2, 16, 29])
    draft_vocabulary: int = 0
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_feedback: bool = False
    norm_logits: bool = True
    qk_norm: bool = False
    depth: int = 5

    @property
    def reads_targets_matrix(self) -> bool:
        return False

    @property
    def draft_size(self) -> int:
        return self.draft_vocabulary if self.draft_vocabulary < self.vocabulary else 0

    def validate_architecture(self) -> None:
        """Raise ValueError for settings that cannot be built; called by `strict`."""
        if not 0 <= self.draft_vocabulary <= self.vocabulary:
            raise ValueError(
                f"draft_vocabulary must be from 0 to the vocabulary, {self.vocabulary}; "
                f"got {self.draft_vocabulary}"
            )
        check_taps(self.taps, self.target_layers)
        if self.norm_before_fc and self.fc_norm:
            raise ValueError(
                "fc_norm must be False beside norm_before_fc, which norms the same states; got True"
            )

    def layer_settings(self) -> Keywords:
        windows = {"layer_types": [SLIDING], "sliding_window": self.sliding_window}
        return super().layer_settings() | ({} if self.sliding_window is None else windows)

    @classmethod
    def sizes_for(cls, text: PreTrainedConfig, vocabulary: int) -> Keywords:
        """Return layer sizes, taps, and a vocabulary that is reduced if the target's is large.

        Positions have several axes where the target's have, if these cover all numbers of the head's rotary.
        """
        known = DRAFT_VOCABULARY if vocabulary > LARGE else vocabulary
        taps = three_taps(int(text.num_hidden_layers))
        sizes = super().sizes_for(text, vocabulary) | {"taps": taps, "draft_vocabulary": known}
        rope = getattr(text, "rope_parameters", None) or {}
        section = rope.get("mrope_section")
        if section is not None and 2 * sum(section) == sizes["head_dim"]:
            sizes |= {"mrope_section": list(section), "rope_theta": float(rope["rope_theta"])}
            sizes["mrope_interleaved"] = bool(rope.get("mrope_interleaved", False))
        return sizes


class Eagle3Layer(LlamaDecoderLayer):
    """A Llama layer that attends by norm(embedding) and norm(feature), and adds to the feature alone."""

    def __init__(
        self, config: LlamaConfig, norm_before_residual: bool, qk_norm: bool = False, partial: bool = False
    ) -> None:
        super().__init__(config, layer_idx=0)
        attention: Any = Glm4MoeAttention if partial else Qwen3Attention if qk_norm else None
        if attention is not None:  # the config has all the fields that these classes read
            output = self.self_attn.o_proj
            config.use_qk_norm = qk_norm
            self.self_attn = attention(config, layer_idx=0)
            self.self_attn.o_proj = output  # that of Glm4MoeAttention never has a bias
        self.norm_before_residual = norm_before_residual
        width = config.hidden_size
        self.hidden_norm = LlamaRMSNorm(width, eps=config.rms_norm_eps)
        for name in ("q_proj", "k_proj", "v_proj"):
            size = getattr(self.self_attn, name).out_features
            setattr(self.self_attn, name, nn.Linear(2 * width, size, bias=config.attention_bias))

    def forward(self, hidden_states: Tensor, *args: object, **kwargs: object) -> Tensor:
        """Rows [B, n, 2d] of embeddings and features -> states [B, n, d]."""
        embeddings, features = hidden_states.chunk(2, dim=-1)
        normed = self.hidden_norm(features)
        features = normed if self.norm_before_residual else features
        both = torch.cat([self.input_layernorm(embeddings), normed], dim=-1)
        attended, _ = self.self_attn(both, *args, **kwargs)
        features = features + attended
        output: Tensor = features + self.mlp(self.post_attention_layernorm(features))
        return output


class Eagle3Head(FeatureHead):
    """Predicts a token from the tokens before it and the target's hidden states of three depths.

    Row t of its input holds the embedding of token t and the feature at t - 1. The feature is the target's
    hidden states projected to one width; for a candidate, it is the head's own state. The logits of token
    t + 1 are over the draft vocabulary; `t2d` marks the target's tokens that are in it.
    """

    config: Eagle3Config
    config_class = Eagle3Config
    base_model_prefix = "eagle3"

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.fc = nn.Linear(len(config.taps) * width, width, bias=False)
        self.decoder = one_layer(config)  # without norm: states are fed back unchanged
        partial = config.rotary_dim < config.head_dim
        layer = self.decoder.config, config.norm_before_residual, config.qk_norm, partial
        self.decoder.layers[0] = Eagle3Layer(*layer)
        if partial:
            self.decoder.add_module("rotary_emb", PartialRotary(self.decoder.config))
        taps, eps = len(config.taps), config.rms_norm_eps
        self.input_norm = LlamaRMSNorm(taps * width, eps=eps) if config.norm_before_fc else None
        each = nn.ModuleList(LlamaRMSNorm(width, eps=eps) for _ in range(taps))
        self.fc_norm = each if config.fc_norm else None
        if (rotary := config.multimodal_rotary()) is not None:
            self.decoder.add_module("rotary_emb", rotary)
        self.norm = LlamaRMSNorm(width, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(width, config.draft_vocabulary, bias=False)
        self.t2d: Tensor | None
        known = torch.arange(config.vocabulary) < config.draft_vocabulary
        self.register_buffer("t2d", known if config.draft_size else None)
        self.post_init()

    @property
    def position_lag(self) -> int | None:
        """With several axes, a row has the position of its feature's token in the target."""
        return None if self.config.mrope_section is None else 1

    def learn_vocabulary(self, tokens: Tensor) -> None:
        super().learn_vocabulary(tokens)
        if self.t2d is not None:
            self.t2d = torch.zeros_like(self.t2d).scatter(0, tokens.to(self.t2d.device), True)

    def join(self, states: Sequence[Tensor]) -> Tensor:
        if self.fc_norm is not None:
            states = [norm(state) for norm, state in zip(self.fc_norm, states, strict=True)]
        together = torch.cat([*states], dim=-1)
        if self.input_norm is not None:
            together = self.input_norm(together)
        joined: Tensor = self.fc(together)
        return joined

    def forward(
        self,
        rows: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | dict[str, Tensor] | None = None,
        cache: Cache | None = None,
        **kwargs: object,
    ) -> Tensor:
        window = self.config.sliding_window
        if attention_mask is None and window is not None and rows.shape[1] > window:
            # Llama's decoder has no sliding windows
            place = torch.arange(rows.shape[1], device=rows.device)
            distance = place[:, None] - place
            seen = (distance >= 0) & (distance < window)
            eager = self.decoder.config._attn_implementation == "eager"
            attention_mask = (additive_mask(seen, rows.dtype) if eager else seen)[None, None]
        hidden = super().forward(rows, position_ids, attention_mask, cache, **kwargs)
        return self.norm(hidden) if self.config.norm_feedback else hidden

    def fuse(self, embeddings: Tensor, features: Tensor, summary: Tensor | None = None) -> Tensor:
        return torch.cat([embeddings, features], dim=-1)

    def logits(self, hidden: Tensor, read_out: Callable[[Tensor], Tensor]) -> Tensor:
        is_normed = self.config.norm_feedback or not self.config.norm_logits
        logits: Tensor = self.lm_head(hidden if is_normed else self.norm(hidden))
        return logits


@strict
class ParallelConfig(Eagle3Config):
    """Config of a P-EAGLE head.

    Attributes:
        num_layers: of the head; the first is EAGLE-3's, the others are Llama's.
        mask_token: token whose embedding is the input of mask rows.
        own_embedding: whether the head has its own embedding matrix.
        num_draft_tokens, depth, top_k: the default draft, a chain of all tokens that the head was trained to
            predict.
    """

    model_type = "mmspec_peagle"

    num_layers: int = 1
    mask_token: int = 0
    own_embedding: bool = False
    num_draft_tokens: int = PREDICTIONS
    depth: int = PREDICTIONS
    top_k: int = 1

    def validate_mask(self) -> None:
        """Raise ValueError for a mask that is not a token; called by `strict`."""
        if not 0 <= self.mask_token < max(self.vocabulary, 1):
            raise ValueError(f"mask_token must be from 0 to {self.vocabulary - 1}; got {self.mask_token}")


class ParallelHead(Eagle3Head):
    """Predicts the next tokens, each from its own row, in one forward pass."""

    config: ParallelConfig
    config_class = ParallelConfig
    base_model_prefix = "peagle"

    def __init__(self, config: ParallelConfig) -> None:
        super().__init__(config)
        layer: Any = self.decoder.config
        layers: Any = self.decoder.layers
        attention = type(layers[0].self_attn)
        for index in range(1, config.num_layers):
            added = LlamaDecoderLayer(layer, index)
            output = added.self_attn.o_proj
            added.self_attn = attention(layer, index)
            added.self_attn.o_proj = output
            layers.append(added)
        layer.num_hidden_layers = config.num_layers
        if config.sliding_window is not None:
            layer.layer_types = [SLIDING] * config.num_layers
        self.mask_hidden = nn.Parameter(torch.zeros(len(config.taps) * config.hidden_size))
        words = config.vocabulary, config.hidden_size
        self.embed_tokens = nn.Embedding(*words) if config.own_embedding else None
        self.post_init()

    @property
    def mask_feature(self) -> Tensor:
        """[d] feature of mask rows, in place of the state of the token before."""
        return self.join(self.mask_hidden.chunk(len(self.config.taps)))
