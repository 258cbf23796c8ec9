"""Drafter of Improving MCSD (2409.10644): level 1 from the target's predictions, and a stop model.

The target has predicted the place of level 1 already, after a candidate rejected for the root's place.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mmspec.core.canvas import Canvas
from mmspec.core.distributions import Scores
from mmspec.core.draft import Tree
from mmspec.core.indexing import take
from mmspec.core.interfaces import TargetOutput
from mmspec.core.rows import named
from mmspec.core.session import PromptBatch
from mmspec.core.verdict import Path
from mmspec.methods.draft_model.drafter import DraftModelDrafter, DraftModelSession
from mmspec.targets import CausalTarget
from mmspec.trees.growth import StaticTree, TreeGrowth
from mmspec.trees.siblings import SiblingDraws
from mmspec.validation import require_number

PRIOR = 4.0  # accepted levels with which every row begins, as many as expected


class TargetStartSession(DraftModelSession):
    """Draft model of one batch, and what the target's rejections have told of each row.

    Attributes:
        predicted: [B, V] the target's distribution after the first candidate that it rejected in the last
            round.
        is_known: [B] whether it rejected one.
        levels: [B, 2] number of levels in which a candidate was accepted, and the number that the draft
            model's probabilities had let expect.
        paths: [B, n] log-probabilities of the paths of the last draft.
    """

    row_fields = named("predicted", "is_known", "levels")
    scratch = DraftModelSession.scratch | {"paths"}

    drafter: TargetStartDrafter
    paths: Tensor

    def __init__(self, drafter: DraftModelDrafter, batch: PromptBatch) -> None:
        super().__init__(drafter, batch)
        logits = batch.prefill.logits
        rows = len(batch.requests)
        self.predicted = logits.new_zeros(rows, self.vocabulary, dtype=torch.float32)
        self.is_known = torch.zeros(rows, dtype=torch.bool, device=logits.device)
        self.levels = torch.full((rows, 2), PRIOR, dtype=torch.float32, device=logits.device)

    @property
    def trust(self) -> Tensor:
        """[B, 1] log of the factor between the draft model's probabilities and what the target accepts."""
        trust: Tensor = self.levels.log().diff(dim=-1).neg()
        return trust

    def _tree(self, canvas: Canvas, shape: StaticTree, logits: Tensor) -> Tree:
        noise = self.sampler, self.random, canvas.emitted
        draws = SiblingDraws(self.drafter.kind, *noise, self.vocabulary)
        growth = TreeGrowth(shape, canvas.root, draws)
        while True:
            q = self.sampler.warp(logits).softmax(-1)
            if not growth.level:
                share = self.drafter.share * self.is_known[:, None, None]
                q = torch.lerp(q, self.predicted[:, None].to(q.dtype), share.to(q.dtype))
            growth.grow(q.log(), self.trust.expand(growth.tokens.shape))
            if growth.is_grown:
                draft, self.paths = growth.draft()
                return draft
            logits = self._score(growth.nodes(growth.tokens))

    def observe(self, draft: Tree, output: TargetOutput, scores: Scores, verdict: Path) -> None:
        is_own = draft is self.proposed
        super().observe(draft, output, scores, verdict)
        if not draft.max_depth:
            self.is_known = torch.zeros_like(self.is_known)
            return
        rejected = take(draft.children, verdict.last)[:, 0]
        self.is_known = rejected >= 0
        self.predicted = take(scores.logits, rejected.clamp_min(0)).softmax(-1).float()
        if is_own:
            self._count(draft, verdict)

    def _count(self, draft: Tree, verdict: Path) -> None:
        """Count the levels below the accepted nodes: those accepted, and those expected."""
        given = self.paths - self.paths.gather(1, draft.parents) - self.trust
        chances = given.exp().where(draft.valid, 0.0)[:, 1:]
        below = torch.zeros_like(given).scatter_add(1, draft.parents[:, 1:], chances).clamp_max(1.0)
        step = torch.arange(verdict.nodes.shape[1], device=given.device)
        expected = below.gather(1, verdict.nodes).where(step <= verdict.accepted[:, None], 0.0).sum(-1)
        self.levels = self.levels + torch.stack([verdict.accepted, expected], -1)


class TargetStartDrafter(DraftModelDrafter):
    """Drafts a tree, with level 1 drawn from a mixture of the draft model and the target's own predictions.

    Args:
        model: the draft model.
        tree: see `DraftModelDrafter`.
        sampling: see `DraftModelDrafter`.
        share: weight of the target's prediction in the mixture, 0 to 1.

    Raises:
        InputError: a value is out of range, or siblings cannot be drawn in the tree.
    """

    runs_ahead = False
    session = TargetStartSession

    def __init__(
        self,
        model: CausalTarget | type[CausalTarget],
        tree: str | int | Sequence[int] = "3x1x1x1x1",
        sampling: str = "coupled",
        share: float = 0.5,
    ) -> None:
        require_number("share", share, 0.0, 1.0, "must be a weight from 0 to 1")
        super().__init__(model, None, sampling, tree)
        self.share = share
