"""Models with unsupported caches, masks or positions are refused before any forward pass, with a reason.

Each was once decoded wrongly, or failed with an error of another library. They are built without memory,
so that nothing can run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    BartConfig,
    BartForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    BltConfig,
    BltForCausalLM,
    DogeConfig,
    DogeForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    Kosmos2_5Config,
    Kosmos2_5ForConditionalGeneration,
    LEDConfig,
    LEDForConditionalGeneration,
    ModernBertDecoderConfig,
    ModernBertDecoderForCausalLM,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
    VoxtralRealtimeConfig,
    VoxtralRealtimeForConditionalGeneration,
    XLMConfig,
    XLMWithLMHeadModel,
)

from mmspec.errors import UnsupportedModelError
from mmspec.pipelines.base import adapt
from mmspec.transformers_versions import CACHE
from tests.tiny_models.audio_language import tiny_omni_thinker

SIZES: dict[str, Any] = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, vocab_size=64)
TEXT: dict[str, Any] = SIZES | dict(intermediate_size=16, num_key_value_heads=1, pad_token_id=0)


def tiny_voxtral_realtime() -> PreTrainedModel:
    config = VoxtralRealtimeConfig(
        audio_config=TEXT | dict(num_key_value_heads=2), text_config=TEXT | dict(head_dim=8)
    )
    return VoxtralRealtimeForConditionalGeneration(config)


def tiny_kosmos() -> PreTrainedModel:
    config = Kosmos2_5Config(
        text_config=dict(vocab_size=32, embed_dim=16, layers=1, ffn_dim=16, attention_heads=2),
        vision_config=dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16),
    )
    return Kosmos2_5ForConditionalGeneration(config)


def tiny_bart() -> PreTrainedModel:
    config = BartConfig(
        d_model=16, decoder_layers=1, decoder_attention_heads=2, decoder_ffn_dim=16, vocab_size=32
    )
    return BartForCausalLM(config)


def tiny_gpt_neo() -> PreTrainedModel:
    config = GPTNeoConfig(
        vocab_size=32, hidden_size=16, num_layers=2, num_heads=2, attention_types=[[["global", "local"], 1]]
    )
    return GPTNeoForCausalLM(config)


REFUSED: dict[str, tuple[Callable[[], PreTrainedModel], str]] = {
    "positions counted from token ids": (tiny_kosmos, "from token ids, not from `position_ids`"),
    "no positions": (lambda: BloomForCausalLM(BloomConfig(n_layer=1)), "takes no `position_ids`"),
    "biases on places": (
        lambda: FalconForCausalLM(FalconConfig(**SIZES, alibi=True)),
        r"places in the cache, not .* \(alibi\)",
    ),
    "a choice of keys": (
        lambda: DogeForCausalLM(DogeConfig(**TEXT)),
        r"places in the cache, not .* \(keep_window_size\)",
    ),
    "no cache": (
        lambda: OpenAIGPTLMHeadModel(OpenAIGPTConfig(n_embd=16, n_layer=1, n_head=2)),
        f"takes no `{CACHE}`",
    ),
    "a cache of its own": (
        lambda: XLMWithLMHeadModel(XLMConfig(vocab_size=32, emb_dim=16, n_layers=1, n_heads=2)),
        r"its own kind of cache \(`cache`",
    ),
    "a second cache": (tiny_voxtral_realtime, r"more than one cache \(.*encoder_(past_key_values|cache)"),
    "cross-attention": (tiny_bart, "cross-attention"),
    "a mask of its own": (tiny_gpt_neo, "its own mask"),
    "relative positions": (
        lambda: T5ForConditionalGeneration(T5Config(d_model=16, d_ff=16, num_layers=1, num_heads=2, d_kv=8)),
        "relative positions of places in the cache",
    ),
    "positions that the decoder counts": (
        lambda: LEDForConditionalGeneration(
            LEDConfig(vocab_size=32, d_model=16, encoder_layers=1, decoder_layers=1, attention_window=[4])
        ),
        "counts the positions of its decoder's tokens itself",
    ),
    "layers that cannot be found": (
        lambda: ModernBertDecoderForCausalLM(ModernBertDecoderConfig(**TEXT)),
        "has a Linear for its decoder",
    ),
    "several stacks of layers": (
        lambda: BltForCausalLM(BltConfig()),
        "'blt' are not supported: its config has no num_hidden_layers",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_understood_is_refused(what: str) -> None:
    build, reason = REFUSED[what]
    with torch.device("meta"):
        model = build()
    with pytest.raises(UnsupportedModelError, match=reason):
        adapt(model)


def test_positions_from_unknown_inputs_are_refused() -> None:
    with torch.device("meta"):
        model = tiny_omni_thinker()
    model.get_rope_index = lambda input_ids, depth_maps: None
    with pytest.raises(UnsupportedModelError, match="computes its positions from depth_maps too"):
        adapt(model)
