"""Target of VAR (2404.02905), which predicts an image scale by scale.

A forward pass decides a whole scale. Its inputs are the sum of all coarser scales, resized to its size. The
state stores this sum, and adds the tokens that the previous forward pass decided. Keys of a place stay in its
slot. There is no prompt: the class is an input of every forward pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from mmspec.core.cache import RaggedCache
from mmspec.core.draft import Nodes
from mmspec.core.image_grid import GridSequence, ImageGrid
from mmspec.core.interfaces import PromptOutput, TargetOutput
from mmspec.errors import CheckpointError
from mmspec.families.parallel_images.target import CellGroup, ParallelImageTarget
from mmspec.families.var.modeling import VARConfig, VARForCausalLM
from mmspec.families.var.tokenizer import ScaleQuantizer, shrunk
from mmspec.open_types import Inputs, Keywords
from mmspec.targets.causal import CausalState
from mmspec.targets.image_tokens import AnyVQ

__all__ = ["ScaleState", "VARTarget"]


@dataclass
class ScaleState(CausalState):
    """State of a batch of images that are drawn scale by scale.

    Attributes:
        labels: [R] classes, `num_classes` for none.
        features: [B, c, P, P] sum of the image tokenizer's vectors of all scales that were read.
        inputs: [R, n, c] inputs of the places of the current forward pass.
    """

    labels: Tensor
    features: Tensor
    inputs: Tensor

    def tighten(self, emitted: Sequence[int]) -> None:
        """Do nothing: there is no prompt, and each place has a fixed slot."""


class VARTarget(ParallelImageTarget):
    """Adapter from a model that decides a scale in each forward pass (VAR, 2404.02905).

    Args:
        model: a loaded VAR.
        vq: image tokenizer, a `ScaleVQModel`, which maps tokens to the inputs of the next scale.
        codebook: as of `LlamaGenTarget`.

    Raises:
        CheckpointError: there is no such tokenizer, or it belongs to another model.
    """

    config: VARConfig
    from_prompt = False
    plain: Keywords = {"order": "scales"}
    settings: ClassVar[Keywords] = {"guidance_scale": 2.5, "top_k": 900, "top_p": 0.96}

    def __init__(self, model: VARForCausalLM, vq: AnyVQ = None, codebook: Tensor | None = None) -> None:
        quantizer = getattr(vq, "quantize", None)
        if not isinstance(quantizer, ScaleQuantizer):
            rule = "must be VAR's image tokenizer of several scales, which computes the inputs of each scale"
            raise CheckpointError("vq", None if vq is None else type(vq).__name__, rule)
        super().__init__(model, vq, codebook)
        width = quantizer.embedding.embedding_dim
        if width != self.config.latent_channels:
            rule = f"must have vectors of the width {self.config.latent_channels} that the model reads"
            raise CheckpointError("vq", f"vectors of width {width}", rule)
        self.published = {**self.settings, "guidance_schedule": "rising"}
        self.quantizer, self.sides = quantizer, tuple(self.config.patch_nums)
        self.begins = [sum(side**2 for side in self.sides[:scale]) for scale in range(len(self.sides))]

    def layout_of(self, grid: ImageGrid) -> GridSequence:
        return GridSequence(tuple(replace(grid, rows=side, columns=side) for side in self.sides))

    def prefill(
        self, prompts: Sequence[Mapping[str, Tensor]], capacity: int, taps: Sequence[int] = ()
    ) -> tuple[ScaleState, PromptOutput]:
        """Store the classes, without a forward pass; see `unread`."""
        labels = torch.cat([prompt["input_ids"][0] for prompt in prompts]).to(self.device) - self.vocabulary
        nothing = torch.empty(len(prompts), 0, self.vocabulary, dtype=self.dtype, device=self.device)
        return self.unread(
            ScaleState,
            [0] * len(prompts),
            capacity,
            taps,
            offset=torch.zeros_like(labels),
            queries=torch.empty(0, 0, dtype=torch.float32, device=self.device),
            labels=labels,
            features=self.quantizer.nothing(0, self.sides),
            inputs=nothing,
        )

    def score(self, state: ScaleState, draft: CellGroup) -> TargetOutput:
        """Score a scale, after adding the tokens of the previous one to the sum."""
        scale = self.begins.index(draft.begin)
        if scale == 0:
            state.features = self.quantizer.nothing(len(draft.starts), self.sides)
        else:
            tokens = draft.tokens_of_fresh.to(state.features.device)
            state.features = state.features + self.quantizer.vectors(tokens, self.sides, scale - 1)
        read = shrunk(state.features, self.sides[scale]).to(self.device, self.dtype)
        state.inputs = read.repeat(len(state.labels) // len(read), 1, 1)
        return super().score(state, draft)

    def nodes(self, draft: CellGroup) -> Nodes:
        before = self.read_fresh(draft)
        visible = before.visible.scatter(2, draft.starts[:, None], True)
        return Nodes(draft.tokens[:, :, 0], draft.starts, before.depths, visible, before.deepest)

    def further_inputs(self, state: ScaleState, nodes: Nodes) -> Keywords:
        return {"class_labels": state.labels, "inputs_embeds": state.inputs}

    def forward(self, inputs: Inputs, cache: RaggedCache, keep: int = 0, whole: bool = False) -> Tensor:
        """Logits [B, n, V] of places, whose inputs are vectors instead of tokens."""
        others = {name: value for name, value in inputs.items() if name != "input_ids"}
        return super().forward(others, cache, keep, whole)

    def decode_output(self, codes: Tensor, grid: ImageGrid) -> Tensor:
        """Decode codes [B, N] of all scales, with -1 in undecided scales, into images [B, 3, H, W]."""
        codes = codes.to(self.quantizer.embedding.weight.device)
        images: Tensor = self.vq.decode(self.quantizer.features(codes, self.sides))
        return images

    @torch.no_grad()
    def decode_part(self, codes: Tensor, grid: ImageGrid) -> tuple[Tensor, Tensor]:
        """Decode the decided scales, each of which covers the whole image."""
        is_begun = codes[:, 0, None, None] >= 0
        pixels = self.decode_output(codes, grid).clamp(-1, 1)
        return pixels, is_begun.expand(-1, grid.rows, grid.columns)
