"""Requests of images: one for each image, with its prompt, its negative prompt and its grid.

Nothing here runs the target; the text encoder of LlamaGen is run, one caption at a time, so that rows are
never padded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from mmspec.decoding.image_grid import ImageGrid
from mmspec.decoding.interfaces import Request
from mmspec.errors import InputError
from mmspec.models.llamagen import LlamaGenConfig, caption_prompt, class_prompt, null_caption_prompt
from mmspec.models.mar import MARConfig
from mmspec.models.nextstep import NextStepConfig, prompt_ids
from mmspec.pipelines.prompts import check_special_tokens, check_text
from mmspec.targets import chameleon, emu3
from mmspec.targets.chameleon import AnoleTarget, LuminaTarget
from mmspec.targets.emu3 import Emu3Target
from mmspec.targets.emu3_5 import Emu3p5Target
from mmspec.targets.image_tokens import CELLS, ImageTokenTarget
from mmspec.targets.janus import JanusTarget
from mmspec.targets.llamagen import LlamaGenTarget
from mmspec.validation import is_integer

__all__ = ["continuous_requests", "encode_caption", "image_requests"]

logger = logging.getLogger(__name__)
Inputs = dict[str, Tensor]
Pair = tuple[Inputs, Inputs]
IdPair = tuple[list[int], list[int]]
JANUS_BEGIN_OF_IMAGE = "<begin_of_image>"
EMU3_5_TURN = ("<|extra_203|>", "<|extra_100|>")  # the begin of a prompt, and of its answer
LUMINA_REQUEST = "Generate an image of {width}x{height} according to the following prompt:\n{text}"
EMU3_NEGATIVE = (
    "lowres, bad anatomy, bad hands, text, error, missing fingers, extra digit, fewer digits, cropped, worst "
    "quality, low quality, normal quality, jpeg artifacts, signature, watermark, username, blurry."
)


def image_requests(
    target: ImageTokenTarget,
    prompt: str | Sequence[str] | None = None,
    *,
    class_labels: int | None | Sequence[int | None] = None,
    negative_prompt: str | Sequence[str | None] | None = None,
    height: int | None = None,
    width: int | None = None,
    guided: bool = True,
    num_images_per_prompt: int = 1,
    tokenizer: PreTrainedTokenizerBase | None = None,
    text_encoder: Any = None,
) -> list[Request]:
    """Make requests of what users pass, `num_images_per_prompt` in a row for each prompt.

    Args:
        target: the model that will draw.
        prompt: one text or several, for models that are conditioned on text.
        class_labels: one label or several, for those that are conditioned on classes.
        negative_prompt: what guidance leads away from, one for all or one (or None) per prompt; None takes
            the family's own unconditional prompt.
        height, width: pixels; None is the size that the model was made for.
        guided: whether to make unconditional prompts, which a guidance scale other than 1 needs.
        num_images_per_prompt: images of each prompt.
        tokenizer: of the text encoder, or of the model that reads text itself.
        text_encoder: of LlamaGen: a T5 encoder.

    Raises:
        InputError: the model is conditioned on something else, does not know a class or a size, or a part is
            missing; the message names the argument.
    """
    if isinstance(num_images_per_prompt, bool) or not isinstance(num_images_per_prompt, int):
        raise InputError("num_images_per_prompt", num_images_per_prompt, "an integer, at least 1")
    if num_images_per_prompt < 1:
        raise InputError("num_images_per_prompt", num_images_per_prompt, "at least 1")
    grid = find_grid(target, height, width)
    if prompt is None:
        pairs = class_pairs(target, class_labels, negative_prompt)
    else:
        if class_labels is not None:
            raise InputError("class_labels", class_labels, "either a prompt or class labels, not both")
        pairs = text_pairs(target, prompt, negative_prompt, grid, tokenizer, text_encoder)
    cells = torch.tensor([[grid.rows, grid.columns]])
    requests = [
        Request(
            {**inputs, CELLS: cells},
            negative_inputs={**negative, CELLS: cells} if guided else None,
            grid=grid,
        )
        for inputs, negative in pairs
    ]
    return [request for request in requests for _ in range(num_images_per_prompt)]


def find_grid(target: ImageTokenTarget, height: int | None, width: int | None) -> ImageGrid:
    """Find the grid of the size that was asked for; a side that is not given is the default one."""
    for name, value in (("height", height), ("width", width)):
        if value is not None and (not is_integer(value) or value < 1):
            raise InputError(name, value, "a number of pixels")
    if height is None and width is None:
        return target.grid
    own_height, own_width = target.image_size
    return target.grid_for(own_height if height is None else height, own_width if width is None else width)


def class_pairs(target: ImageTokenTarget, class_labels: object, negative_prompt: object) -> list[Pair]:
    """Encode class labels, each with the unconditional class."""
    config = target.config
    if not isinstance(config, LlamaGenConfig) or config.condition_type != "class":
        raise InputError("prompt", None, "a text, or several: this model is conditioned on text")
    if negative_prompt is not None:
        raise InputError("negative_prompt", negative_prompt, "None: this model is conditioned on classes")
    labels: list[Any] = list(class_labels) if isinstance(class_labels, list | tuple) else [class_labels]
    if not labels or class_labels is None:
        allowed = f"an integer from 0 to {config.num_classes - 1}, or a list of them"
        raise InputError("class_labels", class_labels, allowed)
    ids = class_prompt(config, labels)["input_ids"].split(1)
    return [({"input_ids": row}, class_prompt(config, [None])) for row in ids]


def text_pairs(
    target: ImageTokenTarget,
    prompt: object,
    negative_prompt: object,
    grid: ImageGrid,
    tokenizer: PreTrainedTokenizerBase | None,
    text_encoder: Any,
) -> list[Pair]:
    """Encode texts, each with its unconditional prompt."""
    if isinstance(target.config, LlamaGenConfig) and target.config.condition_type == "class":
        allowed = "None, and class_labels: this model is conditioned on classes"
        raise InputError("prompt", prompt, allowed)
    if tokenizer is None:
        raise InputError("tokenizer", None, "the tokenizer of the prompts")
    pairs = []
    for text, negative in read_texts(prompt, negative_prompt, tokenizer):
        if isinstance(target, LlamaGenTarget):
            pairs.append(caption_pair(target, text, negative, tokenizer, text_encoder))
        else:
            template = next(made for kind, made in TEMPLATES.items() if isinstance(target, kind))
            ids, negative_ids = template(target, text, negative, grid, tokenizer)
            pairs.append((prompt_inputs(target, ids), prompt_inputs(target, negative_ids)))
    return pairs


def read_texts(
    prompt: object, negative_prompt: object, tokenizer: PreTrainedTokenizerBase
) -> list[tuple[str, str | None]]:
    """Read prompts, each with its negative one; None where there is none.

    Raises:
        InputError: no text, other numbers of the two, or special tokens within them.
    """
    is_batch = isinstance(prompt, list | tuple)
    texts: list[Any] = list(prompt) if isinstance(prompt, list | tuple) else [prompt]
    if not texts:
        raise InputError("prompt", prompt, "at least one text")
    negatives: list[Any] = [negative_prompt] * len(texts)
    if isinstance(negative_prompt, list | tuple):
        negatives = list(negative_prompt)
    if len(negatives) != len(texts):
        allowed = f"one text, or one (or None) for each of the {len(texts)} prompts"
        raise InputError("negative_prompt", negative_prompt, allowed)
    for name, values in (("prompt", texts), ("negative_prompt", negatives)):
        for index, value in enumerate(values):
            if name == "prompt" or value is not None:
                where = f"{name}[{index}]" if is_batch else name
                check_text(value, where)
                check_special_tokens(value, where, tokenizer)
    # an empty one is diffusers' way to say that there is none
    return [(text, negative or None) for text, negative in zip(texts, negatives, strict=True)]


def prompt_inputs(target: ImageTokenTarget, ids: list[int]) -> Inputs:
    """Model inputs of a prompt, its ids shifted behind the target's own vocabulary."""
    return {"input_ids": torch.tensor([ids]) + target.vocabulary}


def caption_pair(
    target: LlamaGenTarget,
    text: str,
    negative: str | None,
    tokenizer: PreTrainedTokenizerBase,
    text_encoder: Any,
) -> Pair:
    """Encode a prompt of LlamaGen: text features. No prompt is the end of the learned null caption, as long.

    The official sampler masks both halves alike, so of the null caption those rows alone are seen.
    """
    if text_encoder is None:
        raise InputError("text_encoder", None, "the T5 encoder that the model was trained with")
    inputs = encode_caption(target.config, text, tokenizer, text_encoder)
    if negative is not None:
        return inputs, encode_caption(target.config, negative, tokenizer, text_encoder)
    model: Any = target.model
    return inputs, null_caption_prompt(model, inputs["input_ids"].shape[1])


@torch.inference_mode()
def encode_caption(
    config: LlamaGenConfig, text: str, tokenizer: PreTrainedTokenizerBase, text_encoder: Any
) -> Inputs:
    """Encode a caption, alone and without padding; one that is too long is cut, with a warning.

    Lower case and single spaces; the official cleaning of web captions (HTML, addresses) is left out.
    """
    text = " ".join(text.lower().split())
    whole = tokenizer(text).input_ids
    kept = tokenizer(text, truncation=True, max_length=config.caption_length).input_ids
    if not kept:
        raise InputError("prompt", text, "at least one token; give it some text")
    if len(whole) > len(kept):
        same = sum(token == own for token, own in zip(whole, kept, strict=False))  # the end token is kept
        logger.warning(
            "the text encoder reads %d tokens; this part of the prompt was cut off: %r",
            config.caption_length,
            tokenizer.decode(whole[same:], skip_special_tokens=True),
        )
    ids = torch.tensor([kept], device=text_encoder.device)
    output = text_encoder(input_ids=ids, attention_mask=torch.ones_like(ids))
    features: Tensor = output.last_hidden_state
    return caption_prompt(config, features)


def janus_ids(
    target: JanusTarget, text: str, negative: str | None, grid: ImageGrid, tokenizer: PreTrainedTokenizerBase
) -> IdPair:
    """Encode a prompt of Janus: a turn, then begin-of-image. No prompt is as many visible paddings."""
    newer = "<|User|>" in tokenizer.get_vocab()
    user, assistant = ("<|User|>", "<|Assistant|>") if newer else ("User", "Assistant")
    begin, image = special_ids(tokenizer, tokenizer.bos_token, JANUS_BEGIN_OF_IMAGE)

    def turn(content: str) -> list[int]:
        return [begin, *plain_ids(tokenizer, f"{user}: {content}\n\n{assistant}:"), image]

    ids = turn(text)
    if negative is not None:
        return ids, turn(negative)
    (padding,) = special_ids(tokenizer, tokenizer.pad_token)
    return ids, [token if token in (begin, image) else padding for token in ids]


def emu3_ids(
    target: Emu3Target, text: str, negative: str | None, grid: ImageGrid, tokenizer: PreTrainedTokenizerBase
) -> IdPair:
    """Encode a prompt of Emu3: the text, then the grid's size. No prompt is a list of flaws."""
    names = (tokenizer.bos_token, emu3.BEGIN_OF_IMAGE, emu3.BEGIN_OF_TOKENS)
    begin, image, tokens = special_ids(tokenizer, *names)
    size = plain_ids(tokenizer, f"{grid.rows}*{grid.columns}")

    def sized(content: str) -> list[int]:
        return [begin, *plain_ids(tokenizer, content), image, *size, tokens]

    return sized(text), sized(EMU3_NEGATIVE if negative is None else negative)


def emu3_5_ids(
    target: Emu3p5Target, text: str, negative: str | None, grid: ImageGrid, tokenizer: PreTrainedTokenizerBase
) -> IdPair:
    """Encode a prompt of Emu3.5: a turn, then the grid's size. No prompt is a turn without task and text."""
    begin, answer = special_ids(tokenizer, *EMU3_5_TURN)
    config: Any = target.config
    size = plain_ids(tokenizer, f"{grid.rows}*{grid.columns}")

    def turn(task: str, content: str) -> list[int]:
        said = plain_ids(tokenizer, f"You are a helpful assistant{task}. USER: {content} ASSISTANT: ")
        return [begin, *said, answer, config.boi_token_id, *size, config.img_token_id]

    task = " for t2i task"
    return turn(task, text), turn("", "") if negative is None else turn(task, negative)


def lumina_ids(
    target: LuminaTarget, text: str, negative: str | None, grid: ImageGrid, tokenizer: PreTrainedTokenizerBase
) -> IdPair:
    """Encode a prompt of Lumina-mGPT: a turn, begin-of-image, two size tokens; no prompt is these alone."""
    height, width = grid.rows * target.stride, grid.columns * target.stride
    sizes = chameleon.size_token(height), chameleon.size_token(width)
    head = special_ids(tokenizer, chameleon.BEGIN_OF_IMAGE, *sizes)
    begin, end = special_ids(tokenizer, chameleon.BEGIN_OF_TEXT, chameleon.END_OF_TURN)

    def turn(content: str) -> list[int]:
        request = LUMINA_REQUEST.format(width=width, height=height, text=content)
        return [begin, *plain_ids(tokenizer, request), end, *head]

    return turn(text), head if negative is None else turn(negative)


def anole_ids(
    target: AnoleTarget, text: str, negative: str | None, grid: ImageGrid, tokenizer: PreTrainedTokenizerBase
) -> IdPair:
    """Encode a prompt of Anole: a turn, then begin-of-image; no prompt is the first and last token alone."""
    names = (chameleon.BEGIN_OF_TEXT, chameleon.END_OF_TURN, chameleon.BEGIN_OF_IMAGE)
    begin, end, image = special_ids(tokenizer, *names)

    def turn(content: str) -> list[int]:
        return [begin, *plain_ids(tokenizer, content), end, image]

    return turn(text), [begin, image] if negative is None else turn(negative)


def plain_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Ids of a text without the tokens that a tokenizer puts around them."""
    ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return ids


def special_ids(tokenizer: PreTrainedTokenizerBase, *tokens: str | None) -> list[int]:
    """Find the ids of special tokens.

    Raises:
        InputError: the tokenizer lacks one; it belongs to another model.
    """
    vocabulary: Mapping[Any, int] = tokenizer.get_vocab()
    for token in tokens:
        if token not in vocabulary:
            allowed = f"that of the model, which has a token {token!r}"
            raise InputError("tokenizer", type(tokenizer).__name__, allowed)
    return [vocabulary[token] for token in tokens]


#: Families by target class, the more special one first.
TEMPLATES: dict[type[ImageTokenTarget], Callable[..., IdPair]] = {
    JanusTarget: janus_ids,
    Emu3Target: emu3_ids,
    Emu3p5Target: emu3_5_ids,
    LuminaTarget: lumina_ids,
    AnoleTarget: anole_ids,
}


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
