"""Masked autoregressive image models as targets (MAR, 2406.11838): any cell, given any others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mmspec.decoding.draft import Draft, Progress
from mmspec.decoding.image_grid import ImageGrid
from mmspec.decoding.indexing import pick, put
from mmspec.decoding.interfaces import PromptOutput, Target, TargetOutput, TargetState
from mmspec.decoding.verdict import Verdict
from mmspec.errors import InputError
from mmspec.models.denoising import DenoisingHead
from mmspec.models.mar import FeatureCache, FeatureCaching, MARForImageGeneration
from mmspec.targets.image_tokens import PromptPair
from mmspec.targets.steps import CompiledForward

__all__ = ["MARState", "MARTarget"]


@dataclass
class MARState(TargetState):
    """Known cells of a batch of images.

    Attributes:
        tokens: [R, N + 1, d] vectors of the cells; junk at N.
        known: [R, N + 1] whether each is decided.
        labels: [R] classes; R is B, or 2B under guidance.
        cache: what forwards reuse of those before, from the first one on; None without caching.
    """

    tokens: Tensor
    known: Tensor
    labels: Tensor
    cache: FeatureCache | None = None

    def write(self, cells: Tensor, values: Tensor) -> None:
        """Decide cells [B, k] of each image, the junk cell N among them, with values [B, k, d]."""
        copies = len(self.labels) // len(cells)
        put(self.tokens, cells.repeat(copies, 1), values.to(self.tokens.dtype).repeat(copies, 1, 1))
        self.known.scatter_(1, cells.repeat(copies, 1), True)
        self.known[:, -1] = False

    def nbytes(self) -> int:
        return self.tokens.nbytes + (0 if self.cache is None else self.cache.nbytes())


class MARTarget(Target[MARState]):
    """Adapter from a MAR to the Target interface.

    What the interface calls logits are conditions of the denoising head, [R, n, D]. Every forward reads all
    known cells anew, since attention goes both ways; nothing is cached, unless a draft asks for that: it
    changes the conditions and so the distribution, by no known bound.

    Args:
        model: a loaded model in eval mode. A prompt is `input_ids` [1, 1], the class; the number of classes
            stands for none.

    Attributes:
        any_order: True; cells are predicted in any order.
        vocabulary, device, grid, codebook, config, mask_token_id, vector_size: as of `Target`.
        published, classes: as of `ImageTokenTarget`.
    """

    grid: ImageGrid
    any_order = True
    published: Mapping[str, Any] = {"guidance_scale": 3.0, "guidance_schedule": "rising"}  # of mar_large

    def __init__(self, model: MARForImageGeneration) -> None:
        self.model = model
        self.config: Any = model.config
        self.classes: int = model.config.num_classes
        self.vocabulary: int = self.classes + 1
        self.vector_size: int = model.config.token_size
        side: int = model.config.grid_size
        self.grid = ImageGrid(side, side, 1)
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.largest_image: int = self.grid.cells
        self.steps: CompiledForward | None = None

    def encode_prompt(
        self, asked: Any, negative: str | None, grid: ImageGrid, tokenizer: Any, text_encoder: Any = None
    ) -> PromptPair:
        """Encode a label, or None for no class; see `ImageTokenTarget`."""
        label = self.classes if asked is None else asked
        return {"input_ids": torch.tensor([[label]])}, {"input_ids": torch.tensor([[self.classes]])}

    def compile(self) -> None:
        """Compile the forwards of the transformer, each when it is first met."""
        self.steps = CompiledForward(type(self.model).__name__, self.model.conditions)

    @property
    def read(self) -> Callable[..., Tensor]:
        """Compute conditions of known cells; see `MARForImageGeneration.conditions`."""
        return self.model.conditions if self.steps is None else self.steps

    @property
    def denoiser(self) -> DenoisingHead:
        """Head that draws a token, given a condition."""
        return self.model.diffloss

    def prefill(
        self, prompts: Sequence[Mapping[str, Tensor]], capacity: int, taps: Sequence[int] = ()
    ) -> tuple[MARState, PromptOutput]:
        """Keep the classes, without a forward. Returns the state and conditions [R, 0, D]: of no cell.

        Raises:
            InputError: hidden states are asked for.
        """
        if taps:
            raise InputError("taps", tuple(taps), "none: a MAR has no state of a prompt alone")
        labels = torch.cat([prompt["input_ids"].flatten() for prompt in prompts]).to(self.device)
        tokens = torch.zeros(
            len(labels), self.grid.cells + 1, self.vector_size, dtype=self.dtype, device=self.device
        )
        state = MARState(tokens, torch.zeros_like(tokens[..., 0], dtype=torch.bool), labels)
        nothing = torch.empty(len(labels), 0, self.model.config.hidden_size, device=self.device)
        return state, PromptOutput(nothing, forwards=0)

    def score(self, state: MARState, draft: Draft) -> TargetOutput:
        """Conditions [R, n, D] of the cells of a draft.

        Where its chains do not all see the same cells, each is read in a row of its own: a mask of one chain
        is a known cell to another, and attention goes both ways.
        """
        nodes = draft.nodes
        copies = len(state.labels) // len(nodes.slots)
        lanes = len(draft.valid) // len(nodes.slots) if nodes.visible.shape[1] > 1 else 1
        if lanes == 1:
            conditions = self._conditions(state, nodes.slots, draft.progress)
        else:
            size = draft.valid.shape[1]
            seen = nodes.visible[:, ::size]  # [B, L, N] of the first node of each chain: no other is a mask
            candidates = replace(state, tokens=state.tokens.clone(), known=state.known.clone())
            drafted = draft.valid.clone()
            drafted[:, 0] = False
            cells = nodes.slots.where(drafted.view(nodes.slots.shape), self.grid.cells)
            candidates.write(cells, nodes.tokens)
            seen = seen.repeat(copies, 1, 1).flatten(0, 1)
            tokens, known, labels = (
                each.repeat_interleave(lanes, 0)
                for each in (candidates.tokens[:, :-1], candidates.known[:, :-1], state.labels)
            )
            conditions = self.read(tokens, known & seen, labels)
        slots = nodes.slots.view(len(nodes.slots) * lanes, -1).repeat(copies, 1)
        picked = pick(conditions, slots)
        return TargetOutput(picked.view(len(state.labels), -1, picked.shape[-1]))

    def commit(self, state: MARState, draft: Draft, verdict: Verdict, active: Tensor) -> None:
        """Write the cells that were decided."""
        rows = len(active)
        decided = (verdict.accepted > 0) | (verdict.filled & draft.may_follow(verdict))
        cells = draft.nodes.slots.view(rows, len(decided) // rows, -1)[..., 0]  # of the first node of a chain
        cells = cells.where(decided.view(rows, -1) & active[:, None], self.grid.cells)
        state.write(cells, verdict.values[:, 0].view(rows, -1, self.vector_size))

    def _conditions(self, state: MARState, cells: Tensor, progress: Progress | None) -> Tensor:
        """[R, N, D] conditions, of which those of `cells` [B, n] are wanted."""
        tokens, known, labels = state.tokens[:, :-1], state.known[:, :-1], state.labels
        caching: FeatureCaching | None = None if progress is None else progress.caching
        if caching is None:
            # rows that ended in an error know fewer, and nothing is read from them any more
            count = progress.before if progress is not None and isinstance(progress.before, int) else None
            return self.read(tokens, known, labels, count)
        if state.cache is None:
            state.cache = FeatureCache(self.model, caching, len(cells), len(labels) // len(cells))
        return state.cache.conditions(tokens, known, labels, cells)
