"""The LLaVA lineage: LLaVA-1.5, LLaVA-NeXT, LLaVA-OneVision and Video-LLaVA."""

from __future__ import annotations

from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    Qwen2Config,
    SiglipVisionConfig,
    VideoLlavaConfig,
    VideoLlavaForConditionalGeneration,
)

from .common import CLIP, TEXT, Family, finish
from .processors import PINPOINTS, build_processor

__all__ = ["tiny_llava", "tiny_llava_next", "tiny_llava_onevision", "tiny_video_llava"]


def tiny_llava(seed: int = 5) -> Family:
    """LLaVA-1.5: CLIP without its class token, 4 visual tokens an image, 1-D positions.

    The processor returns `pixel_values` [images, 3, 28, 28], all images of a batch in one stack.
    """
    processor = build_processor("llava")
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**CLIP),
        text_config=LlamaConfig(**TEXT),
        image_token_index=processor.image_token_id,
        image_seq_length=4,
    )
    return finish(LlavaForConditionalGeneration(config), processor, seed)


def tiny_llava_next(seed: int = 11) -> Family:
    """LLaVA-NeXT: base view and tiles with a newline per row, so the visual tokens depend on the shape.

    The processor returns `pixel_values` [images, tiles + 1, 3, 28, 28] (padded with zeros to the image
    with the most tiles) and `image_sizes` [images, 2] (height, width).
    """
    processor = build_processor("llava_next")
    config = LlavaNextConfig(
        vision_config=CLIPVisionConfig(**CLIP),
        text_config=LlamaConfig(**TEXT),
        image_token_index=processor.image_token_id,
        image_grid_pinpoints=PINPOINTS,
    )
    return finish(LlavaNextForConditionalGeneration(config), processor, seed)


def tiny_llava_onevision(seed: int = 22) -> Family:
    """LLaVA-OneVision (SigLIP, Qwen2): tiles for one image, none for several, pooled frames for a clip.

    The processor returns `pixel_values`, `image_sizes` and `batch_num_images` [rows], the number of images
    of each row, which decides whether an image is tiled; for a clip `pixel_values_videos` [clips, frames, 3,
    28, 28].
    """
    processor = build_processor("llava_onevision")
    vision = {key: value for key, value in CLIP.items() if key != "projection_dim"}
    config = LlavaOnevisionConfig(
        vision_config=SiglipVisionConfig(**vision, vision_use_head=False),
        text_config=Qwen2Config(**TEXT),
        image_token_index=processor.image_token_id,
        video_token_index=processor.video_token_id,
        image_grid_pinpoints=PINPOINTS,
    )
    return finish(LlavaOnevisionForConditionalGeneration(config), processor, seed)


def tiny_video_llava(seed: int = 14) -> Family:
    """Video-LLaVA: two towers; 4 tokens an image, and 5 a frame of a clip (the class token is kept there).

    The processor returns `pixel_values_images` (5.23 warns that the name will become `pixel_values`) and
    `pixel_values_videos` [clips, frames, 3, 28, 28].
    """
    processor = build_processor("video_llava")
    config = VideoLlavaConfig(
        vision_config=CLIPVisionConfig(**CLIP),
        text_config=LlamaConfig(**TEXT),
        image_token_index=processor.image_token_id,
        video_token_index=processor.video_token_id,
        image_seq_length=4,
        video_seq_length=20,
    )
    return finish(VideoLlavaForConditionalGeneration(config), processor, seed)
