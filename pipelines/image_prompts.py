"""Image requests: one for each image, with its prompt, its negative prompt and its grid.

Each family encodes its prompts itself (`encode_prompt` of its target). Nothing here runs the target. The
encoders of captions and of control images (LlamaGen) run one row at a time, so that rows are never padded and
do not depend on each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from mmspec.core.image_grid import ImageGrid
from mmspec.core.interfaces import Request
from mmspec.errors import InputError
from mmspec.families.images import VectorTarget
from mmspec.media import DEFAULT_LIMITS, MediaLimits, load_images
from mmspec.open_types import AnyFunction
from mmspec.pipelines.prompts import check_text
from mmspec.targets.image_tokens import FORCED, ImageTokenTarget
from mmspec.validation import is_integer, require_number

__all__ = ["ImageTarget", "find_grid", "image_requests"]

#: Targets that generate images.
ImageTarget: TypeAlias = "ImageTokenTarget | VectorTarget"


def image_requests(
    target: ImageTarget,
    prompt: str | Sequence[str] | None = None,
    *,
    class_labels: int | None | Sequence[int | None] = None,
    negative_prompt: str | Sequence[str | None] | None = None,
    height: int | None = None,
    width: int | None = None,
    control_image: object = None,
    control_strength: float | None = None,
    limits: MediaLimits = DEFAULT_LIMITS,
    grid: ImageGrid | None = None,
    guided: bool = True,
    num_images_per_prompt: int = 1,
    tokenizer: PreTrainedTokenizerBase | None = None,
    text_encoder: object = None,
) -> list[Request]:
    """Make requests from the arguments of a call, `num_images_per_prompt` in sequence for each prompt.

    Args:
        target: the model that generates the images.
        prompt, class_labels, negative_prompt, height, width, control_image, control_strength: arguments of a
            call of `ImageGenerationPipeline`; None in a list of labels is the null class.
        limits: limits on control images.
        grid: grid of the images; None is the grid for `height` and `width`.
        guided: whether to make unconditional prompts, which a guidance scale other than 1 needs.
        num_images_per_prompt: number of images of each prompt.
        tokenizer: tokenizer of the text encoder, or of the model.
        text_encoder: T5 encoder of LlamaGen.

    Raises:
        InputError: the model takes other conditions, does not know a class or a size, or lacks a part; the
            message names the argument.
    """
    if grid is None:
        grid = find_grid(target, height, width)
    if prompt is not None and class_labels is not None:
        raise InputError("class_labels", class_labels, "cannot be combined with prompt")
    asked: list[tuple[str | int | None, str | None]]
    if target.classes is None:
        if prompt is None:
            raise InputError("prompt", None, "must be a text or a list of texts; this model needs a text")
        asked = list(read_texts(prompt, negative_prompt, tokenizer))
    else:
        for name, value in (("prompt", prompt), ("negative_prompt", negative_prompt)):
            if value is not None:
                rule = "must be None; pass class_labels, this model is conditioned on classes"
                raise InputError(name, value, rule)
        asked = [(label, None) for label in read_labels(class_labels, target.classes)]
    controls = read_control(target, control_image, control_strength, len(asked), grid, limits)
    layout = target.layout_of(grid)
    laid_out = {} if target.vector_size else {FORCED: torch.tensor([layout.forced], device="cpu")}
    requests = []
    encode: AnyFunction = target.encode_prompt  # its arguments depend on the kind of target
    for (one, negative), control in zip(asked, controls, strict=True):
        inputs, unconditional = encode(one, negative, grid, tokenizer, text_encoder)
        other = {**unconditional, **laid_out} if guided else None
        request = Request({**inputs, **laid_out, **control}, None, other, layout)
        requests += [request] * num_images_per_prompt
    return requests


def read_control(
    target: Any,
    control_image: object,
    strength: float | None,
    prompts: int,
    grid: ImageGrid,
    limits: MediaLimits,
) -> list[dict[str, Tensor]]:
    """Read and encode the control images of prompts; return the control inputs of each prompt.

    Raises:
        InputError: the model takes no control image, or the image is missing or has another size.
    """
    factor = 1.0 if strength is None else strength
    require_number("control_strength", factor, 0, 100, "must be between 0 (no control) and 100")
    if not target.is_controlled:
        for name, value in (("control_image", control_image), ("control_strength", strength or None)):
            if value is not None:
                raise InputError(name, value, "must be None; this model takes no control image")
        return [{}] * prompts
    height, width = grid.rows * target.stride, grid.columns * target.stride
    size = f"{height} pixels high and {width} wide"
    if control_image is None:
        if factor:
            rule = f"must be an image, {size}; or pass control_strength=0"
            raise InputError("control_image", None, rule)
        return [target.no_control()] * prompts
    images = load_images(control_image, argument="control_image", limits=limits)
    if len(images) not in (1, prompts):
        raise InputError(
            "control_image",
            f"{len(images)} images",
            f"must be one image, or one for each of {prompts} prompts",
        )
    for image in images:
        if (image.height, image.width) != (height, width):
            got = f"{image.height} pixels high and {image.width} wide"
            raise InputError("control_image", got, f"must be {size}, like the generated image")
    pixels = [
        torch.from_numpy(np.array(image)).permute(2, 0, 1)[None].float() / 127.5 - 1 for image in images
    ]
    encoded = [target.encode_control(each, factor) for each in pixels]
    return encoded if len(encoded) == prompts else encoded * prompts


def find_grid(target: Any, height: int | None, width: int | None) -> ImageGrid:
    """Return the grid for a height and a width; None is the model's default."""
    for name, value in (("height", height), ("width", width)):
        if value is not None and (not is_integer(value) or value < 1):
            raise InputError(name, value, "must be a positive number of pixels")
    found: ImageGrid = target.grid
    if height is not None or width is not None:
        own_height, own_width = target.image_size
        found = target.grid_for(
            own_height if height is None else height, own_width if width is None else width
        )
    return found


def read_labels(class_labels: Any, classes: int) -> list[int | None]:
    """Read class labels; raise InputError if there are none or the model does not know one."""
    labels = list(class_labels) if isinstance(class_labels, list | tuple) else [class_labels]
    if not labels or class_labels is None:
        rule = f"must be an integer from 0 to {classes - 1}, or a list of them"
        raise InputError("class_labels", class_labels, rule)
    for index, label in enumerate(labels):
        if label is not None and (not is_integer(label) or not 0 <= label < classes):
            rule = f"must be an integer from 0 to {classes - 1}, or None for no class"
            raise InputError(f"class_labels[{index}]", label, rule)
    return labels


def read_texts(
    prompt: object, negative_prompt: object, tokenizer: PreTrainedTokenizerBase | None
) -> list[tuple[str, str | None]]:
    """Read prompts, each with its negative prompt or None; raise InputError for unusable texts."""
    if tokenizer is None:
        raise InputError("tokenizer", None, "must be the tokenizer of the prompts")
    is_batch = isinstance(prompt, list | tuple)
    texts: list[Any] = list(prompt) if isinstance(prompt, list | tuple) else [prompt]
    if not texts:
        raise InputError("prompt", prompt, "must have at least one text")
    is_list = isinstance(negative_prompt, list | tuple)
    negatives: Any = negative_prompt if is_list else [negative_prompt] * len(texts)
    if len(negatives) != len(texts):
        rule = f"must be one text, or a list with one text or None for each of the {len(texts)} prompts"
        raise InputError("negative_prompt", negative_prompt, rule)
    for name, values in (("prompt", texts), ("negative_prompt", negatives)):
        for index, value in enumerate(values):
            if name == "prompt" or value is not None:
                where = f"{name}[{index}]" if is_batch else name
                check_text(value, where, tokenizer)
    # as in diffusers, an empty negative prompt means none
    return [(text, negative or None) for text, negative in zip(texts, negatives, strict=True)]
