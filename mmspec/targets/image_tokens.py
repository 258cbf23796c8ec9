"""Image-token models as targets: a compact vocabulary, a grid, a grammar.

Outputs are counted in the compact vocabulary: token t < K is entry t of the codebook, tokens from K on are
the family's syntax (end of row, end of image, ...). Ids of a prompt come after those, so that no drafter
takes a prompt for a piece of image: `vocabulary` plus the id that the family's own tokenizer gives. A family
adds how it embeds and reads tokens, how its prompts are written, which sizes it draws, and its image
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

#: The model's inputs for a prompt, and for the unconditional one that guidance leads away from.
PromptPair = tuple[dict[str, Tensor], dict[str, Tensor]]

#: An image tokenizer: a `VQModel` of diffusers, or a family's own module.
AnyVQ: TypeAlias = Any
TextEncoder: TypeAlias = PreTrainedModel | None
#: What an image is asked for by: a text; of models of classes a label, or None for no class.
Asked: TypeAlias = Any

CODEBOOK = "quantize.embedding.weight"  # of an image tokenizer
FORCED = "forced"  # of a prompt: [1, n] what its layout forces, where the output is not the default image


@dataclass
class ImageState(CausalState):
    """State of a batch: its cache, and the grammar of its images.

    Attributes:
        grammar: of the images.
    """

    row_fields = named("grammar")

    grammar: Grammar = field(kw_only=True)


class ImageTokenTarget(CausalTarget, ABC):
    """Adapter from a model of image tokens to the Target interface.

    Logits are [B, n, K + S] with the grammar applied: -inf for what it excludes. Positions beyond the image
    do no harm: rotations are computed, not looked up, and such places are never kept.

    Args:
        model: a loaded model in eval mode.
        grid: the image that it draws when nothing else is asked for; its codebook size is K.
        syntax: number of syntax tokens S.
        stride: pixels per cell, in either direction.
        vq: the image tokenizer, where one is at hand.
        codebook: [K, d] the code vectors; those of `vq` if None.

    Attributes:
        vocabulary: K + S.
        grid, stride, vq, codebook: as passed.
        only_size: what the default size is, in words, where there is no other.
        no_vq: what is lacking, in words, where there is no image tokenizer.
        published: sampling settings of the family's authors.
        classes: number of classes that images are asked for by; None where they are asked for in words.
        sampler: class of its sampling settings.

    Raises:
        CheckpointError: the codebook is not that of the vocabulary.
        UnsupportedModelError: the model cannot be decoded speculatively; the message says why.
    """

    grid: ImageGrid
    only_size: ClassVar[str] = "the only size that this model draws"
    no_vq: ClassVar[str] = "an image tokenizer, which turns tokens into pixels"
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
                allowed = f"a codebook of {self.entries} entries, as many as {name} predicts"
                raise CheckpointError(part, f"{len(vectors)} entries", allowed)
        codebook = own if codebook is None else codebook
        self.codebook = None if codebook is None else codebook.detach().to(self.device)
        self.vocabulary = grid.codebook_size + syntax

    @property
    def entries(self) -> int:
        """Entries that the image tokenizer has to have."""
        return self.grid.codebook_size

    def tokens_of(self, entries: Tensor) -> Tensor:
        """The tokens that stand for entries of the image tokenizer's codebook, of any shape."""
        return entries

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width in pixels of an image, or a frame, on the default grid."""
        return self.grid.frame.rows * self.stride, self.grid.columns * self.stride

    def grid_for(self, height: int, width: int) -> ImageGrid:
        """Grid of an image of that many pixels; the default one alone, where a family has no others.

        Raises:
            InputError: the model was not made for this size.
        """
        if (height, width) != self.image_size:
            own = " x ".join(map(str, self.image_size))
            raise InputError("height, width", (height, width), f"{own}, {self.only_size}")
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
            asked: a text; for models of classes a label, or None for no class.
            negative: the text of the unconditional prompt; None is the family's own.
            grid: of the image.
            tokenizer, text_encoder: of the prompts, where the family has them.

        Raises:
            InputError: a part is missing or belongs to another model, or the prompt cannot be read.
        """

    def decode(self, cells: Tensor) -> Tensor:
        """Decode codes [B, rows, columns] into images [B, 3, H, W], about [-1, 1], of the tokenizer's dtype.

        By `vq`, a `VQModel` of diffusers, unless a family has an image tokenizer of its own.
        """
        from mmspec.models.autoencoders import decode_tokens

        if self.vq is None:
            raise CheckpointError("vq", None, self.no_vq)
        return decode_tokens(self.vq, cells.to(execution_device(self.vq)))

    @torch.no_grad()
    def decode_tokens(self, codes: Tensor, grid: ImageGrid | None = None) -> Tensor:
        """Decode codes [B, cells] in raster order into images [B, 3, H, W] in [-1, 1].

        Frames of a clip are decoded each alone, and stand one below another.
        Where an image of the grid has more codes than cells (`layout_of`), they are those of the output.

        Raises:
            InputError: another number of cells than the grid has, or a token that is no code.
            CheckpointError: the target was built without an image tokenizer.
        """
        grid = self.grid if grid is None else grid
        cells = self.layout_of(grid).cells
        if codes.dim() != 2 or codes.shape[1] != cells:
            raise InputError("codes", codes, f"[B, {cells}] for {grid.rows} x {grid.columns} cells")
        if codes.numel() and not 0 <= int(codes.min()) <= int(codes.max()) < grid.codebook_size:
            raise InputError("codes", int(codes.max()), f"codes from 0 to {grid.codebook_size - 1}")
        return self.decode_output(codes, grid).clamp(-1, 1)

    def decode_output(self, codes: Tensor, grid: ImageGrid) -> Tensor:
        """Decode the codes [B, cells] of whole outputs into images [B, 3, H, W], about [-1, 1]."""
        clip = {"t": grid.frames, "b": len(codes)}
        images = self.decode(rearrange(codes, "b (t y x) -> (b t) y x", x=grid.columns, **clip))
        return rearrange(images, "(b t) c y x -> b c (t y) x", **clip)

    def decode_part(self, codes: Tensor, grid: ImageGrid) -> tuple[Tensor, Tensor]:
        """Decode codes [B, cells] of outputs, -1 where none is decided yet.

        Returns:
            Images [B, 3, H, W] in [-1, 1], and [B, rows, columns] which cells of them say something.
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
        return ImageState(**vars(state), grammar=grammar), output

    def arguments(self, prompt: Mapping[str, Tensor]) -> tuple[Keywords, int]:
        """The model's arguments for a prompt alone, without the layout of its output."""
        return super().arguments({name: value for name, value in prompt.items() if name != FORCED})

    def score_nodes(self, state: AnyState, nodes: Nodes) -> TargetOutput:
        """Score nodes [R, n] in one forward, and exclude what the grammar excludes after each."""
        output = super().score_nodes(state, nodes)
        if not self.syntax:
            return output
        forced = state.grammar.at(state.index(nodes) + 1)
        return replace(output, logits=self.constrain(output.logits, forced))

    def constrain(self, logits: Tensor, forced: Tensor) -> Tensor:
        """Apply the grammar: codes alone at cells, and at forced places the syntax token alone.

        Args:
            logits: [B, n, K + S].
            forced: [B, n] the syntax token that must come after each node, or FREE.

        Returns:
            [B, n, K + S], -inf where a token is excluded.
        """
        return exclude(logits, forced, self.grid.codebook_size) if self.syntax else logits


def stride_of(vq: AnyVQ) -> int:
    """Pixels per cell of an image tokenizer, a `VQModel` of diffusers."""
    return int(2 ** (len(vq.config.block_out_channels) - 1))


def check_stride(vq: AnyVQ, stride: int) -> None:
    """Raise CheckpointError unless an image tokenizer has cells of that many pixels."""
    if (found := stride_of(vq)) != stride:
        raise CheckpointError("vq", f"{found} pixels per token", f"{stride}, as the model expects")
