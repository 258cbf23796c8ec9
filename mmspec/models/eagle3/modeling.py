"""The EAGLE-3 head: a Llama layer over embedding and feature side by side, its own norm and output matrix.

It has no embedding: that is its target's, frozen. Unlike EAGLE-1 it need not predict the target's hidden
states, so what it feeds itself is free: its layer's output before the last norm, as the release has it, or
behind it (EAGLE-3.1, as speculators calls its later heads).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, LlamaConfig
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeAttention
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from mmspec.decoding.cache import additive_mask
from mmspec.errors import InputError
from mmspec.models.eagle3.configuration import Eagle3Config
from mmspec.models.feature_head import FeatureHead
from mmspec.models.llama_layer import one_layer
from mmspec.models.multimodal_rotary import MultimodalRotary
from mmspec.models.published_layer import PartialRotary

__all__ = ["Eagle3Head"]


class Eagle3Layer(LlamaDecoderLayer):
    """A Llama layer that attends by norm(embedding) and norm(feature), and adds to the feature alone.

    Args:
        config: of the layer.
        norm_before_residual: whether that feature is the normed one.
        qk_norm: whether queries and keys are normed.
        partial: whether a part of each head is turned by its position, and the rest is not.
    """

    def __init__(
        self, config: LlamaConfig, norm_before_residual: bool, qk_norm: bool = False, partial: bool = False
    ) -> None:
        super().__init__(config, layer_idx=0)
        attention: Any = Glm4MoeAttention if partial else Qwen3Attention if qk_norm else None
        if attention is not None:  # the config has all that these ask for
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

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
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

    Row t of its input holds the embedding of token t and the feature at t - 1: the target's hidden states
    there, brought to one width; or, of a candidate, the head's own state. The logits of token t + 1 are over
    the draft vocabulary, whose token i is the target's i + d2t[i]; t2d says which of the target's tokens are
    in it. A new head knows the target's first tokens, which are the frequent ones where a vocabulary was
    built by merges; `learn_vocabulary` chooses others.
    """

    config: Eagle3Config
    config_class = Eagle3Config
    base_model_prefix = "eagle3"

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.fc = nn.Linear(len(config.taps) * width, width, bias=False)
        self.decoder = one_layer(config)  # without norm: states are fed back as they are
        partial = config.rotary_dim < config.head_dim
        layer = self.decoder.config, config.norm_before_residual, config.qk_norm, partial
        self.decoder.layers[0] = Eagle3Layer(*layer)
        if partial:
            self.decoder.add_module("rotary_emb", PartialRotary(self.decoder.config))
        taps, eps = len(config.taps), config.rms_norm_eps
        self.input_norm = LlamaRMSNorm(taps * width, eps=eps) if config.norm_before_fc else None
        each = nn.ModuleList(LlamaRMSNorm(width, eps=eps) for _ in range(taps))
        self.fc_norm = each if config.fc_norm else None
        if config.mrope_section is not None:
            shape = config.rotary_dim, config.rope_theta, config.mrope_section
            rotary = MultimodalRotary(*shape, interleaved=config.mrope_interleaved)
            self.decoder.add_module("rotary_emb", rotary)
        self.norm = LlamaRMSNorm(width, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(width, config.draft_vocabulary, bias=False)
        self.d2t: Tensor | None
        self.t2d: Tensor | None
        reduced = config.draft_vocabulary < config.vocabulary
        known = torch.arange(config.vocabulary) < config.draft_vocabulary
        self.register_buffer(
            "d2t", torch.zeros(config.draft_vocabulary, dtype=torch.long) if reduced else None
        )
        self.register_buffer("t2d", known if reduced else None)
        self.post_init()

    @property
    def position_lag(self) -> int | None:
        """With several axes, a row stands where the target has the token that its feature is of."""
        return None if self.config.mrope_section is None else 1

    @property
    def taps(self) -> tuple[int, ...]:
        return tuple(self.config.taps)

    @property
    def draft_tokens(self) -> Tensor | None:
        return None if self.d2t is None else torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    def learn_vocabulary(self, tokens: Tensor) -> None:
        """Draft from these tokens of the target [V'] from now on; the output matrix is for others then.

        Raises:
            InputError: another number of tokens, one that is no token of the target, or one twice; or the
                head knows all tokens.
        """
        chosen = tokens.unique()
        known, most = self.config.draft_vocabulary, self.config.vocabulary
        fits = len(chosen) == known > 0 and chosen[0] >= 0 and chosen[-1] < most
        if self.d2t is None or self.t2d is None or not fits:
            raise InputError("tokens", tokens.tolist()[:8], f"{known} different tokens from 0 to {most - 1}")
        chosen = chosen.to(self.d2t.device)
        self.d2t = chosen - torch.arange(known, device=chosen.device)
        self.t2d = torch.zeros_like(self.t2d).scatter(0, chosen, True)

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
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> Tensor:
        window = self.config.sliding_window
        if attention_mask is None and window is not None and rows.shape[1] > window:
            # Llama's decoder knows no windows
            place = torch.arange(rows.shape[1], device=rows.device)
            distance = place[:, None] - place
            seen = (distance >= 0) & (distance < window)
            eager = self.decoder.config._attn_implementation == "eager"
            attention_mask = (additive_mask(seen, rows.dtype) if eager else seen)[None, None]
        hidden = super().forward(rows, position_ids, attention_mask, past_key_values, **kwargs)
        return self.norm(hidden) if self.config.norm_feedback else hidden

    def fuse(self, embeddings: Tensor, features: Tensor, summary: Tensor | None = None) -> Tensor:
        return torch.cat([embeddings, features], dim=-1)

    def logits(self, hidden: Tensor, read_out: Callable[[Tensor], Tensor]) -> Tensor:
        is_normed = self.config.norm_feedback or not self.config.norm_logits
        logits: Tensor = self.lm_head(hidden if is_normed else self.norm(hidden))
        return logits
