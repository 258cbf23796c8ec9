"""The Qwen-VL lineage: three-axis rotary positions (M-RoPE)."""

from __future__ import annotations

from typing import Any

from transformers import (
    ProcessorMixin,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from .common import TEXT, Family, finish
from .processors import build_processor
from .text import DELTA_NET
from .weights import let_states_last

__all__ = ["tiny_qwen2_vl", "tiny_qwen2_5_vl", "tiny_qwen3_vl", "tiny_qwen3_5_vl"]


def _qwen_ids(processor: ProcessorMixin) -> dict[str, int]:
    """The placeholder ids that a Qwen-VL configuration names."""
    convert = processor.tokenizer.convert_tokens_to_ids
    return {
        "image_token_id": processor.image_token_id,
        "video_token_id": processor.video_token_id,
        "vision_start_token_id": convert("<|vision_start|>"),
        "vision_end_token_id": convert("<|vision_end|>"),
    }


def _mrope(**more: Any) -> dict[str, Any]:
    """Text settings with three-axis rotary positions; the sections sum to half of the head width (8)."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2], **more}
    return {**TEXT, "rope_parameters": rope}


def tiny_qwen2_vl(seed: int = 14) -> Family:
    """Qwen2-VL: M-RoPE; 4 to 9 visual tokens an image.

    The processor returns `mm_token_type_ids` (0 text, 1 image, 2 video) for text alone too; `pixel_values`
    [patches, 1176] of all images in one row and `image_grid_thw` [images, 3]; for a clip
    `pixel_values_videos` and `video_grid_thw`.
    """
    processor = build_processor("qwen2_vl")
    vision = dict(depth=2, embed_dim=32, hidden_size=32, num_heads=4, mlp_ratio=2, patch_size=14)
    config = Qwen2VLConfig(
        vision_config=vision, text_config=_mrope(), tie_word_embeddings=False, **_qwen_ids(processor)
    )
    return finish(Qwen2VLForConditionalGeneration(config), processor, seed)


def tiny_qwen2_5_vl(seed: int = 10) -> Family:
    """Qwen2.5-VL: M-RoPE, window attention in the tower, time axis of a clip scaled by seconds.

    As Qwen2-VL, and for a clip `second_per_grid_ts` [clips].
    """
    processor = build_processor("qwen2_5_vl")
    vision = dict(
        depth=2,
        hidden_size=32,
        intermediate_size=64,
        num_heads=4,
        patch_size=14,
        window_size=56,
        out_hidden_size=32,
        fullatt_block_indexes=[1],
    )
    config = Qwen2_5_VLConfig(
        vision_config=vision, text_config=_mrope(), tie_word_embeddings=False, **_qwen_ids(processor)
    )
    return finish(Qwen2_5_VLForConditionalGeneration(config), processor, seed)


def tiny_qwen3_vl(seed: int = 19) -> Family:
    """Qwen3-VL: interleaved M-RoPE, DeepStack (visual features enter after the first decoder layer too).

    As Qwen2-VL; a clip becomes one run of placeholders per pair of frames with its time in words before it,
    so one clip has several runs of `mm_token_type_ids == 2`. Without metadata it warns and takes 24 frames a
    second.
    """
    processor = build_processor("qwen3_vl")
    vision = dict(
        depth=2,
        hidden_size=32,
        intermediate_size=64,
        num_heads=4,
        patch_size=16,
        out_hidden_size=32,
        num_position_embeddings=16,
        deepstack_visual_indexes=[0],
    )
    text = {**_mrope(mrope_interleaved=True), "head_dim": 8}
    config = Qwen3VLConfig(
        vision_config=vision, text_config=text, tie_word_embeddings=False, **_qwen_ids(processor)
    )
    return finish(Qwen3VLForConditionalGeneration(config), processor, seed)


def tiny_qwen3_5_vl(seed: int = 22) -> Family:
    """Qwen3.5 with images: interleaved M-RoPE; inputs as those of Qwen3-VL."""
    processor = build_processor("qwen3_vl")
    vision = dict(
        depth=2,
        hidden_size=32,
        intermediate_size=64,
        num_heads=4,
        patch_size=16,
        out_hidden_size=32,
        num_position_embeddings=16,
    )
    text = {**_mrope(mrope_interleaved=True, partial_rotary_factor=1.0), **DELTA_NET, "num_hidden_layers": 4}
    config = Qwen3_5Config(
        vision_config=vision, text_config=text, tie_word_embeddings=False, **_qwen_ids(processor)
    )
    model, processor = finish(Qwen3_5ForConditionalGeneration(config), processor, seed)
    return let_states_last(model), processor
