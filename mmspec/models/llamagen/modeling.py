"""The LlamaGen transformer with the seams of any transformers decoder: Cache, 4-D mask, position_ids.

It differs from Llama in two things: positions are those of a raster (`raster_rope`), and the sequence
begins with condition slots. Norms, feed-forward, masks and attention kernels are those of transformers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, GenerationMixin, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    LlamaRMSNorm,
    eager_attention_forward,
)
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from mmspec.models.llamagen.conditions import CaptionEmbedding, ClassEmbedding
from mmspec.models.llamagen.configuration import LlamaGenConfig
from mmspec.models.llamagen.raster_rope import raster_rotation, rotate_pairs
from mmspec.transformers_versions import CACHE, CACHE_NAMES, takes_cache

__all__ = ["LlamaGenForCausalLM", "LlamaGenModel", "LlamaGenPreTrainedModel"]


class LlamaGenAttention(LlamaAttention):
    """Llama's attention with raster positions."""

    def forward(  # type: ignore[override, unused-ignore]  # the name of the cache
        self,
        hidden_states: Tensor,  # [B, T, D]
        rotation: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        queries, keys, values = (
            projection(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        queries, keys = rotate_pairs(queries, *rotation), rotate_pairs(keys, *rotation)
        if cache is not None:
            keys, values = cache.update(keys, values, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        dropout = self.attention_dropout if self.training else 0.0
        output, weights = attend(
            self, queries, keys, values, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs
        )
        return self.o_proj(output.flatten(2)), weights


class LlamaGenDecoderLayer(GradientCheckpointingLayer):
    """x + attention(norm(x)), then x + feed-forward(norm(x))."""

    def __init__(self, config: LlamaGenConfig, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = LlamaGenAttention(config, layer_idx)  # type: ignore[arg-type]
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        attended, _ = self.self_attn(self.input_layernorm(hidden_states), **kwargs)
        hidden_states = hidden_states + attended
        output: Tensor = hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))
        return output


class LlamaGenPreTrainedModel(PreTrainedModel):
    """Base of both classes below: what transformers has to know of them."""

    config: LlamaGenConfig
    config_class = LlamaGenConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["LlamaGenDecoderLayer"]
    _skip_keys_device_placement = list(CACHE_NAMES)
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _can_compile_fullgraph = True
    _supports_attention_backend = True
    _can_record_outputs = {"hidden_states": LlamaGenDecoderLayer, "attentions": LlamaGenAttention}


class LlamaGenModel(LlamaGenPreTrainedModel):
    """The transformer without its head."""

    def __init__(self, config: LlamaGenConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        is_class = config.condition_type == "class"
        self.cls_embedding = ClassEmbedding(config) if is_class else CaptionEmbedding(config)
        self.layers = nn.ModuleList(
            LlamaGenDecoderLayer(config, index) for index in range(config.num_hidden_layers)
        )
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    def embed(self, input_ids: Tensor, caption_features: Tensor | None) -> Tensor:
        """Vectors [B, T, D] of image tokens and of the condition slots before them."""
        if caption_features is not None:
            slots = self.cls_embedding.embed(input_ids, caption_features)
            return torch.cat([slots, self.embed_tokens(input_ids[:, slots.shape[1] :])], dim=1)
        if isinstance(self.cls_embedding, CaptionEmbedding):
            tokens: Tensor = self.embed_tokens(input_ids)
            return tokens
        is_slot = input_ids >= self.config.vocab_size
        labels = self.cls_embedding.embedding_table((input_ids - self.config.vocab_size) * is_slot)
        return torch.where(is_slot[..., None], labels, self.embed_tokens(input_ids * ~is_slot))

    @takes_cache
    @merge_with_config_defaults  # type: ignore[untyped-decorator]
    @capture_outputs  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        caption_features: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        if inputs_embeds is None and input_ids is not None:
            inputs_embeds = self.embed(input_ids, caption_features)
        elif inputs_embeds is None or input_ids is not None:
            raise ValueError("pass either input_ids or inputs_embeds")
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        if position_ids is None:  # slots of a padded caption count: the first image token is always at C
            past = cache.get_seq_length() if cache is not None else 0
            position_ids = (torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device) + past)[None]
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            position_ids=position_ids,
            **{CACHE: cache},
        )
        precise = torch.promote_types(inputs_embeds.dtype, torch.float32)
        cos, sin = raster_rotation(position_ids, self.config)
        hidden_states = inputs_embeds
        for layer in self.layers:
            hidden_states = layer(
                hidden_states,
                rotation=(cos.to(precise), sin.to(precise)),
                attention_mask=mask,
                cache=cache,
                **kwargs,
            )
        kept: dict[str, Any] = {CACHE: cache}
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states), **kept)


class LlamaGenForCausalLM(LlamaGenPreTrainedModel, GenerationMixin):
    """LlamaGen: the next image token, given a condition and the tokens before it.

    `ForCausalLM`, as in MusicGen of transformers, because it is the decoder alone; a class named
    `ForConditionalGeneration` would hold the text encoder and the image tokenizer as well. Prompts are made
    by `class_prompt`, `caption_prompt` and `null_caption_prompt` of this package.

    Example:
        >>> config = LlamaGenConfig(hidden_size=32, num_attention_heads=2, num_hidden_layers=2, vocab_size=64)
        >>> model = LlamaGenForCausalLM(config).eval()
        >>> model(torch.tensor([[64 + 207]])).logits.shape  # the distribution of the first token of class 207
        torch.Size([1, 1, 64])
    """

    def __init__(self, config: LlamaGenConfig) -> None:
        super().__init__(config)
        self.model = LlamaGenModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @takes_cache
    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        caption_features: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            caption_features=caption_features,
            use_cache=use_cache,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs
            )
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            **{CACHE: getattr(outputs, CACHE)},
        )

    def prepare_inputs_for_generation(  # type: ignore[override, unused-ignore]
        self, input_ids: Tensor, is_first_iteration: bool = False, **kwargs: Any
    ) -> dict[str, Any]:
        """As in any model, but the caption is read once, and padded slots count as positions."""
        prepare: Any = super().prepare_inputs_for_generation  # type: ignore[misc, unused-ignore]
        inputs: dict[str, Any] = prepare(input_ids, is_first_iteration=is_first_iteration, **kwargs)
        inputs.pop("position_ids", None)
        if not is_first_iteration and kwargs.get("use_cache", True):
            inputs.pop("caption_features", None)
        return inputs
