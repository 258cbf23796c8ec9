"""Tiny audio-language models with their real processors: Qwen2-Audio, and the thinker of Qwen2.5-Omni."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    PreTrainedModel,
    ProcessorMixin,
    Qwen2_5OmniThinkerConfig,
    Qwen2_5OmniThinkerForConditionalGeneration,
    Qwen2AudioConfig,
    Qwen2AudioForConditionalGeneration,
    Qwen2AudioProcessor,
    WhisperFeatureExtractor,
)

from tests.tiny_models.processors import Special, tiny_tokenizer

MELS = 16
SPECIAL = Special(
    "<|AUDIO|>",
    opening="<|im_start|>",
    closing="<|im_end|>",
    around=("<|audio_bos|>", "<|audio_eos|>"),
)
TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "pad_token_id": 0,
}
ENCODER: dict[str, Any] = {
    "d_model": 16,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "num_mel_bins": MELS,
}
#: Token ids of the thinker.
AUDIO, IMAGE, VIDEO, AUDIO_START, VISION_START = 60, 61, 62, 59, 58


def tiny_qwen2_audio() -> tuple[PreTrainedModel, ProcessorMixin]:
    """A Qwen2-Audio of random weights, which reads sounds of up to two seconds."""
    tokenizer = tiny_tokenizer(SPECIAL, audio_token=SPECIAL.image)
    processor = Qwen2AudioProcessor(
        WhisperFeatureExtractor(feature_size=MELS, chunk_length=2),
        tokenizer,
        chat_template=SPECIAL.chat_template.replace("'image'", "'audio'"),
    )
    config = Qwen2AudioConfig(
        audio_config=ENCODER | {"max_source_positions": 100},
        text_config=TEXT | {"model_type": "qwen2", "vocab_size": len(tokenizer)},
        audio_token_index=tokenizer.convert_tokens_to_ids(SPECIAL.image),
    )
    torch.manual_seed(0)
    return Qwen2AudioForConditionalGeneration(config).eval(), processor


def tiny_omni_thinker() -> PreTrainedModel:
    """A thinker of Qwen2.5-Omni of random weights; its sounds and images have three-axis positions."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    config = Qwen2_5OmniThinkerConfig(
        audio_config=ENCODER | {"output_dim": 32, "n_window": 10},
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "num_heads": 2,
            "intermediate_size": 16,
            "out_hidden_size": 32,
            "fullatt_block_indexes": [0],
        },
        text_config=TEXT | {"vocab_size": 64, "rope_parameters": rope},
        audio_token_index=AUDIO,
        image_token_index=IMAGE,
        video_token_index=VIDEO,
        audio_start_token_id=AUDIO_START,
        vision_start_token_id=VISION_START,
    )
    torch.manual_seed(0)
    return Qwen2_5OmniThinkerForConditionalGeneration(config).eval()
