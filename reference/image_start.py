"""Initialisation of an image model from a trained one, whose condition may differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast, T5EncoderModel

from mmspec.models.image_parts import TEXT_ENCODER
from mmspec.models.llamagen import LlamaGenForCausalLM
from mmspec.scenes import COLOURS, SHAPES
from mmspec.training.record import donor
from reference.image_model import ImageLoss

__all__ = ["take_weights"]


def take_weights(
    learner: ImageLoss, folder: Path, tokenizer: PreTrainedTokenizerFast
) -> list[dict[str, Any]]:
    """Take over all weights that fit; returns the stages of the donor's training.

    A model of classes begins with what a model of captions sees of each class's name.

    Raises:
        CheckpointError: there is no trained model in the folder, or it has another shape.
    """
    with donor(folder, "a model that `python -m reference train image` wrote, of the same size") as stages:
        trained = LlamaGenForCausalLM.from_pretrained(folder, dtype=torch.float32)
        kept = trained.state_dict()
        conditions = trained.config.condition_type, learner.transformer.config.condition_type
        encoder = None
        if conditions[0] == "caption":
            encoder = T5EncoderModel.from_pretrained(folder / TEXT_ENCODER, dtype=torch.float32)
        if conditions[0] != conditions[1]:
            kept = {name: value for name, value in kept.items() if "cls_embedding" not in name}
        missing, surplus = learner.transformer.load_state_dict(kept, strict=False)
        if surplus or any("cls_embedding" not in name for name in missing):
            raise ValueError(f"keys that do not fit: {[*surplus, *missing][:3]}")
        if encoder is not None and learner.text_encoder is not None:
            learner.text_encoder.load_state_dict(encoder.state_dict())
            learner.null_embedding.data.copy_(kept["model.cls_embedding.uncond_embedding"])
        elif encoder is not None:
            table = learner.transformer.model.cls_embedding.embedding_table
            table.weight.data.copy_(_class_vectors(trained, encoder, tokenizer))
    return stages


@torch.no_grad()
def _class_vectors(
    donor: LlamaGenForCausalLM, encoder: T5EncoderModel, tokenizer: PreTrainedTokenizerFast
) -> Tensor:
    """[classes + 1, width] the mean slot of "a red circle" and so on, the last of no caption."""
    projection: Any = donor.model.cls_embedding.cap_proj
    names = [f"a {colour} {shape}" for colour in COLOURS for shape in SHAPES]
    words = tokenizer(names, add_special_tokens=False, return_tensors="pt")["input_ids"]
    features = encoder(input_ids=words).last_hidden_state
    null: Any = donor.model.cls_embedding.uncond_embedding
    return torch.cat([projection(features).mean(1), projection(null).mean(0, keepdim=True)])
