"""Loss of the head of vertical drafts, on images that its target draws itself.

For every cell of an image, the target's states at the cell above and its guided distribution are kept: the
input of the head, and its goal. Each batch of images is used in many steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import kl_div

from mmspec.core.canvas import Canvas
from mmspec.core.distributions import Scores
from mmspec.core.draft import Tree
from mmspec.core.image_grid import FREE, ImageGrid, require_grid
from mmspec.core.indexing import put
from mmspec.core.interfaces import DraftSession, PromptOutput, Request, TargetOutput
from mmspec.core.random_stream import RandomStream
from mmspec.core.sampling import Sampler
from mmspec.core.verdict import Path
from mmspec.heads.model import HIDDEN
from mmspec.targets import CausalTarget
from mmspec.training.data.sequences import PromptData, TensorBatch, decode
from mmspec.training.losses.base import DrafterLoss, learnt_images
from mmspec_extras.methods.ssd.drafter import VerticalDrafter, VerticalSession, read_below
from mmspec_extras.methods.ssd.head import VerticalHead

__all__ = ["CellBatch", "VerticalLoss"]

KEPT = 8  # batches of images; every step uses one of them
EVERY = 8  # steps from one new batch to the next
CELLS = 2048  # largest number of cells of a step
DIVERGENCE = 0.1
EXCLUDED = -1e4  # in place of -inf, which has no gradient


@dataclass(frozen=True)
class CellBatch(TensorBatch):
    """Cells of B images, and the target's predictions for the cells below them.

    Attributes:
        states: [B, n, s] at n cells, as the head reads them.
        goal: [B, n, V] guided logits at the cells below.
        is_code: [1, 1, V] whether a cell may hold each token.
    """

    states: Tensor
    goal: Tensor
    is_code: Tensor


@dataclass(frozen=True)
class DrawnImages:
    """Images as the target has read them.

    Attributes:
        states: [B, L, s] at each place of the output, as the head reads them.
        hidden: [R, L, d] input of the target's output matrix; R is B, or 2B with guidance.
        grid: grid of each image.
        sampler: joins the logits of both prompts.
    """

    states: Tensor
    hidden: Tensor
    grid: ImageGrid
    sampler: Sampler


class RecordingSession(VerticalSession):
    """A session that records the target's states at every place.

    The target reads a place again in every round until it is committed, so that the last record is that of
    the committed token.
    """

    states: Tensor
    hidden: Tensor

    def propose(self, canvas: Canvas) -> Tree:
        self._root = canvas.emitted[:, None] - 1
        return super().propose(canvas)

    def observe(self, draft: Tree, output: TargetOutput, scores: Scores, verdict: Path) -> None:
        super().observe(draft, output, scores, verdict)
        hidden, length = output.taps[HIDDEN], max(each.length for each in self.layouts if each is not None)
        if not hasattr(self, "states"):
            self.states = self.read.states.new_zeros(
                len(draft.tokens), length + 1, self.read.states.shape[-1]
            )
            self.hidden = hidden.new_zeros(len(hidden), length + 1, hidden.shape[-1])
        place = (self._root + torch.arange(draft.tokens.shape[1], device=self._root.device)).clamp_max(length)
        put(self.states, place, self.read.states)
        put(self.hidden, place.repeat(len(hidden) // len(place), 1), hidden)


class RecordingDrafter(VerticalDrafter):
    """A drafter of vertical drafts that records its sessions, also those of its copies for a target."""

    session = RecordingSession

    def __init__(self, model: VerticalHead) -> None:
        super().__init__(model, 1, "exact")  # plain decoding; a window takes longer in large batches
        self.taps = tuple(dict.fromkeys((*model.taps, HIDDEN)))
        self.kept: list[RecordingSession] = []

    def start(
        self, requests: Sequence[Request], prefill: PromptOutput, sampler: Sampler, random: RandomStream
    ) -> DraftSession:
        session = super().start(requests, prefill, sampler, random)
        self.kept.append(cast(RecordingSession, session))
        return session


class VerticalLoss(DrafterLoss):
    """Total variation and a share of the divergence from the head's to the target's guided distributions."""

    head: VerticalHead
    outer = ("of_states", "to_states")

    def __init__(self, head: VerticalHead, target: CausalTarget) -> None:
        super().__init__(head, target)
        self.drawn: deque[DrawnImages] = deque(maxlen=KEPT)

    def make(self, data: PromptData, step: int, process: int) -> CellBatch:  # type: ignore[override]
        """Return the cells for a step, from recently drawn images."""
        if step % EVERY == 0 or not self.drawn:
            self.drawn.append(self._draw(data, step, process))
        rng = torch.Generator().manual_seed(step)
        return self._cells(self.drawn[int(torch.randint(len(self.drawn), (), generator=rng))], rng)

    @torch.no_grad()
    def _draw(self, data: PromptData, step: int, process: int) -> DrawnImages:
        """Draw images of new prompts with the target."""
        trial = data.prompts(step, process)
        drafter = RecordingDrafter(self.head)
        decode(self.target, drafter, trial, step * 1009 + process)
        (session,), length = drafter.kept, trial.new_tokens
        states, hidden = session.states[:, :length], session.hidden[:, :length]
        grid = require_grid(trial.requests[0].layout, drafter.title)
        return DrawnImages(states, hidden, grid, trial.sampler)

    @torch.no_grad()
    def _cells(self, drawn: DrawnImages, rng: torch.Generator) -> CellBatch:
        """Return cells of images, and the target's predictions for the cells below them."""
        grid = drawn.grid
        above = [
            place
            for place, token in enumerate(grid.forced[: grid.length - grid.stride])
            if token == FREE and grid.forced[place + grid.stride] == FREE
        ]
        chosen = torch.randperm(len(above), generator=rng)[: max(1, CELLS // len(drawn.states))]
        above = [above[index] for index in chosen.tolist()]
        before = [place + grid.stride - 1 for place in above]  # their states give the logits
        goal = drawn.sampler.guided(self.target.head(drawn.hidden[:, before]))
        codes = torch.arange(goal.shape[-1], device=goal.device) < grid.codebook_size
        return CellBatch(drawn.states[:, above], goal, codes[None, None])

    def measure(self, batches: Iterable[Any]) -> dict[str, Any]:
        """Return the config attributes that describe the images of the training."""
        return learnt_images(self.target, self.drawn[-1].grid if self.drawn else None)

    def forward(self, batch: CellBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss, and figures: the total variation, averaged over the cells."""
        logits = read_below(self.head, self.target, batch.states, batch.is_code)
        log_q = logits.float().clamp_min(EXCLUDED).log_softmax(-1)
        goal = batch.goal.masked_fill(~batch.is_code, EXCLUDED)
        log_p = goal.float().clamp_min(EXCLUDED).log_softmax(-1)
        distance = (log_q.exp() - log_p.exp()).abs().sum(-1).mean() / 2
        divergence = kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1).mean()
        return distance + DIVERGENCE * divergence, {"distance": distance.detach()}
