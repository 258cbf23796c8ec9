"""Tiny encoder-decoders with random weights: sound, text and images.

None has an end token or forced tokens. The default seeds give outputs that vary and depend on the input.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf
from transformers import PreTrainedModel

from .weights import randomise

VOCABULARY = 64
START = 3
PLACES = 80  # learned positions of the decoders
STACKS: dict[str, Any] = {
    f"{side}_{name}": value
    for side in ("encoder", "decoder")
    for name, value in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 64))
}
SPECIAL: dict[str, Any] = dict(
    pad_token_id=0, bos_token_id=None, eos_token_id=None, decoder_start_token_id=START
)


def _made(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    randomise(model, seed)
    model.generation_config = hf.GenerationConfig(**SPECIAL)
    return model


def tiny_whisper(seed: int = 11, layers: int = 2) -> PreTrainedModel:
    """A Whisper for 40 frames of 8 bands."""
    sizes = STACKS | dict(decoder_layers=layers)
    config = hf.WhisperConfig(
        vocab_size=VOCABULARY, d_model=32, num_mel_bins=8, max_source_positions=20,
        max_target_positions=PLACES, tie_word_embeddings=False, suppress_tokens=None,
        begin_suppress_tokens=None, **sizes, **SPECIAL,
    )  # fmt: skip
    return _made(hf.WhisperForConditionalGeneration(config), seed)


def tiny_bart(seed: int = 7) -> PreTrainedModel:
    """A BART, whose decoder takes no positions."""
    config = hf.BartConfig(
        vocab_size=VOCABULARY, d_model=32, max_position_embeddings=PLACES, tie_word_embeddings=False,
        **STACKS, **SPECIAL,
    )  # fmt: skip
    return _made(hf.BartForConditionalGeneration(config), seed)


def tiny_moonshine(seed: int = 18, vocabulary: int = VOCABULARY) -> PreTrainedModel:
    """A Moonshine: sounds of any length, with a mask, and rotary positions."""
    config = hf.MoonshineConfig(
        vocab_size=vocabulary, hidden_size=32, intermediate_size=64, encoder_num_hidden_layers=2,
        decoder_num_hidden_layers=2, encoder_num_attention_heads=4, decoder_num_attention_heads=4,
        tie_word_embeddings=False, **SPECIAL,
    )  # fmt: skip
    return _made(hf.MoonshineForConditionalGeneration(config), seed)


def tiny_trocr(seed: int = 12) -> PreTrainedModel:
    """A ViT of another width than its decoder, a TrOCR."""
    vision = hf.ViTConfig(
        hidden_size=24, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, image_size=32,
        patch_size=8,
    )  # fmt: skip
    text = hf.TrOCRConfig(
        vocab_size=VOCABULARY, d_model=32, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=64,
        max_position_embeddings=PLACES, tie_word_embeddings=False, **SPECIAL,
    )  # fmt: skip
    config = hf.VisionEncoderDecoderConfig.from_encoder_decoder_configs(vision, text)
    return _made(hf.VisionEncoderDecoderModel(config), seed)


ENCODER_DECODERS = {
    "whisper": tiny_whisper,
    "bart": tiny_bart,
    "moonshine": tiny_moonshine,
    "trocr": tiny_trocr,
}


def encoder_inputs_of(model: PreTrainedModel, seed: int) -> dict[str, torch.Tensor]:
    """Random inputs of one row for the encoder; lengths differ by seed where the model allows it."""
    generator = torch.Generator().manual_seed(seed)
    match model.main_input_name:
        case "input_features":
            return {"input_features": torch.randn(1, 8, 40, generator=generator)}
        case "input_values":
            return {"input_values": torch.randn(1, 3000 + 1500 * seed, generator=generator)}
        case "pixel_values":
            return {"pixel_values": torch.randn(1, 3, 32, 32, generator=generator)}
    ids = torch.randint(4, VOCABULARY, (1, 5 + 4 * seed), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
