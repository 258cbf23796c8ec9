"""Requests of images of continuous tokens: prompts of NextStep-1, class labels of MAR."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from mmspec.decoding.image_grid import ImageGrid
from mmspec.decoding.interfaces import Request
from mmspec.errors import InputError
from mmspec.models.mar import MARConfig
from mmspec.models.nextstep import NextStepConfig, prompt_ids
from mmspec.pipelines.image_prompts import read_texts
from mmspec.validation import is_integer

__all__ = ["continuous_requests"]


def continuous_requests(
    model: Any,
    prompt: Any = None,
    *,
    grid: ImageGrid,
    class_labels: Any = None,
    negative_prompt: Any = None,
    guided: bool = True,
    num_images_per_prompt: int = 1,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> list[Request]:
    """Make requests of what users pass, `num_images_per_prompt` in a row for each prompt.

    Args:
        model: a NextStep or a MAR.
        prompt: one text or several, for a NextStep.
        grid: of the images.
        class_labels: one label or several, for a MAR; None in a list is the null class.
        negative_prompt: what guidance leads away from, one for all or one (or None) per prompt; None is no
            prompt.
        guided: whether to make unconditional prompts.
        num_images_per_prompt: images of each prompt.
        tokenizer: of the prompts.

    Raises:
        InputError: the model is conditioned on something else, does not know a class, or cannot read a prompt
            so long.
    """
    if isinstance(model.config, MARConfig):
        if prompt is not None:
            allowed = "None, and class_labels: this model is conditioned on classes"
            raise InputError("prompt", prompt, allowed)
        if negative_prompt is not None:
            raise InputError("negative_prompt", negative_prompt, "None: this model is conditioned on classes")
        null = model.config.num_classes
        labels = read_labels(class_labels, null)
        pairs = [(torch.tensor([[label]]), torch.tensor([[null]])) for label in labels]
    else:
        if class_labels is not None:
            raise InputError("class_labels", class_labels, "None: this model is conditioned on text")
        if prompt is None or tokenizer is None:
            raise InputError("prompt", None, "a text, or several: this model is conditioned on text")
        texts = read_texts(prompt, negative_prompt, tokenizer)
        pairs = [
            (
                _encode(tokenizer, model.config, text, grid),
                _encode(tokenizer, model.config, negative or "", grid),
            )
            for text, negative in texts
        ]
    requests = [
        Request({"input_ids": ids}, negative_inputs={"input_ids": negative} if guided else None, grid=grid)
        for ids, negative in pairs
    ]
    return [request for request in requests for _ in range(num_images_per_prompt)]


def read_labels(class_labels: Any, classes: int) -> list[int]:
    """Labels of images, `classes` for the null class.

    Raises:
        InputError: there is none, or one that the model does not know.
    """
    labels = list(class_labels) if isinstance(class_labels, list | tuple) else [class_labels]
    allowed = f"an integer from 0 to {classes - 1}, or a list of them"
    if not labels or class_labels is None:
        raise InputError("class_labels", class_labels, allowed)
    for label in labels:
        if label is not None and (not is_integer(label) or not 0 <= label < classes):
            raise InputError("class_labels", class_labels, allowed)
    return [classes if label is None else label for label in labels]


def _encode(
    tokenizer: PreTrainedTokenizerBase, config: NextStepConfig, text: str, grid: ImageGrid
) -> torch.Tensor:
    """[1, L] ids of a prompt.

    Raises:
        InputError: prompt and image together are longer than the model's positions.
    """
    ids = prompt_ids(tokenizer, config, text, grid.rows, grid.columns)
    room = config.max_position_embeddings - grid.cells
    if ids.shape[1] > room:
        raise InputError(
            "prompt", f"{ids.shape[1]} tokens", f"at most {room} beside {grid.cells} of the image"
        )
    return ids
