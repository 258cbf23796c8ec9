"""A window of continuous tokens that the target drafts for itself, with fixed noise for each place.

A place whose condition hardly changes draws nearly the same vector again, because its noise is the same (GS,
2510.24211, for discrete tokens). `SharedNoise` defines how close is close enough; at tolerance 0 the vectors
are those of plain decoding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmspec.core.canvas import Canvas
from mmspec.core.distributions import Continuous, Distribution
from mmspec.core.draft import Draft, DraftKind, Tree
from mmspec.core.indexing import pick
from mmspec.core.interfaces import AnyTarget, DraftSession, TargetOutput
from mmspec.core.session import PromptBatch, SessionDrafter
from mmspec.core.verdict import Path
from mmspec.errors import InputError
from mmspec.validation import is_integer

__all__ = ["VectorWindowDrafter"]

MAX_WINDOW = 128


class VectorWindowSession(DraftSession):
    """Window of drafts of one batch.

    Attributes:
        values: [B, n, d] the target's draws after each node of the last draft.
        accepted: [B] how many of its tokens were accepted.
    """

    values: Tensor
    accepted: Tensor

    def __init__(self, drafter: VectorWindowDrafter, batch: PromptBatch) -> None:
        self.window, self.begun = drafter.window, False

    def propose(self, canvas: Canvas) -> Draft:
        root = canvas.root
        if not self.begun:  # there are no draws after the prompt yet: the first vector fills the window
            self.values, self.accepted, self.begun = root[:, None], torch.zeros_like(canvas.emitted), True
        scored = self.values.shape[1]
        # the value after node i is the candidate for node i - accepted of the new window; the last repeats
        node = (self.accepted[:, None] + torch.arange(self.window, device=root.device)).clamp_max(scored - 1)
        tokens = pick(self.values, node)
        tokens[:, 0] = root
        place = canvas.emitted[:, None] - 1 + torch.arange(self.window, device=root.device)
        valid = place < canvas.stopping[0].max_new_tokens
        valid[:, 0] = True
        return Tree.chain(tokens, DraftKind.COUPLED, valid=valid)

    def observe(self, draft: Tree, output: TargetOutput, scores: Distribution, verdict: Path) -> None:
        self.values, self.accepted = verdict.values, verdict.accepted


class VectorWindowDrafter(SessionDrafter):
    """Drafts a window of vectors: the target's draws for these places in the last round.

    Args:
        window: places per forward pass, 1 (plain decoding) to 128, the root's included.

    Raises:
        InputError: `window` is out of range.
    """

    kind = DraftKind.COUPLED
    distribution = Continuous
    session = VectorWindowSession

    def __init__(self, window: int = 16) -> None:
        if not is_integer(window) or not 1 <= window <= MAX_WINDOW:
            raise InputError("window", window, f"must be an integer from 1 to {MAX_WINDOW}")
        self.window = self.max_nodes = window

    def check(self, target: AnyTarget) -> None:
        if not target.vector_size or target.any_order:
            raise InputError("accelerator", "shared_noise", "needs a causal model of continuous tokens")
