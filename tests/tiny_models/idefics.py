"""The Idefics lineage: Idefics3 and SmolVLM, whose text model is called `text_model`."""

from __future__ import annotations

from transformers import (
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    LlamaConfig,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
)

from .common import TEXT, TILE, Family, finish
from .processors import build_processor

__all__ = ["tiny_idefics3", "tiny_smolvlm"]


def tiny_idefics3(seed: int = 9) -> Family:
    """Idefics3: tiles with row and column tokens and a global view, 4 visual tokens each.

    The processor returns `pixel_values` [rows, tiles, 3, 32, 32] (padded with zero tiles, which the model
    drops) and `pixel_attention_mask` [rows, tiles, 32, 32].
    """
    processor = build_processor("idefics3")
    config = Idefics3Config(
        vision_config=TILE,
        text_config=LlamaConfig(**TEXT),
        image_token_id=processor.image_token_id,
        pad_token_id=0,
    )
    return finish(Idefics3ForConditionalGeneration(config), processor, seed)


def tiny_smolvlm(seed: int = 0) -> Family:
    """SmolVLM: as Idefics3; a clip is a series of untiled images with times in words.

    Images and clips both come as `pixel_values`. Published processors set a frame count and a rate, with
    which `apply_chat_template` samples frames and so refuses an array without metadata: pass
    `processor_kwargs={"do_sample_frames": False}` there. This one leaves both out.
    """
    processor = build_processor("smolvlm")
    config = SmolVLMConfig(
        vision_config=TILE,
        text_config=LlamaConfig(**TEXT),
        image_token_id=processor.image_token_id,
        pad_token_id=0,
    )
    return finish(SmolVLMForConditionalGeneration(config), processor, seed)
