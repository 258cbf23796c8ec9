"""Tiny models, processors and media for tests: seeded, offline, built in well under a second."""

# ruff: noqa: F401

from .image_tokens import CODES, tiny_anole, tiny_emu3, tiny_emu3_5, tiny_janus, tiny_lumina
from .masked import MASKED_MODELS, save_masked, tiny_dream, tiny_llada, tiny_sdar
from .media import tiny_clip, tiny_image, tiny_images
from .processors import VOCABULARY_SIZE, build_processor, tiny_tokenizer
from .text import (
    HYBRID_TEXT_MODELS,
    REFUSED_TEXT_MODELS,
    STEPPED_MODELS,
    TEXT_MODELS,
    tiny_gemma2,
    tiny_gemma4,
    tiny_gpt2,
    tiny_llama,
    tiny_lm,
    tiny_lm_v8,
    tiny_minimax,
    tiny_mistral_sliding,
    tiny_qwen2_mixed_sliding,
    tiny_qwen3_5,
)
from .vision_language import (
    HAS_VIDEO,
    VISION_LANGUAGE_FAMILIES,
    encode,
    save_family,
    tiny_llava,
    tiny_qwen2_5_vl,
    tiny_qwen2_vl,
    tiny_qwen3_5_vl,
    user_message,
)
from .weights import randomise, scale_head_to_entropy
