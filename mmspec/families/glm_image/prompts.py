"""Loading of GLM-Image from diffusers' layout, and prompts as in its `GlmImagePipeline`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from transformers import AutoProcessor, GlmImageForConditionalGeneration

from mmspec.core.interfaces import Request
from mmspec.core.sampling import Sampler
from mmspec.errors import CheckpointError
from mmspec.families.glm_image.target import GlmImageTarget
from mmspec.families.image_parts import ModelSource
from mmspec.models.checkpoint import load_model
from mmspec.open_types import Keywords, Processor

SIZE = 1024


def load_glm_image(found: ModelSource) -> Keywords:
    """Load a model, and the processor in the folder beside it; see `Family`.

    Raises:
        CheckpointError: one of them cannot be read.
    """
    beside = Path(found.source).parent / "processor"
    try:
        processor = AutoProcessor.from_pretrained(beside if beside.is_dir() else found.source)
    except (OSError, ValueError) as error:
        rule = f"needs a processor in a folder beside it ({error})"[:300]
        raise CheckpointError("target", found.source, rule) from error
    kind: Keywords = {"argument": "target", "model_class": GlmImageForConditionalGeneration}
    return {"processor": processor, "model": load_model(found.source, found.config, **kind, **found.how)}


def image_prompts(
    target: GlmImageTarget, processor: Processor, texts: Sequence[str], height: int | None, width: int | None
) -> tuple[list[Request], Sampler, int]:
    """Return text-to-image requests, their sampler, and the tokens of each; see `Family`."""
    size = {"target_h": height or SIZE, "target_w": width or SIZE}
    requests = []
    for text in texts:
        messages = [{"role": "user", "content": [{"type": "text", "text": text}]}]
        inputs = processor.apply_chat_template(
            [messages], tokenize=True, **size, return_dict=True, return_tensors="pt"
        )
        requests.append(Request(dict(inputs)))
    config = target.model.generation_config
    sampler = Sampler(config.temperature or 1.0, top_k=config.top_k, top_p=config.top_p)
    tokens = target.layout_for(requests[0].inputs).length  # of preview and image; an end token follows
    return requests, sampler, tokens + 1
