"""Image generation of LlamaGen with `generate` of transformers, as a baseline of measurements."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

from mmspec.core.interfaces import Request
from mmspec.families.llamagen.target import LlamaGenTarget
from mmspec.open_types import Keywords
from mmspec.targets.causal import to_device


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
    """Return the keywords of `generate` for an image; guidance uses two rows of a batch; see `Family`.

    Captions are padded on the left to all slots, since `generate` counts positions from the first slot on.
    """
    given = [request.inputs] if request.negative_inputs is None else [request.inputs, request.negative_inputs]
    ids = torch.cat([half["input_ids"] for half in given])
    inputs: Keywords = {"input_ids": ids}
    if "caption_features" in request.inputs:
        missing = target.config.prefix_length - ids.shape[1]
        features = torch.cat([half["caption_features"] for half in given])
        inputs = {
            "input_ids": pad(ids, (missing, 0), value=target.vocabulary),
            "attention_mask": pad(torch.ones_like(ids), (missing, 0)),
            "caption_features": pad(features, (0, 0, missing, 0)),
        }
    guidance = LogitsProcessorList([GuidedHalves(scale)] if len(given) == 2 else [])
    return (
        target.model,
        inputs["input_ids"].shape[1],
        {
            **to_device(inputs, target.device),
            "guidance_scale": 1.0,  # generate's own guidance needs a second forward pass for every token
            "logits_processor": guidance,
            "max_new_tokens": (request.layout or target.grid).length,
        },
    )
