"""Jacobi windows of heads on the target's hidden states, of its last draft and of the newest tokens."""

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

SAMPLED = 16  # numbers of a codebook that identify it


@dataclass(frozen=True)
class Read(Rows):
    """Tokens, hidden states and logits of a draft that the target has scored."""

    row_fields = named("tokens", "states", "logits")

    tokens: Tensor  # [B, n] of its nodes; FREE for the end of a prompt
    states: Tensor  # [B, n, s] the kept part of the target's
    logits: Tensor  # [B, n, V] guided, not warped


class StateWindowSession(JacobiSession):
    """Base of sessions that keep the target's states of the last draft and of the newest committed tokens.

    A subclass calls `_enter_committed` once a round, in `propose`.

    Attributes:
        read: the last draft.
        committed: [B, C, s] the target's states of the newest C committed tokens.
        words: [B, C] those tokens; FREE for the end of the prompt.
        count: [B] number of tokens among the C; the others are padding.
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
        """Return the part of states [B, n, 2d * taps] of `WindowHead.join` to keep: [B, n, s], here all."""
        return states

    def _enter_committed(self) -> None:
        """Append the last accepted nodes, and the root before them, to the newest committed tokens."""
        accepted, size = self.observed.accepted, self.committed.shape[1]
        newest = accepted[:, None] + 1 + torch.arange(size, device=accepted.device)
        self.committed = pick(torch.cat([self.committed, self.read.states], 1), newest)
        self.words = pick(torch.cat([self.words, self.read.tokens], 1), newest)
        self.count = (self.count + accepted + 1).clamp_max(size)


class StateWindowDrafter(TrainedDrafter, WindowDrafter):
    """Base of drafters that fill a Jacobi window with a head on the target's hidden states."""

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
            rule = "must be a head that was trained for this target's image tokenizer"
            raise InputError("drafter", given, rule)

    def admit(self, requests: Sequence[Request], sampler: Sampler, stopping: Stopping) -> None:
        super().admit(requests, sampler, stopping)
        if sampler.is_guided and not self.model.config.guided:
            rule = "must be 1 with this head, which was not trained under guidance"
            raise InputError("guidance_scale", sampler.guidance_scale, rule)
        columns = self.model.config.columns
        for layout in (request.layout for request in requests if request.layout is not None and columns):
            if not isinstance(layout, ImageGrid) or layout.columns != columns:
                rule = (
                    f"must have rows of {columns} tokens, as in the head's training; `mmspec train drafter` "
                    "trains for other sizes with --width"
                )
                raise InputError("image size", str(layout), rule)


def codebook_sample(target: AnyTarget) -> Tensor:
    """Return the first numbers of a target's codebook, in float32 on the CPU; zeros without one."""
    if target.codebook is None:
        return torch.zeros(SAMPLED, dtype=torch.float32, device="cpu")
    return target.codebook.detach().flatten()[:SAMPLED].float().cpu()
