"""Emu3 as a target (Wang et al., 2409.18869): rows that end in a token, and three tokens after the last."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from mmspec.decoding.image_grid import ImageGrid
from mmspec.errors import InputError
from mmspec.targets.text_vocabulary import TextVocabularyTarget, code_ids, token_ids

__all__ = ["BEGIN_OF_IMAGE", "BEGIN_OF_TOKENS", "Emu3Target"]

BEGIN_OF_IMAGE, BEGIN_OF_TOKENS = "<|image start|>", "<|image token|>"  # the size stands between them
END_OF_ROW, END_OF_FRAME, END_OF_IMAGE = "<|extra_200|>", "<|extra_201|>", "<|image end|>"
DEFAULT_CELLS = 90  # 720 pixels
MIN_COLUMNS = 3  # on narrower grids the reference's rule for ends of rows meets that for the end of the image


class Emu3Target(TextVocabularyTarget):
    """Adapter from `Emu3ForConditionalGeneration` to the Target interface; the tokenizer is inside the model.

    Args:
        model: a loaded Emu3-Gen.
        vq: None; the model brings its own.
        codebook: [K, d]; that of the model if None.
    """

    def __init__(self, model: PreTrainedModel, vq: Any = None, codebook: Tensor | None = None) -> None:
        if vq is not None:
            raise InputError("vq", type(vq).__name__, "None: an Emu3 checkpoint holds its image tokenizer")
        parts: Any = model.model
        codes = code_ids(parts.vocabulary_mapping.img2bpe)
        end: int = model.config.get_text_config(decoder=True).eos_token_id
        syntax = [*token_ids(model, [END_OF_ROW, END_OF_FRAME, END_OF_IMAGE]), end]
        row_end, *ending = range(len(codes), len(codes) + len(syntax))
        grid = ImageGrid(DEFAULT_CELLS, DEFAULT_CELLS, len(codes), row_end, tuple(ending))
        if codebook is None:
            codebook = parts.vqmodel.quantize.embedding.weight
        super().__init__(model, grid, codes, syntax, parts.vqmodel.spatial_scale_factor, codebook)
        self.vq = parts.vqmodel

    def grid_for(self, height: int, width: int) -> ImageGrid:
        """Grid of an image whose tokens fit the positions that the model was trained on."""
        rows, columns = height // self.stride, width // self.stride
        places = self.config.get_text_config(decoder=True).max_position_embeddings
        length = rows * (columns + 1) + len(self.grid.ending)
        is_whole = rows * self.stride == height and columns * self.stride == width
        if not is_whole or rows < 1 or columns < MIN_COLUMNS or length >= places:
            allowed = (
                f"multiples of {self.stride}, at least {MIN_COLUMNS * self.stride} wide, and fewer than "
                f"{places} tokens at one per {self.stride} x {self.stride} pixels and one more per row"
            )
            raise InputError("height, width", (height, width), allowed)
        return ImageGrid(rows, columns, self.grid.codebook_size, self.grid.row_end, self.grid.ending)

    def decode(self, cells: Tensor) -> Tensor:
        """Decode codes [B, rows, columns] into images [B, 3, H, W]."""
        images: Tensor = self.vq.decode(cells.to(self.vq.device))
        return images
