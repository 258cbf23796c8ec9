"""Prompts of image generation: what comes before the first image token, as arguments of the model.

A condition is part of `input_ids`, so a prompt has a length like any other: ids from `vocab_size` on are
condition slots. Under classifier-free guidance the null prompts are the negative ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mmspec.errors import InputError
from mmspec.models.llamagen.configuration import LlamaGenConfig
from mmspec.validation import is_integer

if TYPE_CHECKING:
    from mmspec.models.llamagen.modeling import LlamaGenForCausalLM

__all__ = ["caption_prompt", "class_prompt", "null_caption_prompt"]


def class_prompt(config: LlamaGenConfig, labels: Sequence[int | None]) -> dict[str, Tensor]:
    """Prompts of class labels; None is the null class.

    Returns:
        `input_ids` [B, 1]: `vocab_size` plus the label.

    Raises:
        InputError: the model is conditioned on captions, or there is no such label.
    """
    if config.condition_type != "class":
        raise InputError("class_labels", list(labels), "nothing: this checkpoint is conditioned on captions")
    ids = []
    for index, label in enumerate(labels):
        if label is None:
            label = config.num_classes
        elif not is_integer(label) or not 0 <= label < config.num_classes:
            allowed = f"an integer from 0 to {config.num_classes - 1}, or None for no class"
            raise InputError(f"class_labels[{index}]", label, allowed)
        ids.append([config.vocab_size + label])
    return {"input_ids": torch.tensor(ids, dtype=torch.long).reshape(-1, 1)}


def caption_prompt(config: LlamaGenConfig, features: Tensor) -> dict[str, Tensor]:
    """Prompts of text features.

    Args:
        config: of a model that is conditioned on captions.
        features: [B, n, caption_dim] of n text tokens, padding left out or masked by the caller (on the
            left, with a 2-D `attention_mask` of all slots and image tokens).

    Returns:
        `input_ids` [B, n], all `vocab_size`, and `caption_features`. With fewer than `caption_length`
        slots the image still begins at position `caption_length`: count positions from the image back.

    Raises:
        InputError: the model is conditioned on classes, or the features do not fit it.
    """
    if config.condition_type != "caption":
        raise InputError("caption_features", features, "nothing: this checkpoint is conditioned on classes")
    allowed = f"[B, 1 to {config.caption_length}, {config.caption_dim}] features"
    if features.dim() != 3 or features.shape[2] != config.caption_dim:
        raise InputError("caption_features", features, allowed)
    if not 1 <= features.shape[1] <= config.caption_length:
        raise InputError("caption_features", features, allowed)
    ids = torch.full(features.shape[:2], config.vocab_size, dtype=torch.long, device=features.device)
    return {"input_ids": ids, "caption_features": features}


def null_caption_prompt(
    model: LlamaGenForCausalLM, num_text_tokens: int | None = None, batch: int = 1
) -> dict[str, Tensor]:
    """The learned features of no caption.

    Args:
        model: holds them, in the buffer `uncond_embedding` [caption_length, caption_dim].
        num_text_tokens: length of the prompt that it is the negative of. The official sampler masks both
            halves alike, so that only the last rows are seen; None takes all of them.
        batch: rows.
    """
    features = getattr(model.model.cls_embedding, "uncond_embedding", None)
    if features is None:
        raise InputError("model", type(model).__name__, "one that is conditioned on captions")
    count = features.shape[0] if num_text_tokens is None else num_text_tokens
    if not 1 <= count <= features.shape[0]:
        raise InputError("num_text_tokens", count, f"an integer from 1 to {features.shape[0]}")
    return caption_prompt(model.config, features[-count:].expand(batch, -1, -1))
