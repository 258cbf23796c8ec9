"""Tiny vision-language models of nine families with their real processors, as (model, processor).

    model, processor = VISION_LANGUAGE_FAMILIES["qwen2_5_vl"]()
    inputs = encode(processor, user_message("what is there ?", images=[tiny_image()]))
    tokens = model.generate(**inputs, do_sample=False, max_new_tokens=64)

Seeded, float32, vocabulary 128, in a few hundredths of a second, no network. The logits of the special tokens
and of the unused rows are 0, so greedy outputs are words alone, of exactly `max_new_tokens` tokens. The
default seeds are those of 24 whose outputs vary most and have no near-ties.

What holds for all, in transformers 5.17 and 5.23 (weights, inputs and greedy tokens are the same in both):
- Batches need `padding=True`, on the left (`encode` does it); rows then equal their batch-1 runs.
- Without an image or clip the media keys are absent, not None.
- SmolVLM cannot take an image and a clip in one prompt (both are `pixel_values`, one overwrites the other).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from PIL import Image
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    ProcessorMixin,
    Qwen2Config,
    SiglipVisionConfig,
)

from .processors import PINPOINTS, VOCABULARY_SIZE, WORDS, build_processor
from .text import DELTA_NET
from .weights import let_states_last, randomise

Family = tuple[PreTrainedModel, ProcessorMixin]
FIRST_WORD = 4  # <pad>, <s>, </s> and <unk> come first
TOWER: dict[str, Any] = dict(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    image_size=28,
    patch_size=14,
)
TILE = {**TOWER, "image_size": 32, "patch_size": 8}
TEXT: dict[str, Any] = dict(
    vocab_size=VOCABULARY_SIZE,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=1024,
    tie_word_embeddings=False,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
QWEN_TOWER: dict[str, Any] = dict(depth=2, hidden_size=32, num_heads=4)
QWEN3_TOWER = QWEN_TOWER | dict(
    intermediate_size=64, patch_size=16, out_hidden_size=32, num_position_embeddings=16
)


def _finish(name: str, config: PreTrainedConfig, processor: ProcessorMixin, seed: int) -> Family:
    """The model of a class with random weights of which only words may be the arg-max; its processor."""
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    silent = [i for i in range(VOCABULARY_SIZE) if not FIRST_WORD <= i < FIRST_WORD + len(WORDS)]
    return randomise(model, seed, silent_ids=silent), processor


def _llava(name: str, family: str, seed: int, **settings: Any) -> Family:
    """A model whose tower is CLIP's and whose text model is Llama's unless the settings name others."""
    processor = build_processor(family)
    parts = {
        "vision_config": CLIPVisionConfig(**TOWER, projection_dim=32),
        "text_config": LlamaConfig(**TEXT),
    }
    tokens = {"image_token_index": processor.image_token_id}
    if family in HAS_VIDEO:
        tokens["video_token_index"] = processor.video_token_id
    config = getattr(transformers, f"{name}Config")(**{**parts, **settings}, **tokens)
    return _finish(name, config, processor, seed)


def tiny_llava(seed: int = 5) -> Family:
    """LLaVA-1.5: CLIP without its class token, 4 visual tokens an image."""
    return _llava("Llava", "llava", seed, image_seq_length=4)


def tiny_llava_next(seed: int = 11) -> Family:
    """LLaVA-NeXT: base view and tiles with a newline per row, so the visual tokens depend on the shape."""
    return _llava("LlavaNext", "llava_next", seed, image_grid_pinpoints=PINPOINTS)


def tiny_llava_onevision(seed: int = 22) -> Family:
    """LLaVA-OneVision (SigLIP, Qwen2): tiles for one image, none for several, pooled frames for a clip."""
    parts = {
        "vision_config": SiglipVisionConfig(**TOWER, vision_use_head=False),
        "text_config": Qwen2Config(**TEXT),
    }
    return _llava("LlavaOnevision", "llava_onevision", seed, image_grid_pinpoints=PINPOINTS, **parts)


def tiny_video_llava(seed: int = 14) -> Family:
    """Video-LLaVA: two towers; 4 tokens an image, and 5 a frame of a clip (the class token is kept there)."""
    return _llava("VideoLlava", "video_llava", seed, image_seq_length=4, video_seq_length=20)


def _idefics(name: str, family: str, seed: int) -> Family:
    processor = build_processor(family)
    config = getattr(transformers, f"{name}Config")(
        vision_config=TILE,
        text_config=LlamaConfig(**TEXT),
        image_token_id=processor.image_token_id,
        pad_token_id=0,
    )
    return _finish(name, config, processor, seed)


def tiny_idefics3(seed: int = 9) -> Family:
    """Idefics3: tiles with row and column tokens and a global view, 4 visual tokens each."""
    return _idefics("Idefics3", "idefics3", seed)


def tiny_smolvlm(seed: int = 0) -> Family:
    """SmolVLM: as Idefics3; a clip is a series of untiled images with times in words."""
    return _idefics("SmolVLM", "smolvlm", seed)


def _qwen(
    name: str, family: str, seed: int, vision: dict[str, Any], text: dict[str, Any], **rope: Any
) -> Family:
    """A model with three-axis rotary positions, whose sections sum to half of the head width (8)."""
    processor = build_processor(family)
    convert = processor.tokenizer.convert_tokens_to_ids
    rotary = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2], **rope}
    config = getattr(transformers, f"{name}Config")(
        vision_config=vision,
        text_config={**TEXT, "rope_parameters": rotary, **text},
        tie_word_embeddings=False,
        image_token_id=processor.image_token_id,
        video_token_id=processor.video_token_id,
        vision_start_token_id=convert("<|vision_start|>"),
        vision_end_token_id=convert("<|vision_end|>"),
    )
    return _finish(name, config, processor, seed)


def tiny_qwen2_vl(seed: int = 14) -> Family:
    """Qwen2-VL: 4 to 9 visual tokens an image; `mm_token_type_ids` for text alone too."""
    vision = {**QWEN_TOWER, "embed_dim": 32, "mlp_ratio": 2, "patch_size": 14}
    return _qwen("Qwen2VL", "qwen2_vl", seed, vision, {})


def tiny_qwen2_5_vl(seed: int = 10) -> Family:
    """Qwen2.5-VL: window attention in the tower, time axis of a clip scaled by seconds."""
    windows = {"window_size": 56, "fullatt_block_indexes": [1]}
    vision = {**QWEN_TOWER, "intermediate_size": 64, "patch_size": 14, "out_hidden_size": 32, **windows}
    return _qwen("Qwen2_5_VL", "qwen2_5_vl", seed, vision, {})


def tiny_qwen3_vl(seed: int = 19) -> Family:
    """Qwen3-VL: interleaved M-RoPE, DeepStack (visual features enter after the first decoder layer too).

    A clip becomes one run of placeholders per pair of frames with its time in words before it. Without
    metadata it warns and takes 24 frames a second.
    """
    vision = {**QWEN3_TOWER, "deepstack_visual_indexes": [0]}
    return _qwen("Qwen3VL", "qwen3_vl", seed, vision, {"head_dim": 8}, mrope_interleaved=True)


def tiny_qwen3_5_vl(seed: int = 22) -> Family:
    """Qwen3.5 with images: interleaved M-RoPE; inputs as those of Qwen3-VL."""
    text, rope = (
        {**DELTA_NET, "num_hidden_layers": 4},
        {"mrope_interleaved": True, "partial_rotary_factor": 1.0},
    )
    model, processor = _qwen("Qwen3_5", "qwen3_vl", seed, QWEN3_TOWER, text, **rope)
    return let_states_last(model), processor


#: Every family by its transformers name; each call builds a fresh pair.
VISION_LANGUAGE_FAMILIES: dict[str, Callable[[], Family]] = {
    "llava": tiny_llava,
    "llava_next": tiny_llava_next,
    "llava_onevision": tiny_llava_onevision,
    "qwen2_vl": tiny_qwen2_vl,
    "qwen2_5_vl": tiny_qwen2_5_vl,
    "qwen3_vl": tiny_qwen3_vl,
    "smolvlm": tiny_smolvlm,
    "idefics3": tiny_idefics3,
    "video_llava": tiny_video_llava,
}

#: The families that take clips.
HAS_VIDEO = {"llava_onevision", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "smolvlm", "video_llava"}


def user_message(
    text: str, images: Sequence[Image.Image] = (), videos: Sequence[np.ndarray] = ()
) -> list[dict[str, Any]]:
    """One user turn as chat messages: images, then clips, then the text."""
    parts: list[dict[str, Any]] = [{"type": "image", "image": image} for image in images]
    parts += [{"type": "video", "video": video} for video in videos]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def encode(processor: ProcessorMixin, *messages: list[dict[str, Any]]) -> Any:
    """The model inputs of one or several conversations (padded on the left), as tensors."""
    padding = {"processor_kwargs": {"padding": True}} if len(messages) > 1 else {}
    return processor.apply_chat_template(
        list(messages) if len(messages) > 1 else messages[0],
        tokenize=True,
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
        **padding,
    )


def save_family(name: str, folder: str | Path) -> Path:
    """Write model and processor of a family as an ordinary checkpoint folder; return it."""
    model, processor = VISION_LANGUAGE_FAMILIES[name]()
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return Path(folder)
