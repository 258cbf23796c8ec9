"""Jacobi windows of heads that read the target's hidden states: of its last draft, and of newest tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmspec.core.canvas import Stopping
from mmspec.core.distributions import Scores
from mmspec.core.draft import Tree
from mmspec.core.image_grid import FREE, ImageGrid
from mmspec.core.indexing import pick
from mmspec.core.interfaces import Request, TargetOutput
from mmspec.core.rows import RowField, Rows, named
from mmspec.core.sampling import Sampler
from mmspec.core.session import PromptBatch
from mmspec.core.verdict import Path
from mmspec.errors import InputError
from mmspec.heads.drafter import TrainedDrafter
from mmspec.heads.model import WindowHead
from mmspec.targets import AnyTarget
from mmspec.trees.jacobi_session import JacobiSession, WindowDrafter

__all__ = ["Read", "StateWindowDrafter", "StateWindowSession", "codebook_sample"]

SAMPLED = 16  # numbers of a codebook


@dataclass(frozen=True)
class Read(Rows):
    """Tokens, hidden states and logits of a draft that the target has scored."""

    row_fields = named("tokens", "states", "logits")

    tokens: Tensor  # [B, n] of its nodes; FREE for the end of a prompt
    states: Tensor  # [B, n, s] what is kept of the target's
    logits: Tensor  # [B, n, V] guided, not warped


class StateWindowSession(JacobiSession):
    """Base of sessions that keep what the target made of the last draft and of the newest committed tokens.

    A subclass calls `_enter_committed` once a round, as it proposes.

    Attributes:
        read: the last draft.
        committed: [B, C, s] the target's states of the newest C committed tokens.
        words: [B, C] those tokens; FREE for the end of the prompt.
        count: [B] how many of the C there are.
    """

    row_fields = named(
        *("read", "count"),
        RowField("committed", newest_last=True),
        RowField("words", FREE, newest_last=True),
    )

    def __init__(self, drafter: StateWindowDrafter, batch: PromptBatch, size: int) -> None:
        super().__init__(drafter, batch)
        self.head, self.target, prefill = drafter.model, drafter.fitted_target, batch.prefill
        rows, device = len(batch.requests), prefill.logits.device
        last = {tap: torch.cat([each[:, -1:] for each in states]) for tap, states in prefill.taps.items()}
        tokens = torch.full((rows, 1), FREE, device=device)
        self.read = Read(tokens, self._kept(self.head.join(last, rows)), batch.sampler.guided(prefill.logits))
        self.committed = self.read.states.new_zeros(rows, size, self.read.states.shape[-1])
        self.words = tokens.expand(-1, size)
        self.count = torch.zeros(rows, dtype=torch.long, device=device)

    def observe(self, draft: Tree, output: TargetOutput, scores: Scores, verdict: Path) -> None:
        super().observe(draft, output, scores, verdict)
        states = self.head.join(output.taps, len(draft.tokens))
        logits = scores.logits if self.sampler.only_guides else self.sampler.guided(output.logits)
        if self.drafter.branches:
            nodes = self._path(verdict)
            states, logits = pick(states, nodes), pick(logits, nodes)
        self.read = Read(self.observed.draft.tokens, self._kept(states), logits)

    def _kept(self, states: Tensor) -> Tensor:
        """Choose what is kept of states [B, n, 2d * taps] of `WindowHead.join`: [B, n, s], here all."""
        return states

    def _enter_committed(self) -> None:
        """Let the nodes that were accepted last, and the root before them, be the newest committed ones."""
        accepted, size = self.observed.accepted, self.committed.shape[1]
        newest = accepted[:, None] + 1 + torch.arange(size, device=accepted.device)
        self.committed = pick(torch.cat([self.committed, self.read.states], 1), newest)
        self.words = pick(torch.cat([self.words, self.read.tokens], 1), newest)
        self.count = (self.count + accepted + 1).clamp_max(size)


class StateWindowDrafter(TrainedDrafter, WindowDrafter):
    """Base of drafters that fill a Jacobi window with the help of a head on the target's hidden states."""

    model: WindowHead

    def __init__(self, model: WindowHead, window: int | None, *settings: Any) -> None:
        super().__init__(model.config.window if window is None else window, *settings)
        self.model, self.taps = model, model.taps

    def check(self, target: AnyTarget) -> None:
        WindowDrafter.check(self, target)
        super().check(target)
        learnt = self.model.config.codebook
        known = torch.tensor(learnt, dtype=torch.float32, device="cpu")
        if learnt and not torch.allclose(codebook_sample(target), known, 0.02, 1e-3):
            given = f"{self.title} for images of another codebook"
            raise InputError("drafter", given, "a head that was trained for this target's image tokenizer")

    def admit(self, requests: Sequence[Request], sampler: Sampler, stopping: Stopping) -> None:
        super().admit(requests, sampler, stopping)
        if sampler.is_guided and not self.model.config.guided:
            allowed = "1, or a head that was trained under guidance: this one knows conditional states alone"
            raise InputError("guidance_scale", sampler.guidance_scale, allowed)
        columns = self.model.config.columns
        for layout in (request.layout for request in requests if request.layout is not None and columns):
            if not isinstance(layout, ImageGrid) or layout.columns != columns:
                learnt = f"rows of {columns} tokens, which this head has learnt"
                raise InputError("image size", str(layout), f"{learnt}; `mmspec train drafter` takes --width")


def codebook_sample(target: AnyTarget) -> Tensor:
    """The first numbers of a target's codebook, in float32 on the CPU; zeros without one."""
    if target.codebook is None:
        return torch.zeros(SAMPLED, dtype=torch.float32, device="cpu")
    return target.codebook.detach().flatten()[:SAMPLED].float().cpu()
