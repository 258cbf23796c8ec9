"""Targets of Chameleon models that draw images: Anole (2407.06135) and Lumina-mGPT (2408.02657).

Both are `ChameleonForConditionalGeneration` of transformers, which cannot decode images; a diffusers
`VQModel` does that (`mmspec.models.autoencoders`). Tested on random tiny models in transformers' layout (keys
`model.*`, `model.vqmodel.*`, `lm_head`), not on published weights. Files of Lumina-mGPT may store query and
key norms as [1, head_dim] where transformers has [heads, head_dim]; `mmspec convert` repeats them.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from torch import Tensor
from transformers import PreTrainedModel

from mmspec.core.image_grid import ImageGrid
from mmspec.errors import InputError
from mmspec.models.weights import stored_weight
from mmspec.open_types import Processor
from mmspec.targets.image_tokens import CODEBOOK, AnyVQ, check_stride
from mmspec.targets.text_vocabulary import (
    IdsPair,
    TextVocabularyTarget,
    code_ids,
    plain_ids,
    special_ids,
    token_ids,
)

__all__ = ["AnoleTarget", "LuminaTarget", "size_token"]

BEGIN_OF_TEXT, BEGIN_OF_IMAGE, END_OF_IMAGE = "<s>", "<racm3:break>", "<eoss>"  # ids 0, 8197, 8196
END_OF_TURN, END_OF_ROW = "<reserved08706>", "<reserved08799>"  # ids 8710, 8803
SIZE_STEP = 32  # pixels per step of Lumina-mGPT's size tokens
DEFAULT_LUMINA_SIZE = 768
MAX_ASPECT = 4
LUMINA_REQUEST = "Generate an image of {width}x{height} according to the following prompt:\n{text}"


def size_token(pixels: int) -> str:
    """Lumina-mGPT's token for a side of that length: ids from 8804 on, one for every 32 pixels."""
    return f"<reserved{8800 + pixels // SIZE_STEP:05}>"


class AnoleTarget(TextVocabularyTarget):
    """Adapter from Anole to the Target interface: one square image, no syntax tokens.

    Args:
        model: a loaded `ChameleonForConditionalGeneration`.
        vq: image tokenizer, a diffusers `VQModel`; needed for pixels alone.
        codebook: [K, d]; None for that of `vq`, or else of the model.

    Raises:
        CheckpointError: tokenizer, codebook and vocabulary do not fit each other.
    """

    holds_codebook: ClassVar[bool] = True
    no_vq = "must be the image tokenizer, as transformers' Chameleon has no decoder (see load_chameleon_vq)"
    published = {"guidance_scale": 3.0, "top_k": 2000}

    def __init__(self, model: PreTrainedModel, vq: AnyVQ = None, codebook: Tensor | None = None) -> None:
        config = model.config.vq_config
        stride = 2 ** (len(config.channel_multiplier) - 1)
        codes = code_ids(model.model.vocabulary_mapping.img2bpe)
        side = config.resolution // stride
        if vq is not None:
            check_stride(vq, stride)
        elif codebook is None and self.holds_codebook:
            codebook = stored_weight(model.model.vqmodel, CODEBOOK)
        grid, syntax = self.layout(model, ImageGrid(side, side, len(codes)), stride)
        super().__init__(model, grid, codes, syntax, stride, vq, codebook)

    def layout(self, model: PreTrainedModel, square: ImageGrid, stride: int) -> tuple[ImageGrid, list[int]]:
        """The default grid, and the model's ids of the syntax tokens."""
        return square, []

    def prompt_ids(self, text: str, negative: str | None, grid: ImageGrid, tokenizer: Processor) -> IdsPair:
        """A turn, then begin-of-image; the unconditional prompt has only the first and last token."""
        begin, end, image = special_ids(tokenizer, BEGIN_OF_TEXT, END_OF_TURN, BEGIN_OF_IMAGE)

        def turn(content: str) -> list[int]:
            return [begin, *plain_ids(tokenizer, content), end, image]

        return turn(text), [begin, image] if negative is None else turn(negative)


class LuminaTarget(AnoleTarget):
    """Adapter from Lumina-mGPT to the Target interface: many sizes, an end token per row and per image.

    The prompt ends with begin-of-image and the two size tokens, which the official code generates instead.

    Args:
        model: a loaded `ChameleonForConditionalGeneration` with Lumina-mGPT's weights.
        vq: as for `AnoleTarget`.
        codebook: [K, d]; None for that of `vq`.
    """

    holds_codebook = False  # files lack the image tokenizer, and transformers initialises it at random

    def layout(self, model: PreTrainedModel, square: ImageGrid, stride: int) -> tuple[ImageGrid, list[int]]:
        """Default grid: a square of the size in the checkpoint's name ("...-7B-512"), or 768 pixels."""
        named = re.search(r"-(512|768|1024)(?!\d)", Path(model.config.name_or_path or "").name)
        side = (DEFAULT_LUMINA_SIZE if named is None else int(named[1])) // stride
        row_end = square.codebook_size
        grid = ImageGrid(side, side, square.codebook_size, row_end, (row_end + 1,))
        return grid, token_ids(model, [END_OF_ROW, END_OF_IMAGE])

    def prompt_ids(self, text: str, negative: str | None, grid: ImageGrid, tokenizer: Processor) -> IdsPair:
        """A turn, begin-of-image and two size tokens; the unconditional prompt has only these three."""
        height, width = grid.rows * self.stride, grid.columns * self.stride
        head = special_ids(tokenizer, BEGIN_OF_IMAGE, size_token(height), size_token(width))
        begin, end = special_ids(tokenizer, BEGIN_OF_TEXT, END_OF_TURN)

        def turn(content: str) -> list[int]:
            request = LUMINA_REQUEST.format(width=width, height=height, text=content)
            return [begin, *plain_ids(tokenizer, request), end, *head]

        return turn(text), head if negative is None else turn(negative)

    def grid_for(self, height: int, width: int) -> ImageGrid:
        """Grid of an image in steps of 32 pixels, at most 4:1, with at most the cells of the default grid."""
        whole = height > 0 and width > 0 and height % SIZE_STEP == 0 and width % SIZE_STEP == 0
        own_height, own_width = self.image_size
        if (
            not whole
            or height * width > own_height * own_width
            or max(height, width) > MAX_ASPECT * min(height, width)
        ):
            rule = (
                f"must be multiples of {SIZE_STEP}, at most {own_height} x {own_width} in area, and one side "
                f"at most {MAX_ASPECT} times the other"
            )
            raise InputError("height, width", (height, width), rule)
        return replace(self.grid, rows=height // self.stride, columns=width // self.stride)
