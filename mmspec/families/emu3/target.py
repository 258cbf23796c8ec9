"""Targets of Emu3 and Emu3.5: images of any size, with a token at the end of each row."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from torch import Tensor
from transformers import Emu3ForConditionalGeneration

from mmspec.core.image_grid import ImageGrid
from mmspec.errors import CheckpointError, InputError
from mmspec.families.emu3.emu3_5 import Emu3p5Config, Emu3p5ForCausalLM
from mmspec.models.weights import execution_device
from mmspec.open_types import Processor
from mmspec.targets.image_tokens import AnyVQ, check_stride
from mmspec.targets.text_vocabulary import (
    IdsPair,
    TextVocabularyTarget,
    code_ids,
    plain_ids,
    special_ids,
    token_ids,
)

__all__ = ["AnySizeTarget", "Emu3Target", "Emu3p5Target"]

BEGIN_OF_IMAGE, BEGIN_OF_TOKENS = "<|image start|>", "<|image token|>"  # the size is between them
END_OF_ROW, END_OF_FRAME, END_OF_IMAGE = "<|extra_200|>", "<|extra_201|>", "<|image end|>"
DEFAULT_CELLS = 90  # 720 pixels
STRIDE_3_5 = 16
CELLS_3_5 = 64  # 1024 pixels
TURN = ("<|extra_203|>", "<|extra_100|>")  # of Emu3.5: begin of a prompt, and of its answer
NEGATIVE = (
    "lowres, bad anatomy, bad hands, text, error, missing fingers, extra digit, fewer digits, cropped, worst "
    "quality, low quality, normal quality, jpeg artifacts, signature, watermark, username, blurry."
)


class AnySizeTarget(TextVocabularyTarget):
    """Target that draws images of any size, within the number of positions that the model was trained on.

    Attributes:
        min_columns: cells per row of the narrowest image.
    """

    min_columns: ClassVar[int] = 1

    def grid_for(self, height: int, width: int) -> ImageGrid:
        """Grid of an image with fewer tokens than the positions that the model was trained on."""
        rows, columns = height // self.stride, width // self.stride
        places = self.config.get_text_config(decoder=True).max_position_embeddings
        is_whole = rows * self.stride == height and columns * self.stride == width
        too_small = rows < 1 or columns < self.min_columns
        if not is_whole or too_small or replace(self.grid, rows=rows, columns=columns).length >= places:
            rule = (
                f"must be multiples of {self.stride}, at least {self.min_columns * self.stride} wide, with "
                f"fewer than {places} tokens: one per {self.stride} x {self.stride} pixels, and one per row"
            )
            raise InputError("height, width", (height, width), rule)
        return replace(self.grid, rows=rows, columns=columns)


class Emu3Target(AnySizeTarget):
    """Adapter from `Emu3ForConditionalGeneration` (Wang et al., 2409.18869) to the Target interface.

    A token ends each row, and three more end the image. The model contains its image tokenizer.

    Args:
        model: a loaded Emu3-Gen.
        vq: must be None.
        codebook: [K, d]; None for that of the model.
    """

    min_columns = 3  # on narrower grids the official rules for the ends of rows and of the image overlap
    published = {"guidance_scale": 3.0, "top_k": 2048}

    def __init__(
        self, model: Emu3ForConditionalGeneration, vq: AnyVQ = None, codebook: Tensor | None = None
    ) -> None:
        if vq is not None:
            rule = "must be None: an Emu3 checkpoint contains its image tokenizer"
            raise InputError("vq", type(vq).__name__, rule)
        codes = code_ids(model.model.vocabulary_mapping.img2bpe)
        end: int = model.config.get_text_config(decoder=True).eos_token_id
        syntax = [*token_ids(model, [END_OF_ROW, END_OF_FRAME, END_OF_IMAGE]), end]
        row_end, *ending = range(len(codes), len(codes) + len(syntax))
        grid = ImageGrid(DEFAULT_CELLS, DEFAULT_CELLS, len(codes), row_end, tuple(ending))
        own = model.model.vqmodel
        super().__init__(model, grid, codes, syntax, own.spatial_scale_factor, own, codebook)

    def prompt_ids(self, text: str, negative: str | None, grid: ImageGrid, tokenizer: Processor) -> IdsPair:
        """The text, then the grid's size; the unconditional prompt is a list of flaws."""
        names = (tokenizer.bos_token, BEGIN_OF_IMAGE, BEGIN_OF_TOKENS)
        begin, image, tokens = special_ids(tokenizer, *names)
        size = plain_ids(tokenizer, f"{grid.rows}*{grid.columns}")

        def sized(content: str) -> list[int]:
            return [begin, *plain_ids(tokenizer, content), image, *size, tokens]

        return sized(text), sized(NEGATIVE if negative is None else negative)

    def decode(self, cells: Tensor) -> Tensor:
        """Decode codes [B, rows, columns] into images [B, 3, H, W]."""
        images: Tensor = self.vq.decode(cells.to(execution_device(self.vq)))
        return images


class Emu3p5Target(AnySizeTarget):
    """Adapter from `Emu3p5ForCausalLM` (Cui et al., 2510.26583) to the Target interface.

    A token ends each row; that of the last row ends the image.

    Args:
        model: a loaded Emu3.5; its codes are the tokens after the image's end.
        vq: image tokenizer (IBQ), a diffusers `VQModel`; needed for pixels alone.
        codebook: [K, d]; None for that of `vq`.

    Raises:
        CheckpointError: tokenizer, codebook and vocabulary do not fit each other.
    """

    no_vq = "must be the image tokenizer, which Emu3.5 has in a separate folder"
    published = {"guidance_scale": 5.0, "top_k": 5120}

    config: Emu3p5Config

    def __init__(self, model: Emu3p5ForCausalLM, vq: AnyVQ = None, codebook: Tensor | None = None) -> None:
        config = model.config
        first = config.eoi_token_id + 1
        codes = range(first, config.vocab_size)
        if not codes:
            rule = f"must be above {first}: the ids of the codes follow the end of an image"
            raise CheckpointError("vocab_size", config.vocab_size, rule)
        row_end, last_row_end = len(codes), len(codes) + 1
        grid = ImageGrid(CELLS_3_5, CELLS_3_5, len(codes), row_end, last_row_end=last_row_end)
        if vq is not None:
            check_stride(vq, STRIDE_3_5)
        syntax = [config.eol_token_id, config.eoi_token_id]
        super().__init__(model, grid, codes, syntax, STRIDE_3_5, vq, codebook)

    def prompt_ids(self, text: str, negative: str | None, grid: ImageGrid, tokenizer: Processor) -> IdsPair:
        """A turn, then the grid's size; the unconditional prompt is a turn without a task and text."""
        begin, answer = special_ids(tokenizer, *TURN)
        size = plain_ids(tokenizer, f"{grid.rows}*{grid.columns}")

        def turn(task: str, content: str) -> list[int]:
            said = plain_ids(tokenizer, f"You are a helpful assistant{task}. USER: {content} ASSISTANT: ")
            return [begin, *said, answer, self.config.boi_token_id, *size, self.config.img_token_id]

        task = " for t2i task"
        return turn(task, text), turn("", "") if negative is None else turn(task, negative)
