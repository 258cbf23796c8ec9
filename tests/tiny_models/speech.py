"""A tiny Moonshine and a tiny Whisper with their processors, as a pipeline's parts."""

from __future__ import annotations

import transformers as hf
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedModel, Wav2Vec2FeatureExtractor, Wav2Vec2Processor

from tests.tiny_models.encoder_decoder import STACKS, tiny_moonshine
from tests.tiny_models.processors import tiny_tokenizer
from tests.tiny_models.weights import randomise


def tiny_speech_model() -> tuple[PreTrainedModel, Wav2Vec2Processor]:
    """A Moonshine of random weights, whose outputs are words that depend on the sound."""
    tokenizer = tiny_tokenizer()
    tokenizer.padding_side = "right"
    model = tiny_moonshine(vocabulary=len(tokenizer))
    model.generation_config.max_new_tokens = 24
    extractor = Wav2Vec2FeatureExtractor(do_normalize=False, return_attention_mask=True)
    return model, Wav2Vec2Processor(extractor, tokenizer)


def tiny_whisper_with_times(seed: int = 2) -> tuple[PreTrainedModel, hf.WhisperProcessor]:
    """A Whisper of random weights with windows of one second, whose tokens are bytes and times."""
    special = ["<|endoftext|>", "<|startoftranscript|>", "<|startofprev|>", "<|notimestamps|>"]
    names = [*sorted(ByteLevel.alphabet()), *special, *(f"<|{step / 50:.2f}|>" for step in range(51))]
    vocabulary = {name: index for index, name in enumerate(names)}
    end, start, before, no_times = map(vocabulary.__getitem__, special)
    config = hf.WhisperConfig(
        vocab_size=len(names), d_model=32, num_mel_bins=8, max_source_positions=50, max_target_positions=64,
        tie_word_embeddings=False, suppress_tokens=None, begin_suppress_tokens=None, pad_token_id=end,
        bos_token_id=end, eos_token_id=end, decoder_start_token_id=start, **STACKS,
    )  # fmt: skip
    model = randomise(hf.WhisperForConditionalGeneration(config), seed)
    model.generation_config = hf.GenerationConfig(
        pad_token_id=end, bos_token_id=end, eos_token_id=end, decoder_start_token_id=start,
        prev_sot_token_id=before, no_timestamps_token_id=no_times, is_multilingual=False,
        return_timestamps=False, max_new_tokens=24,
    )  # fmt: skip
    tokenizer = hf.WhisperTokenizer(vocabulary, [])
    tokenizer.add_special_tokens({"additional_special_tokens": special[1:]})
    return model, hf.WhisperProcessor(hf.WhisperFeatureExtractor(feature_size=8, chunk_length=1), tokenizer)
