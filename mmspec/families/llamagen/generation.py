"""Image generation of LlamaGen with `generate` of transformers, as a baseline of measurements."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

from mmspec.core.interfaces import Request
from mmspec.families.llamagen.target import LlamaGenTarget
from mmspec.open_types import Keywords


class GuidedHalves(LogitsProcessor):
    """Classifier-free guidance u + s (c - u) of two halves of a batch, with and without the prompt."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Combine the two halves of the scores [2B, V]."""
        conditional, unconditional = scores.chunk(2)
        return (unconditional + self.scale * (conditional - unconditional)).repeat(2, 1)


def generate_keywords(
    target: LlamaGenTarget, request: Request, scale: float
) -> tuple[PreTrainedModel, int, Keywords]:
    """Return the keywords of `generate` for an image; guidance uses two rows of a batch; see `Family`."""
    halves = (
        [request.inputs] if request.negative_inputs is None else [request.inputs, request.negative_inputs]
    )
    names = {"input_ids", "caption_features"} & {*request.inputs}
    inputs = {name: torch.cat([half[name] for half in halves]).to(target.device) for name in names}
    guidance = LogitsProcessorList([GuidedHalves(scale)] if len(halves) == 2 else [])
    return (
        target.model,
        inputs["input_ids"].shape[1],
        {
            **inputs,
            "guidance_scale": 1.0,  # generate's own guidance needs a second forward pass for every token
            "logits_processor": guidance,
            "max_new_tokens": (request.layout or target.grid).length,
        },
    )
