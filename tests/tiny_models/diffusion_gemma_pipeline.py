"""A tiny `DiffusionGemmaPipeline` of diffusers, with the processor of its family."""

from __future__ import annotations

from typing import Any

import diffusers

from mmspec.transformers_versions import CACHE, takes_cache

from .diffusion_gemma import HAS_DIFFUSION_GEMMA, tiny_diffusion_gemma
from .processors import Special, tiny_tokenizer

HAS_CANVAS_PIPELINE = HAS_DIFFUSION_GEMMA and hasattr(diffusers, "DiffusionGemmaPipeline")
SPECIAL = Special("<image>", more=("<boi>", "<eoi>"))
VOCABULARY = 106


def tiny_canvas_parts(canvas_length: int = 6) -> tuple[Any, Any]:
    """A tiny model, and its processor."""
    from transformers.models import gemma4

    names = ("boi", "eoi", "boa", "eoa", "audio")  # the processor asks for those of sounds as well
    tokenizer = tiny_tokenizer(SPECIAL, **{f"{name}_token": f"<{name}>" for name in names})
    processor = gemma4.Gemma4Processor(
        gemma4.Gemma4AudioFeatureExtractor(),
        gemma4.Gemma4ImageProcessor(patch_size=16, pooling_kernel_size=3, max_soft_tokens=70),
        tokenizer,
        gemma4.Gemma4VideoProcessor(),
        chat_template=SPECIAL.chat_template,
    )
    model = tiny_diffusion_gemma(canvas_length, vocab=VOCABULARY)
    for name, token in (("image", "<image>"), ("boi", "<boi>"), ("eoi", "<eoi>")):
        setattr(model.config, f"{name}_token_id", tokenizer.convert_tokens_to_ids(token))
    return model, processor


def tiny_canvas_pipeline(canvas_length: int = 6, **settings: Any) -> Any:
    """The pipeline of a tiny model; settings are those of its `EntropyBoundScheduler`."""
    model, processor = tiny_canvas_parts(canvas_length)
    decoder: Any = model.model.decoder
    if CACHE == "cache":  # diffusers 0.42 calls it by its former name, which only the forwards still take
        decoder.create_diffusion_decoder_attention_mask = takes_cache(
            decoder.create_diffusion_decoder_attention_mask
        )
    scheduler = diffusers.EntropyBoundScheduler(**settings)
    pipe = diffusers.DiffusionGemmaPipeline(model=model, scheduler=scheduler, processor=processor)
    pipe.set_progress_bar_config(disable=True)
    return pipe
