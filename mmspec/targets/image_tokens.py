"""Target adapter for image-token models: a compact vocabulary, a grid and a grammar.

Outputs use the compact vocabulary: token t < K is entry t of the codebook, and tokens from K on are the
family's syntax tokens (end of row, end of image, ...). Prompt ids come after those, as `vocabulary` plus the
id of the family's own tokenizer, so that no drafter mistakes a prompt for a part of an image. A family
implements the embedding and the head of its tokens, the prompt format, the supported sizes and the image
tokenizer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeAlias

import torch
from einops import rearrange
from torch import Tensor
from transformers import PreTrainedModel

from mmspec.core.draft import Nodes
from mmspec.core.image_grid import Grammar, ImageGrid, exclude
from mmspec.core.interfaces import PromptOutput, TargetOutput
from mmspec.core.rows import named
from mmspec.core.sampling import Sampler
from mmspec.errors import CheckpointError, InputError
from mmspec.models.weights import execution_device, stored_weight
from mmspec.open_types import Keywords, Processor
from mmspec.targets.causal import AnyState, CausalState, CausalTarget

__all__ = ["CODEBOOK", "FORCED", "ImageState", "ImageTokenTarget", "PromptPair", "check_stride", "stride_of"]

#: The model's inputs for a prompt, and for the unconditional prompt of guidance.
PromptPair = tuple[dict[str, Tensor], dict[str, Tensor]]

#: An image tokenizer: a `VQModel` of diffusers, or a family's own module.
AnyVQ: TypeAlias = Any
TextEncoder: TypeAlias = PreTrainedModel | None
#: Prompt of an image: a text; for class-conditional models a label, or None for no class.
Asked: TypeAlias = Any

CODEBOOK = "quantize.embedding.weight"  # parameter of an image tokenizer
FORCED = "forced"  # input of a prompt: [1, n] `Layout.forced` of the output, if it is not the default image


@dataclass
class ImageState(CausalState):
    """State of a batch of images: its cache and grammar.

    Attributes:
        grammar: of the images.
    """

    row_fields = named("grammar")

    grammar: Grammar = field(kw_only=True)


class ImageTokenTarget(CausalTarget, ABC):
    """Adapter from an image-token model to the `Target` interface.

    Logits are [B, n, K + S] with the grammar applied: -inf for excluded tokens. Positions beyond the image
    are harmless: rotations are computed, not looked up, and such places are never kept.

    Args:
        model: a loaded model in eval mode.
        grid: the default image; its codebook size is K.
        syntax: number of syntax tokens S.
        stride: pixels per cell, in either direction.
        vq: the image tokenizer, if available.
        codebook: [K, d] the code vectors; those of `vq` if None.

    Attributes:
        vocabulary: K + S.
        grid, stride, vq, codebook: as passed.
        only_size: description of the default size, for models without others.
        no_vq: rule for `vq` in the error for a missing image tokenizer.
        published: sampling settings of the family's authors.
        classes: number of classes of a class-conditional model; None for text prompts.
        sampler: class of its sampling settings.

    Raises:
        CheckpointError: the codebook does not match the vocabulary.
        UnsupportedModelError: the model cannot be decoded speculatively; the message gives the reason.
    """

    grid: ImageGrid
    only_size: ClassVar[str] = "the only size that this model draws"
    no_vq: ClassVar[str] = "must be an image tokenizer, which turns tokens into pixels"
    published: Mapping[str, object] = {}
    classes: int | None = None
    vq: AnyVQ
    sampler: ClassVar[type[Sampler]] = Sampler

    def __init__(
        self,
        model: PreTrainedModel,
        grid: ImageGrid,
        syntax: int = 0,
        stride: int = 16,
        vq: AnyVQ = None,
        codebook: Tensor | None = None,
    ) -> None:
        super().__init__(model)
        own = None if vq is None else stored_weight(vq, CODEBOOK)
        self.grid, self.syntax, self.stride, self.vq = grid, syntax, stride, vq
        for part, vectors in (("codebook", codebook), ("vq", own)):
            if vectors is not None and len(vectors) != self.entries:
                name = type(model).__name__
                rule = f"must have {self.entries} code vectors, as many as {name} predicts"
                raise CheckpointError(part, f"{len(vectors)} code vectors", rule)
        codebook = own if codebook is None else codebook
        self.codebook = None if codebook is None else codebook.detach().to(self.device)
        self.vocabulary = grid.codebook_size + syntax

    @property
    def entries(self) -> int:
        """Number of entries that the image tokenizer must have."""
        return self.grid.codebook_size

    def tokens_of(self, entries: Tensor) -> Tensor:
        """Tokens for entries of the image tokenizer's codebook, of any shape."""
        return entries

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width in pixels of an image, or a frame, on the default grid."""
        return self.grid.frame.rows * self.stride, self.grid.columns * self.stride

    def grid_for(self, height: int, width: int) -> ImageGrid:
        """Grid of an image of that size in pixels; only the default one for families without others.

        Raises:
            InputError: the model does not support this size.
        """
        if (height, width) != self.image_size:
            own = " x ".join(map(str, self.image_size))
            raise InputError("height, width", (height, width), f"must be {own}, {self.only_size}")
        return self.grid

    @abstractmethod
    def encode_prompt(
        self,
        asked: Asked,
        negative: str | None,
        grid: ImageGrid,
        tokenizer: Processor,
        text_encoder: TextEncoder = None,
    ) -> PromptPair:
        """Encode a prompt, and the unconditional one.

        Args:
            asked: a text; for class-conditional models a label, or None for no class.
            negative: the text of the unconditional prompt; None for the family's own.
            grid: of the image.
            tokenizer, text_encoder: of the prompts, if the family has them.

        Raises:
            InputError: a part is missing or belongs to another model, or the prompt is invalid.
        """

    def decode(self, cells: Tensor) -> Tensor:
        """Decode codes [B, rows, columns] into images [B, 3, H, W], about [-1, 1], of the tokenizer's dtype.

        The default uses `vq`, a `VQModel` of diffusers; families with their own image tokenizer override it.
        """
        from mmspec.models.autoencoders import decode_tokens

        if self.vq is None:
            raise CheckpointError("vq", None, self.no_vq)
        return decode_tokens(self.vq, cells.to(execution_device(self.vq)))

    @torch.no_grad()
    def decode_tokens(self, codes: Tensor, grid: ImageGrid | None = None) -> Tensor:
        """Decode codes [B, cells] in raster order into images [B, 3, H, W] in [-1, 1].

        Frames of a clip are decoded one by one, and stacked from top to bottom. If an image of the grid has
        more codes than cells (`layout_of`), `codes` are those of the whole output.

        Raises:
            InputError: the number of cells differs from the grid's, or a token is not a code.
            CheckpointError: the target was built without an image tokenizer.
        """
        grid = self.grid if grid is None else grid
        cells = self.layout_of(grid).cells
        if codes.dim() != 2 or codes.shape[1] != cells:
            raise InputError("codes", codes, f"must be [B, {cells}] for {grid.rows} x {grid.columns} cells")
        if codes.numel() and not 0 <= int(codes.min()) <= int(codes.max()) < grid.codebook_size:
            raise InputError("codes", int(codes.max()), f"must be from 0 to {grid.codebook_size - 1}")
        return self.decode_output(codes, grid).clamp(-1, 1)

    def decode_output(self, codes: Tensor, grid: ImageGrid) -> Tensor:
        """Decode the codes [B, cells] of whole outputs into images [B, 3, H, W], about [-1, 1]."""
        clip = {"t": grid.frames, "b": len(codes)}
        images = self.decode(rearrange(codes, "b (t y x) -> (b t) y x", x=grid.columns, **clip))
        return rearrange(images, "(b t) c y x -> b c (t y) x", **clip)

    def decode_part(self, codes: Tensor, grid: ImageGrid) -> tuple[Tensor, Tensor]:
        """Decode codes [B, cells] of partial outputs, with -1 for undecided ones.

        Returns:
            Images [B, 3, H, W] in [-1, 1], and [B, rows, columns] which of their cells are decided.
        """
        is_drawn = codes.unflatten(1, (grid.rows, grid.columns)) >= 0
        return self.decode_tokens(codes.clamp_min(0), grid), is_drawn

    def prefill(
        self, prompts: Sequence[Mapping[str, Tensor]], capacity: int, taps: Sequence[int] = ()
    ) -> tuple[AnyState, PromptOutput]:
        """Prefill the prompts, and set up the grammar of their outputs."""
        rows = [prompt[FORCED][0].tolist() if FORCED in prompt else self.grid.forced for prompt in prompts]
        grammar = Grammar(rows, self.device)
        state, output = super().prefill(prompts, capacity, taps)
        output = replace(output, logits=self.constrain(output.logits, grammar.forced[:, :1]))
        return self.extended(state, ImageState, grammar=grammar), output

    def arguments(self, prompt: Mapping[str, Tensor]) -> tuple[Keywords, int]:
        """The model's arguments for one prompt, without the layout of its output."""
        return super().arguments({name: value for name, value in prompt.items() if name != FORCED})

    def score_nodes(self, state: AnyState, nodes: Nodes) -> TargetOutput:
        """Score nodes [R, n] in one forward pass, and apply the grammar after each."""
        output = super().score_nodes(state, nodes)
        if not self.syntax:
            return output
        forced = state.grammar.at(state.index(nodes) + 1)
        return replace(output, logits=self.constrain(output.logits, forced))

    def constrain(self, logits: Tensor, forced: Tensor) -> Tensor:
        """Apply the grammar: cells allow codes alone, and forced places their syntax token alone.

        Args:
            logits: [B, n, K + S].
            forced: [B, n] the syntax token that is forced after each node, or FREE.

        Returns:
            [B, n, K + S], -inf where a token is excluded.
        """
        return exclude(logits, forced, self.grid.codebook_size) if self.syntax else logits


def stride_of(vq: AnyVQ) -> int:
    """Pixels per cell of an image tokenizer, a `VQModel` of diffusers."""
    return int(2 ** (len(vq.config.block_out_channels) - 1))


def check_stride(vq: AnyVQ, stride: int) -> None:
    """Raise CheckpointError unless the cells of an image tokenizer have `stride` pixels."""
    if (found := stride_of(vq)) != stride:
        raise CheckpointError(
            "vq", f"{found} pixels per token", f"must have {stride} pixels per token for this model"
        )
