"""ASSD (2504.20456): an any-subset density model drafts several gaps for itself at once.

One forward pass predicts the next k gaps given the decided ones. A second forward pass verifies them in
order. The first gap has the same context in both, and is always accepted.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from mmspec.core.canvas import Canvas
from mmspec.core.distributions import Categorical, Scores
from mmspec.core.draft import Draft, DraftKind, Tree
from mmspec.core.interfaces import DraftSession, Target
from mmspec.core.random_stream import Purpose
from mmspec.core.session import PromptBatch, SessionDrafter
from mmspec.errors import InputError
from mmspec.registry import require_known
from mmspec.trees.siblings import kind_of
from mmspec.validation import check_draft_tokens
from mmspec_extras.families.xlnet.target import AnySubsetTarget


class AnySubsetSession(DraftSession):
    """Drafts of a batch of texts with gaps."""

    def __init__(self, drafter: AnySubsetDrafter, batch: PromptBatch) -> None:
        self.drafter, self.random, self.sampler = drafter, batch.random, batch.sampler
        self.state = drafter.target.arrange(batch.prompts)

    def propose(self, canvas: Canvas) -> Draft:
        drafter, state, kind = self.drafter, self.state, self.drafter.kind
        known = torch.arange(canvas.tokens.shape[1], device=canvas.device)
        gaps = known.where(known < canvas.emitted[:, None], state.places.shape[1])
        tokens = drafter.target.filled(state, canvas.tokens, gaps)
        ranks = state.ranks
        # all open gaps have one rank, so that none sees another
        ranks = torch.where(ranks >= canvas.emitted[:, None], canvas.emitted[:, None], ranks)
        ahead = canvas.emitted[:, None] + torch.arange(drafter.num_draft_tokens, device=canvas.device)
        logits = drafter.target.predict(state, tokens, ranks, ahead)
        self.passes += 1
        q: Scores = self.sampler.scores(logits)
        purpose = Purpose.DRAFT if kind is DraftKind.IID else Purpose.TARGET
        drafted: Tensor = q.sample(self.random, ahead, purpose)
        chain = torch.cat([canvas.root[:, None], drafted], 1)
        return Tree.chain(chain, kind, Categorical(q.p) if kind is DraftKind.IID else None)


class AnySubsetDrafter(SessionDrafter):
    """Drafts the next gaps of a text with a forward pass of the target itself (ASSD, 2504.20456).

    Args:
        num_draft_tokens: number of gaps; 1 gains nothing and 2 little, because drafting takes a forward pass.
        sampling: "sampled", verified by `speculative_sampling`; or "coupled", with the target's own noise.

    Raises:
        InputError: a value is out of range.
    """

    session = AnySubsetSession
    target: AnySubsetTarget

    def __init__(self, num_draft_tokens: int = 5, sampling: str = "sampled") -> None:
        self.num_draft_tokens = check_draft_tokens(num_draft_tokens)
        require_known("sampling", sampling, ("sampled", "coupled"))
        self.kind, self.sampling = kind_of(sampling), sampling
        self.max_nodes = num_draft_tokens + 1

    def fit(self, target: Target[Any]) -> AnySubsetDrafter:
        if not isinstance(target, AnySubsetTarget):
            rule = "needs an any-subset density model such as XLNet, and a text with gaps"
            raise InputError("accelerator", "assd", rule)
        fitted = copy.copy(self)
        fitted.target = target
        return fitted
