"""EAGLE: a one-layer head on the target's hidden states grows a tree of candidates.

EAGLE-1 (Li et al., 2401.15077) with static trees, EAGLE-2 (2406.16858) with dynamic ones; for images as in
LANTERN (2410.03355, section 2.3 of visual-ar-decoding.md). One head serves both, and every target whose
hidden states can be tapped; EAGLE-3 (2503.01840) grows the same trees with another head.

Candidates are always the likeliest ones. EAGLE-1 draws those of its static tree at random when it samples,
and judges them by recursive rejection; ours are picked without chance, for which `sample_and_match` is exact.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mmspec.decoding.draft import Draft
from mmspec.decoding.image_grid import FREE, ImageGrid
from mmspec.decoding.interfaces import PromptOutput, Request
from mmspec.decoding.sampling import NEG_INF, Sampler, guide
from mmspec.drafting.feature_session import FeatureDrafter, FeatureSession
from mmspec.drafting.growth import TreeGrowth, gather_rows
from mmspec.drafting.tree import choose_tree
from mmspec.models.eagle import EagleHead
from mmspec.models.eagle3 import Eagle3Head
from mmspec.targets.causal import CausalTarget

__all__ = ["Eagle3Drafter", "EagleDrafter"]


class EagleSession(FeatureSession):
    """A head that grows a tree by one pass a level."""

    def __init__(
        self,
        drafter: FeatureDrafter,
        target: CausalTarget,
        requests: Sequence[Request],
        prefill: PromptOutput,
        sampler: Sampler,
    ) -> None:
        super().__init__(drafter, target, requests, prefill, sampler)
        grids = [request.grid for request in requests if request.grid is not None]
        self.names = self.head.draft_tokens
        self.grammar = Grammar(grids, target.device, self.names) if grids else None

    def propose(self, root: Tensor, emitted: Tensor, history: Sequence[Sequence[int]]) -> Draft:
        growth = TreeGrowth(self.shape, root, self.names)
        hidden = self._read_committed(root, history)[:, None]  # [R, w, d] at the nodes expanded last
        while True:
            parent = growth.grow(self._distribution(self._guided(hidden, emitted + growth.level)))
            if growth.is_grown:
                return growth.draft()
            before = gather_rows(hidden, self._copied(parent))
            reached = growth.ancestors[:, -growth.tokens.shape[1] :]
            hidden = self._read(growth.tokens, before, reached, growth.depths)

    def _guided(self, hidden: Tensor, index: Tensor) -> Tensor:
        """[B, w, V'] logits, by states [R, w, d], of the tokens at output index [B]."""
        logits = guide(self.head.logits(hidden, self.target.head).float(), self.sampler.guidance_scale)
        return logits if self.grammar is None else self.grammar(logits, index)


class EagleDrafter(FeatureDrafter):
    """A tree of the likeliest continuations by a head that predicts the target's hidden states.

    Args:
        model: the trained head.
        num_draft_tokens: nodes of a dynamic tree, the root not counted; what the head's config says if None.
        depth: its deepest level; that of the config if None, but no more than there are nodes.
        top_k: nodes that it expands on each level, and children of each; likewise.
        tree: "dynamic"; or a static one: a name in `NAMED_TREES`, or the parents of its nodes, the root (0)
            first.

    Raises:
        InputError: a value outside its range, or sizes of a dynamic tree beside a static one.
    """

    title = "an EAGLE head"
    session = EagleSession

    def __init__(
        self,
        model: EagleHead | Eagle3Head,
        num_draft_tokens: int | None = None,
        depth: int | None = None,
        top_k: int | None = None,
        tree: str | Sequence[int] = "dynamic",
    ) -> None:
        super().__init__(model, choose_tree(model.config, num_draft_tokens, depth, top_k, tree))


class Eagle3Drafter(EagleDrafter):
    """As EAGLE, by a head that reads hidden states of three depths (EAGLE-3, 2503.01840).

    Args: as of `EagleDrafter`.
    """

    title = "an EAGLE-3 head"


class Grammar:
    """What the layout of an image allows at each place of the output.

    Args:
        grids: one for each row.
        device: where the logits are.
        names: [V'] the tokens that the logits are of; None for all.
    """

    def __init__(self, grids: Sequence[ImageGrid], device: torch.device, names: Tensor | None = None) -> None:
        self.names = names
        self.codes = grids[0].codebook_size
        length = max(grid.length for grid in grids) + 1  # one place more stands for all beyond the image
        rows = [[*grid.forced, *[FREE] * (length - grid.length)] for grid in grids]
        self.forced = torch.tensor(rows, device=device)

    def __call__(self, logits: Tensor, index: Tensor) -> Tensor:
        """Exclude what may not stand at output index [B] from the logits [B, w, V']."""
        forced = self.forced.gather(1, index[:, None].clamp(max=self.forced.shape[1] - 1))
        token = torch.arange(logits.shape[-1], device=logits.device) if self.names is None else self.names
        allowed = torch.where(forced == FREE, token < self.codes, token == forced)
        return logits.masked_fill(~allowed[:, None], NEG_INF)
