"""Drafter of Arbitrage (2512.05033): whole steps of a smaller model, and rest while the target writes one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mmspec.core.canvas import Canvas
from mmspec.core.distributions import Scores
from mmspec.core.draft import Draft, Tree
from mmspec.core.indexing import take
from mmspec.core.interfaces import AnyTarget, TargetOutput
from mmspec.core.rows import named
from mmspec.core.session import PromptBatch
from mmspec.core.verdict import Path
from mmspec.errors import InputError
from mmspec.methods.draft_model.drafter import DraftModelDrafter
from mmspec.validation import is_integer
from mmspec_extras.draft_models import RestingSession, TextModelDrafter


class StepSession(RestingSession):
    """Steps of one batch.

    Attributes:
        left: [B] number of tokens of the present step that the target still writes itself, at most.
    """

    row_fields = named("left")

    drafter: StepDrafter

    def __init__(self, drafter: DraftModelDrafter, batch: PromptBatch) -> None:
        super().__init__(drafter, batch)
        device = batch.prefill.logits.device
        self.left = torch.zeros(len(batch.requests), dtype=torch.long, device=device)
        self.ends = torch.tensor(self.drafter.step_ends, dtype=torch.long, device=device)

    def resting(self) -> Tensor:
        return self.left > 0

    def propose(self, canvas: Canvas) -> Draft:
        draft = super().propose(canvas)
        ended = torch.isin(draft.tokens, self.ends).roll(1, 1)  # the token before
        ended[:, :2] = False  # of the root, and of the first token, which may follow the end of a step
        return replace(draft, valid=draft.valid & ~ended.cumsum(-1).bool())

    def observe(self, draft: Tree, output: TargetOutput, scores: Scores, verdict: Path) -> None:
        super().observe(draft, output, scores, verdict)
        refused = draft.valid[:, 1:].any(-1) & (verdict.accepted == 0)
        left = self.left.where(~refused, self.drafter.max_nodes - 1) - 1
        ends = torch.isin(take(verdict.values, verdict.accepted), self.ends)
        self.left = left.clamp_min(0).where(~ends, 0)


class StepDrafter(TextModelDrafter):
    """Drafts a step with a smaller model, and rests while the target writes one.

    Args:
        model: the draft model.
        num_draft_tokens: largest number of tokens of a step.
        step_ends: ids of the tokens that end a step; without any, all steps have the largest length.

    Raises:
        InputError: a value is out of range; in `fit`, an id is not a token of the target.
    """

    session = StepSession

    def __init__(self, model: Any, num_draft_tokens: int = 32, step_ends: Sequence[int] = ()) -> None:
        super().__init__(model, num_draft_tokens)
        if not all(is_integer(token) and token >= 0 for token in step_ends):
            raise InputError("step_ends", step_ends, "must be ids of tokens")
        self.step_ends = tuple(step_ends)

    def check(self, target: AnyTarget) -> None:
        super().check(target)
        if any(token >= target.vocabulary for token in self.step_ends):
            rule = f"must be ids of tokens, below {target.vocabulary}"
            raise InputError("step_ends", self.step_ends, rule)
