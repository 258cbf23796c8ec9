"""The LlamaGen transformer, with the interface of any transformers decoder: Cache, 4-D mask, position_ids.

It differs from Llama in two ways: positions are those of a raster, and the sequence begins with condition
slots. The condition is part of `input_ids`, where ids from `vocab_size` on are condition slots, so that a
prompt has a length as usual. Classifier-free guidance uses null prompts as negative prompts. Norms,
feed-forward networks, masks and attention kernels are those of transformers.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, GenerationMixin, PreTrainedModel, PreTrainedTokenizerBase
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

from mmspec.errors import InputError
from mmspec.families.llamagen.configuration import CONTROLLED_LAYERS, LlamaGenConfig
from mmspec.families.llamagen.control import ControlEncoder, control_of_tokens, two_layers
from mmspec.open_types import Keywords
from mmspec.transformers_versions import CACHE, CACHE_NAMES, takes_cache
from mmspec.validation import is_integer

logger = logging.getLogger(__name__)


class ClassEmbedding(nn.Module):
    """Embedding of class labels; the last row is the null class."""

    def __init__(self, config: LlamaGenConfig) -> None:
        super().__init__()
        self.embedding_table = nn.Embedding(config.num_classes + 1, config.hidden_size)

    def embed(self, input_ids: Tensor, features: Tensor) -> Tensor:
        """Raise InputError: labels are ids, and not features."""
        rule = "must be None: this checkpoint is conditioned on classes"
        raise InputError("caption_features", features, rule)


class CaptionEmbedding(nn.Module):
    """Projection of text features, and the features of no caption, which are a buffer in official files."""

    uncond_embedding: Tensor

    def __init__(self, config: LlamaGenConfig) -> None:
        super().__init__()
        self.cap_proj = two_layers(config.caption_dim, config.hidden_size)
        self.register_buffer("uncond_embedding", torch.zeros(config.caption_length, config.caption_dim))

    def embed(self, input_ids: Tensor, features: Tensor) -> Tensor:
        """Vectors [B, n, D] of the features [B, n, caption_dim] of the first n slots.

        Raises:
            InputError: there are more features than slots in `input_ids`, or they have another width.
        """
        expected = self.uncond_embedding.shape[1]
        if features.dim() != 3 or features.shape[2] != expected or features.shape[1] > input_ids.shape[1]:
            rule = f"must be [B, n, {expected}], for the n slots at the beginning of input_ids"
            raise InputError("caption_features", features, rule)
        vectors: Tensor = self.cap_proj(features.to(self.uncond_embedding.dtype))
        return vectors


def raster_rotation(position_ids: Tensor, config: LlamaGenConfig) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of positions (2406.06525, official `precompute_freqs_cis_2d`).

    Position C + k is raster cell k. Condition slots and positions beyond the image have cos = sin = 0,
    not cos = 1. This makes their queries and keys zero, so that a query gives all visible condition slots the
    same weight. The values are computed in double precision in each forward pass; a buffer would be affected
    by `meta` devices and casts.

    Args:
        position_ids: [B, T] positions in the sequence; the first condition slot is 0.
        config: config of the model, with the begin and the width of the image.

    Returns:
        Two tensors [B, T, head_dim / 2], float64 on devices that support it, else float32.
    """
    pairs = config.head_dim // 4  # for the row, and as many for the column
    dtype = torch.float32 if position_ids.device.type == "mps" else torch.float64
    exponents = torch.arange(pairs, device=position_ids.device, dtype=dtype) / pairs
    frequencies = config.rope_base**-exponents
    cell = position_ids - config.prefix_length
    inside = ((cell >= 0) & (cell < config.image_tokens))[..., None]
    row, column = cell // config.grid_size, cell % config.grid_size
    angles = torch.cat([row[..., None] * frequencies, column[..., None] * frequencies], dim=-1)
    return angles.cos() * inside, angles.sin() * inside


def rotate_pairs(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the adjacent pairs (2m, 2m + 1) of heads [B, heads, T, head_dim], in float32 or better."""
    even, odd = states.to(cos.dtype).unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[:, None], sin[:, None]
    turned = torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1)
    return turned.flatten(-2).to(states.dtype)


class LlamaGenAttention(LlamaAttention):
    """Llama's attention with raster positions."""

    def forward(
        self,
        hidden_states: Tensor,  # [B, T, D]
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        queries, keys, values = (
            projection(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        queries, keys = self.place(queries, keys, position_embeddings)
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

    def place(
        self, queries: Tensor, keys: Tensor, rotation: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        """Rotate queries and keys [B, heads, T, head_dim] by their positions; None leaves them unchanged."""
        if rotation is None:
            return queries, keys
        return rotate_pairs(queries, *rotation), rotate_pairs(keys, *rotation)


class LlamaGenDecoderLayer(GradientCheckpointingLayer):
    """x + attention(norm(x)), then x + feed-forward(norm(x))."""

    def __init__(self, config: LlamaGenConfig, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = LlamaGenAttention(config, layer_idx)  # type: ignore[arg-type]
        self.mlp: nn.Module = LlamaMLP(config)
        self.input_layernorm: nn.Module = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm: nn.Module = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden_states: Tensor, **kwargs: object) -> Tensor:
        attended, _ = self.self_attn(self.input_layernorm(hidden_states), **kwargs)
        hidden_states = hidden_states + attended
        output: Tensor = hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))
        return output


class LlamaGenPreTrainedModel(PreTrainedModel):
    """Base of both classes below, with the class attributes that transformers reads."""

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
    """The transformer without its output matrix."""

    def __init__(self, config: LlamaGenConfig) -> None:
        super().__init__(config)
        self.embed_tokens: nn.Module = nn.Embedding(config.vocab_size, config.hidden_size)
        kind = ClassEmbedding if config.condition_type == "class" else CaptionEmbedding
        self.cls_embedding: ClassEmbedding | CaptionEmbedding = kind(config)
        self.layers = nn.ModuleList(
            LlamaGenDecoderLayer(config, index) for index in range(config.num_hidden_layers)
        )
        self.norm: nn.Module = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
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
        control: Tensor | None = None,  # [B, 3, N, D] of all cells, as `ControlEncoder` makes it
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
        angles = self.rotation(position_ids)
        rotation = None if angles is None else (angles[0].to(precise), angles[1].to(precise))
        if control is not None:
            kwargs["control"] = control_of_tokens(control, position_ids, self.config)
        states = self.run(
            inputs_embeds, position_embeddings=rotation, attention_mask=mask, cache=cache, **kwargs
        )
        kept: Keywords = {"last_hidden_state": states, CACHE: cache}
        return BaseModelOutputWithPast(**kept)

    def rotation(self, position_ids: Tensor) -> tuple[Tensor, Tensor] | None:
        """Cosines and sines of positions [B, T], see `raster_rotation`; None without rotation."""
        return raster_rotation(position_ids, self.config)

    def run(self, hidden_states: Tensor, *, control: Sequence[Tensor] = (), **how: Any) -> Tensor:
        """Run the layers, each with the arguments `how`: [B, T, D] -> normed states [B, T, D].

        `control` has [B, T, D] for each third of the layers, added to the input of its first layer.
        """
        for index, layer in enumerate(self.layers):
            third, rest = divmod(index * CONTROLLED_LAYERS, len(self.layers))
            if control and not rest:
                hidden_states = hidden_states + control[third]
            hidden_states = layer(hidden_states, **how)
        normed: Tensor = self.norm(hidden_states)
        return normed


class LlamaGenForCausalLM(LlamaGenPreTrainedModel, GenerationMixin):
    """LlamaGen: predicts the next image token, given a condition and the tokens before it.

    The name has `ForCausalLM`, as MusicGen's in transformers, because the class is the decoder alone; a
    `ForConditionalGeneration` would include the text encoder and the image tokenizer. `class_prompt`,
    `caption_prompt` and `null_caption_prompt` of this module make prompts.

    Example:
        >>> config = LlamaGenConfig(hidden_size=32, num_attention_heads=2, num_hidden_layers=2, vocab_size=64)
        >>> model = LlamaGenForCausalLM(config).eval()
        >>> model(torch.tensor([[64 + 207]])).logits.shape  # the distribution of the first token of class 207
        torch.Size([1, 1, 64])

    Attributes:
        control_encoder: encodes an image to `control`, if the config has a `control_config`; else None.
    """

    decoder_class: ClassVar[type[LlamaGenModel]] = LlamaGenModel

    def __init__(self, config: LlamaGenConfig) -> None:
        super().__init__(config)
        self.model = self.decoder_class(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        # outside the decoder, whose modules are checked for how they attend
        self.control_encoder = None if config.control_config is None else ControlEncoder(config)
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
        control: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: object,
    ) -> CausalLMOutputWithPast:
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            caption_features=caption_features,
            control=control,
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

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Keywords:
        """As in any model, except that the caption is read once, and padded slots count as positions."""
        inputs: Keywords = super().prepare_inputs_for_generation(*args, **kwargs)
        inputs.pop("position_ids", None)
        if not kwargs.get("is_first_iteration", False) and kwargs.get("use_cache", True):
            inputs.pop("caption_features", None)
        return inputs


def class_prompt(config: LlamaGenConfig, labels: Sequence[int | None]) -> dict[str, Tensor]:
    """Make prompts [B, 1] of class labels, None for the null class: `vocab_size` plus the label."""
    if config.condition_type != "class":
        rule = "must be left out: this checkpoint is conditioned on captions"
        raise InputError("class_labels", list(labels), rule)
    ids = []
    for index, label in enumerate(labels):
        if label is None:
            label = config.num_classes
        elif not is_integer(label) or not 0 <= label < config.num_classes:
            rule = f"must be an integer from 0 to {config.num_classes - 1}, or None for no class"
            raise InputError(f"class_labels[{index}]", label, rule)
        ids.append([config.vocab_size + label])
    return {"input_ids": torch.tensor(ids, dtype=torch.long, device="cpu").reshape(-1, 1)}


def caption_prompt(config: LlamaGenConfig, features: Tensor) -> dict[str, Tensor]:
    """Make prompts of text features.

    Args:
        config: config of a model that is conditioned on captions.
        features: [B, n, caption_dim] features of n text tokens. The caller leaves out padding, or masks it
            on the left with a 2-D `attention_mask` of all slots and image tokens.

    Returns:
        `input_ids` [B, n], all `vocab_size`, and `caption_features`. With fewer than `caption_length`
        slots the image still begins at position `caption_length`: count positions from the image back.

    Raises:
        InputError: the model is conditioned on classes, or the features do not fit it.
    """
    if config.condition_type != "caption":
        rule = "must be left out: this checkpoint is conditioned on classes"
        raise InputError("caption_features", features, rule)
    rule = f"must be [B, n, {config.caption_dim}], with n from 1 to {config.caption_length}"
    if features.dim() != 3 or features.shape[2] != config.caption_dim:
        raise InputError("caption_features", features, rule)
    if not 1 <= features.shape[1] <= config.caption_length:
        raise InputError("caption_features", features, rule)
    ids = torch.full(features.shape[:2], config.vocab_size, dtype=torch.long, device=features.device)
    return {"input_ids": ids, "caption_features": features}


@torch.inference_mode()
def encode_caption(
    config: LlamaGenConfig, text: str, tokenizer: PreTrainedTokenizerBase, text_encoder: PreTrainedModel
) -> dict[str, Tensor]:
    """Encode a single caption without padding; a caption that is too long is cut, with a warning.

    The text is lower-cased and its spaces are collapsed. The official cleaning of web captions (HTML,
    addresses) is left out.
    """
    text = " ".join(text.lower().split())
    whole = tokenizer(text).input_ids
    kept = tokenizer(text, truncation=True, max_length=config.caption_length).input_ids
    if not kept:
        raise InputError("prompt", text, "must have at least one token")
    if len(whole) > len(kept):
        same = sum(token == own for token, own in zip(whole, kept, strict=False))  # the end token is kept
        logger.warning(
            "the text encoder reads at most %d tokens; this part of the prompt was cut off: %r",
            config.caption_length,
            tokenizer.decode(whole[same:], skip_special_tokens=True),
        )
    ids = torch.tensor([kept], device=text_encoder.device)
    output = text_encoder(input_ids=ids, attention_mask=torch.ones_like(ids))
    features: Tensor = output.last_hidden_state
    return caption_prompt(config, features)


def null_caption_prompt(model: LlamaGenForCausalLM, num_text_tokens: int | None = None) -> dict[str, Tensor]:
    """Make a prompt of the learned features of no caption.

    Args:
        model: model with the buffer `uncond_embedding` [caption_length, caption_dim].
        num_text_tokens: length of the conditional prompt. The official sampler masks both halves alike, so
            that only the last rows are seen; None takes all rows.
    """
    features = getattr(model.model.cls_embedding, "uncond_embedding", None)
    if features is None:
        raise InputError("model", type(model).__name__, "must be conditioned on captions")
    count = features.shape[0] if num_text_tokens is None else num_text_tokens
    if not 1 <= count <= features.shape[0]:
        raise InputError("num_text_tokens", count, f"must be an integer from 1 to {features.shape[0]}")
    return caption_prompt(model.config, features[None, -count:])
