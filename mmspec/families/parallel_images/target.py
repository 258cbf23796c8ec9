"""Base of targets that predict many cells of an image in a forward pass.

A forward pass reads the tokens decided since the last one, and, if the model has queries, those of the cells
to decide. The draft chooses the cells. Keys of tokens stay in the slots of their cells.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from mmspec.core.distributions import Scores
from mmspec.core.draft import Block, Draft, Nodes
from mmspec.core.interfaces import Drafter, TargetOutput
from mmspec.core.processors import History
from mmspec.core.sampling import Sampler
from mmspec.errors import InputError
from mmspec.families.llamagen.target import LlamaGenTarget
from mmspec.open_types import Keywords
from mmspec.targets.causal import AnyState

__all__ = ["CellGroup", "CellSampler", "ParallelImageTarget"]

SCHEDULES = ("constant", "rising")


@dataclass(frozen=True)
class CellGroup(Block):
    """Cells of images that are decided together, as lanes of one node, and the tokens to read with them.

    Attributes:
        fresh: [B, k] decided cells whose keys are not cached yet, padded with N.
        tokens_of_fresh: [B, k] their tokens.
        kept: [B, N + 1] cells whose keys are cached.
        ranks: [B, L] number of cells of the image, or of scales, that guidance counts as decided before each.
        last: rank at which rising guidance has its full scale.
        begin: number of cells decided before, known to the host.
        quota: number of the drafted cells to decide.
    """

    fresh: Tensor
    tokens_of_fresh: Tensor
    kept: Tensor
    ranks: Tensor
    begin: int
    quota: int
    last: int


@dataclass(frozen=True)
class CellSampler(Sampler):
    """Sampling settings of such a model: guidance may depend on the decided share of the image.

    Args:
        guidance_schedule: "constant", or "rising" from 1 with the decided share: the scale of cell j of N in
            decoding order is 1 + (s - 1) j / N (LPD, 2507.01957); that of grid k of S, counted from 0, is
            1 + (s - 1) k / (S - 1) (VAR, 2404.02905, whose cfg is s - 1).

    Raises:
        InputError: no such schedule.
    """

    guidance_schedule: str = "constant"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.guidance_schedule not in SCHEDULES:
            rule = f"must be {' or '.join(map(repr, SCHEDULES))}"
            raise InputError("guidance_schedule", self.guidance_schedule, rule)

    def __call__(self, logits: Tensor, draft: Draft, history: History, first: Tensor) -> Scores:
        rises = self.guidance_schedule == "rising" and self.is_guided
        if not rises or not isinstance(draft, CellGroup) or not draft.starts.shape[1]:
            return super().__call__(logits, draft, history, first)
        asked, unconditional = logits.to(torch.promote_types(logits.dtype, torch.float32)).chunk(2)
        scale = torch.tensor(self.warping.guidance_scale, dtype=torch.float32, device=logits.device)[:, None]
        risen = 1 + (scale - 1) * draft.ranks / draft.last
        guided = unconditional + risen[..., None] * (asked - unconditional)
        return self.scores(guided, draft.lanes.valid.shape)


class ParallelImageTarget(LlamaGenTarget):
    """Base of adapters from image models that predict many cells in a forward pass.

    Args:
        model, vq, codebook: as of `LlamaGenTarget`.

    Attributes:
        sampler: class of its sampling settings.
        any_cells: whether the model can decide any cells next.
        from_prompt: whether the prompt predicts the first cell.
        plain: options of `DecodingOrder` in plain decoding.
    """

    by_blocks = True
    compared: Sequence[str] = ("none",)
    sampler = CellSampler
    any_cells: ClassVar[bool] = False
    from_prompt: ClassVar[bool] = True
    plain: Keywords

    def plain_decoding(self) -> tuple[Drafter, None]:
        from mmspec.families.parallel_images.cells import OrderedCellsDrafter  # which imports this module

        return OrderedCellsDrafter().fitted(self), None

    def score(self, state: AnyState, draft: CellGroup) -> TargetOutput:
        """Score the cells of a group, in one forward pass that also reads the tokens decided before it."""
        copies = state.cache.rows // len(draft.starts)
        output = self.score_nodes(state, self.nodes(draft).repeat_rows(copies))
        return replace(output, logits=self.predict(output.logits, draft))

    @abstractmethod
    def nodes(self, draft: CellGroup) -> Nodes:
        """Build the nodes of a forward pass; slots 0 to N - 1 are for cells, and slot N is unused."""

    def predict(self, logits: Tensor, draft: CellGroup) -> Tensor:
        """Map the logits of nodes to those of the cells of the group, [R, L, V]."""
        return logits

    def read_fresh(self, draft: CellGroup, extent: int = 0) -> Nodes:
        """Build the nodes of the tokens that are not read yet, which see each other and those before.

        Args:
            draft: the group.
            extent: number of further slots after slot N.
        """
        seen = draft.kept.clone().scatter_(1, draft.fresh, True)
        seen[:, -1] = False
        seen = torch.cat([seen, seen.new_zeros(len(seen), extent)], 1)
        depths = torch.arange(seen.shape[1], device=seen.device).expand(len(seen), -1)
        return Nodes(draft.tokens_of_fresh, draft.fresh, depths, seen[:, None], seen.shape[1] - 1)
