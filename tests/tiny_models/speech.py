"""A tiny Moonshine with a processor, as a folder or a pipeline's parts."""

from __future__ import annotations

from transformers import PreTrainedModel, Wav2Vec2FeatureExtractor, Wav2Vec2Processor

from tests.tiny_models.encoder_decoder import tiny_moonshine
from tests.tiny_models.processors import tiny_tokenizer


def tiny_speech_model() -> tuple[PreTrainedModel, Wav2Vec2Processor]:
    """A Moonshine of random weights, whose outputs are words that depend on the sound."""
    tokenizer = tiny_tokenizer()
    tokenizer.padding_side = "right"
    model = tiny_moonshine(vocabulary=len(tokenizer))
    model.generation_config.max_new_tokens = 24
    extractor = Wav2Vec2FeatureExtractor(do_normalize=False, return_attention_mask=True)
    return model, Wav2Vec2Processor(extractor, tokenizer)
