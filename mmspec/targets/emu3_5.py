"""Emu3.5 as a target (Cui et al., 2510.26583): rows that end in a token, the last one in the image's end."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from mmspec.decoding.image_grid import ImageGrid
from mmspec.errors import CheckpointError
from mmspec.targets.emu3 import AnySizeTarget
from mmspec.targets.image_tokens import check_stride
from mmspec.targets.placement import execution_device
from mmspec.targets.text_vocabulary import plain_ids, special_ids

__all__ = ["Emu3p5Target"]

STRIDE = 16
DEFAULT_CELLS = 64  # 1024 pixels
TURN = ("<|extra_203|>", "<|extra_100|>")  # the begin of a prompt, and of its answer


class Emu3p5Target(AnySizeTarget):
    """Adapter from `Emu3p5ForCausalLM` to the Target interface.

    Args:
        model: a loaded Emu3.5; its codes are the tokens behind the image's end.
        vq: its image tokenizer (IBQ), a diffusers `VQModel`; needed for pixels alone.
        codebook: [K, d]; that of `vq` if None.

    Raises:
        CheckpointError: tokenizer, codebook and vocabulary do not fit each other.
    """

    published = {"guidance_scale": 5.0, "top_k": 5120}

    def __init__(self, model: PreTrainedModel, vq: Any = None, codebook: Tensor | None = None) -> None:
        config: Any = model.config
        first = config.eoi_token_id + 1
        codes = range(first, config.vocab_size)
        if not codes:
            allowed = f"more than {first} tokens: the codes stand behind the end of an image"
            raise CheckpointError("vocab_size", config.vocab_size, allowed)
        row_end, last_row_end = len(codes), len(codes) + 1
        grid = ImageGrid(DEFAULT_CELLS, DEFAULT_CELLS, len(codes), row_end, last_row_end=last_row_end)
        if vq is not None:
            check_stride(vq, STRIDE)
            codebook = vq.quantize.embedding.weight if codebook is None else codebook
        super().__init__(model, grid, codes, [config.eol_token_id, config.eoi_token_id], STRIDE, codebook)
        self.vq = vq

    def prompt_ids(
        self, text: str, negative: str | None, grid: ImageGrid, tokenizer: PreTrainedTokenizerBase
    ) -> tuple[list[int], list[int]]:
        """A turn, then the grid's size; the unconditional prompt is a turn without task and text."""
        begin, answer = special_ids(tokenizer, *TURN)
        config: Any = self.config
        size = plain_ids(tokenizer, f"{grid.rows}*{grid.columns}")

        def turn(task: str, content: str) -> list[int]:
            said = plain_ids(tokenizer, f"You are a helpful assistant{task}. USER: {content} ASSISTANT: ")
            return [begin, *said, answer, config.boi_token_id, *size, config.img_token_id]

        task = " for t2i task"
        return turn(task, text), turn("", "") if negative is None else turn(task, negative)

    def decode(self, cells: Tensor) -> Tensor:
        """Decode codes [B, rows, columns] into images [B, 3, H, W]."""
        from mmspec.models.autoencoders import decode_tokens

        if self.vq is None:
            raise CheckpointError(
                "vq", None, "the image tokenizer, which Emu3.5 keeps in a folder of its own"
            )
        return decode_tokens(self.vq, cells.to(execution_device(self.vq)))
