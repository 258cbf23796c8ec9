"""Prompts of NextStep-1: a caption, the size of the image, and the token that begins it."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from mmspec.errors import CheckpointError, InputError
from mmspec.models.nextstep.configuration import NextStepConfig

__all__ = ["SPECIAL_TOKENS", "prompt_ids"]

IMAGE_AREA, BEGIN_OF_IMAGE = "<|image_area|>", "<|begin_of_image|>"
#: What was added to the tokenizer (`stepfun-ai/NextStep-1, nextstep/models/tokenization_nextstep.py`).
SPECIAL_TOKENS = (
    IMAGE_AREA,
    BEGIN_OF_IMAGE,
    "<|end_of_image|>",
    "<|image_placeholder|>",
    "<|begin_of_prompt_refinement|>",
    "<|end_of_prompt_refinement|>",
    "<|begin_of_thinking|>",
    "<|end_of_thinking|>",
)


def prompt_ids(
    tokenizer: PreTrainedTokenizerBase, config: NextStepConfig, caption: str, rows: int, columns: int
) -> Tensor:
    """The prompt of one image: caption, then its size in words, then the token that begins it.

    Guidance takes a second prompt, of a negative caption, which is empty where nothing is to be avoided
    (`stepfun-ai/NextStep-1, nextstep/models/pipeline_nextstep.py`).

    Args:
        tokenizer: of the checkpoint.
        config: of the model.
        caption: may be empty.
        rows, columns: image tokens.

    Returns:
        [1, L] token ids.

    Raises:
        InputError: the image has no tokens.
        CheckpointError: the tokenizer lacks the tokens around images.
    """
    if min(rows, columns) < 1:
        raise InputError("rows, columns", (rows, columns), "at least 1")
    known = tokenizer.get_vocab()
    begin = config.boi if config.boi is not None else known.get(BEGIN_OF_IMAGE)
    if IMAGE_AREA not in known or begin is None:
        raise CheckpointError("tokenizer", type(tokenizer).__name__, f"one that knows {IMAGE_AREA}")
    words = tokenizer(caption).input_ids
    area = tokenizer(f"{IMAGE_AREA}{rows}*{columns}", add_special_tokens=False).input_ids
    return torch.tensor([[*words, *area, begin]])
