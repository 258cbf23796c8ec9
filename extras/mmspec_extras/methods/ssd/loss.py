"""Loss of the head of vertical drafts, on images that its target draws itself.

For every cell of an image, the target's states at the cell above and its guided distribution are kept: the
input of the head, and its goal. Each batch of images is used in many steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import kl_div

from mmspec.core.distributions import Scores
from mmspec.core.draft import Tree
from mmspec.core.image_grid import FREE, ImageGrid, require_grid
from mmspec.core.interfaces import TargetOutput
from mmspec.core.plain import NoDrafter
from mmspec.core.sampling import Sampler
from mmspec.core.verdict import Path
from mmspec.heads.model import HIDDEN
from mmspec.targets import CausalTarget
from mmspec.training.data.sequences import PromptData, TensorBatch, decode
from mmspec.training.losses.base import DrafterLoss, learnt_images
from mmspec_extras.methods.ssd.drafter import VerticalDrafter, read_below
from mmspec_extras.methods.ssd.head import VerticalHead

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
    """Images as the target has read them, without their last tokens.

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


class Recorder(NoDrafter):
    """Plain decoding; a window would take longer in large batches.

    Attributes:
        seen: for each tap, the target's states [R, 1, d] at every token that it has read.
    """

    def __init__(self, taps: Sequence[int]) -> None:
        self.taps = tuple(dict.fromkeys((*taps, HIDDEN)))
        self.seen: dict[int, list[Tensor]] = {tap: [] for tap in self.taps}

    def observe(self, draft: Tree, output: TargetOutput, scores: Scores, verdict: Path) -> None:
        for tap, states in output.taps.items():
            self.seen[tap].append(states.clone())


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
        trial, recorder = data.prompts(step, process), Recorder(self.head.taps)
        decode(self.target, recorder, trial, step * 1009 + process)
        read = {tap: torch.cat(states, 1) for tap, states in recorder.seen.items()}
        grid = require_grid(trial.requests[0].layout, VerticalDrafter.title)
        return DrawnImages(self.head.join(read, len(trial.requests)), read[HIDDEN], grid, trial.sampler)

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
