"""Tiny models, processors and media for tests: seeded, offline, built in well under a second."""

from .idefics import tiny_idefics3, tiny_smolvlm
from .image_tokens import CODES, tiny_anole, tiny_emu3, tiny_janus, tiny_lumina
from .llava import tiny_llava, tiny_llava_next, tiny_llava_onevision, tiny_video_llava
from .media import tiny_clip, tiny_image, tiny_images
from .processors import VOCABULARY_SIZE, build_processor, tiny_tokenizer
from .qwen_vl import tiny_qwen2_5_vl, tiny_qwen2_vl, tiny_qwen3_5_vl, tiny_qwen3_vl
from .text import (
    HYBRID_TEXT_MODELS,
    REFUSED_TEXT_MODELS,
    STEPPED_MODELS,
    TEXT_MODELS,
    tiny_gemma2,
    tiny_gemma3n,
    tiny_gemma4,
    tiny_gpt2,
    tiny_lfm2,
    tiny_llama,
    tiny_lm,
    tiny_lm_v8,
    tiny_mamba,
    tiny_mistral_sliding,
    tiny_olmo_hybrid,
    tiny_qwen2_mixed_sliding,
    tiny_qwen3_5,
    tiny_qwen3_next,
)
from .vision_language import HAS_VIDEO, VISION_LANGUAGE_FAMILIES, encode, save_family, user_message
from .weights import randomise, scale_head_to_entropy

__all__ = [
    "CODES",
    "HAS_VIDEO",
    "HYBRID_TEXT_MODELS",
    "REFUSED_TEXT_MODELS",
    "STEPPED_MODELS",
    "TEXT_MODELS",
    "VISION_LANGUAGE_FAMILIES",
    "VOCABULARY_SIZE",
    "build_processor",
    "encode",
    "randomise",
    "save_family",
    "scale_head_to_entropy",
    "tiny_anole",
    "tiny_clip",
    "tiny_emu3",
    "tiny_gemma2",
    "tiny_gemma3n",
    "tiny_gemma4",
    "tiny_gpt2",
    "tiny_idefics3",
    "tiny_janus",
    "tiny_lfm2",
    "tiny_llama",
    "tiny_llava",
    "tiny_llava_next",
    "tiny_llava_onevision",
    "tiny_lm",
    "tiny_lm_v8",
    "tiny_lumina",
    "tiny_mamba",
    "tiny_mistral_sliding",
    "tiny_image",
    "tiny_images",
    "tiny_olmo_hybrid",
    "tiny_qwen2_5_vl",
    "tiny_qwen2_mixed_sliding",
    "tiny_qwen2_vl",
    "tiny_qwen3_5",
    "tiny_qwen3_5_vl",
    "tiny_qwen3_next",
    "tiny_qwen3_vl",
    "tiny_smolvlm",
    "tiny_tokenizer",
    "tiny_video_llava",
    "user_message",
]
