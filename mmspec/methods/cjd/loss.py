"""Loss of the head of corrected Jacobi decoding, on windows that it drafted itself.

Training is on policy: images are decoded with the head in training, and the target scores its drafts as in
verification, which gives the true distribution of each place of a window.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import kl_div

from mmspec.core.canvas import Canvas, Stopping
from mmspec.core.decoder import Decoder
from mmspec.core.distributions import Scores
from mmspec.core.draft import Tree
from mmspec.core.image_grid import FREE, Layout
from mmspec.core.interfaces import TargetOutput, TargetState
from mmspec.core.loop import Batch, begin
from mmspec.core.random_stream import RandomStream
from mmspec.core.statistics import DecodingStats
from mmspec.core.verdict import Path
from mmspec.errors import InputError
from mmspec.methods.cjd.drafter import CorrectedDrafter, CorrectedSession, StaleWindow
from mmspec.methods.cjd.head import EXCLUDED, CorrectorHead
from mmspec.open_types import Keywords
from mmspec.targets import CausalTarget
from mmspec.training.data.sequences import PromptData, TensorBatch, Trial
from mmspec.training.losses.base import DrafterLoss, learnt_images
from mmspec.trees.jacobi_session import Candidates, Window
from mmspec.trees.rejection import SpeculativeSampling
from mmspec.trees.window import LastDraft
from mmspec.validation import is_integer

__all__ = ["CorrectorLoss", "WindowBatch", "correct_window"]

LIVE = 4  # batches of images at once, a quarter of an image apart, so that steps cover all parts of images
KEPT = 12  # newest windows of each batch, from some of which every step learns
LEARNT = 6
DIVERGENCE_STEPS = 1000.0  # in which the weight of the Kullback-Leibler part falls by a factor of e
LEAST_DIVERGENCE = 0.05
FRONT, EVERYWHERE, REACH = 1.5, 0.4, 5.0  # weight of place j: EVERYWHERE + FRONT exp(-j / REACH)


@dataclass(frozen=True)
class WindowBatch(TensorBatch):
    """Windows of B images, and the target's scores of their drafts.

    Attributes:
        states: [B, C + n, s] those of the target, where it has read a token.
        old, is_known, logits: see `StaleWindow`.
        new: [B, n] the tokens that were drawn for the slots, the root first.
        goal: [B, n, V] guided logits of the target after each slot.
        counted: [B, n] whether the place after the slot was drawn.
    """

    states: Tensor
    old: Tensor
    is_known: Tensor
    logits: Tensor
    new: Tensor
    goal: Tensor
    counted: Tensor

    @classmethod
    def join(cls, parts: Sequence[WindowBatch]) -> WindowBatch:
        """Join windows of several batches of images."""
        return cls(*(torch.cat([getattr(part, each.name) for part in parts]) for each in fields(cls)))


class RecordingSession(CorrectedSession):
    """A session that records the head's inputs of each round, and the target's scores of the drafts."""

    records: deque[WindowBatch]

    def _kept(self, states: Tensor) -> Tensor:
        return states  # the head's part of them changes in training

    def _stale(self, window: Window) -> StaleWindow:
        stale = super()._stale(window)
        self.states = stale.states
        return replace(stale, states=self.head.of_states(self.states.to(self.head.dtype)))

    def _fill(self, window: Window, last: LastDraft) -> Candidates:
        count = self.drafter.corrected
        tables = self.head.tables(self.target.embed, self.target.head, self.target.dtype)
        self.tables = tables  # the head's weights change in training
        filled = super()._fill(window, last)
        slots = slice(1, count + 1)
        is_drawn = (window.known[:, slots] == FREE) & (window.place[:, slots] < self.layout.length)
        self._drawn = filled.tokens[:, :count], is_drawn
        return filled

    def observe(self, draft: Tree, output: TargetOutput, scores: Scores, verdict: Path) -> None:
        super().observe(draft, output, scores, verdict)
        stale, (new, is_drawn) = self.stale, self._drawn
        goal = self.sampler.guided(output.logits)[:, : new.shape[1]]
        counted = is_drawn & draft.valid[:, 1 : 1 + new.shape[1]]
        # inference tensors cannot enter a loss
        parts = (self.states, stale.old, stale.is_known, stale.logits, new, goal, counted)
        self.records.append(WindowBatch(*(part.clone() for part in parts)))


class RecordingDrafter(CorrectedDrafter):
    """A corrector that drafts its own training data."""

    session = RecordingSession


class Rollout:
    """Images in progress, decoded with the current head.

    Attributes:
        records: their last windows.
        batch: the images; None after one batch ends and before the next begins.
        layout: of the images.
    """

    def __init__(self, drafter: RecordingDrafter, target: CausalTarget) -> None:
        self.drafter, self.target = drafter, target
        self.records: deque[WindowBatch] = deque(maxlen=KEPT)
        self.batch: Batch[TargetState] | None = None
        self.layout: Layout | None = None

    @property
    def share(self) -> float:
        """Decoded share of the images: the least of all."""
        if self.batch is None:
            return 1.0
        canvas = self.batch.canvas
        rows = zip(canvas.output_lengths, canvas.stopping, strict=True)
        return min(length / stopping.max_new_tokens for length, stopping in rows)

    @torch.inference_mode()
    def advance(self, ask: Callable[[], Trial], seed: int) -> None:
        """Decode a round; begin new images where the last ones are done."""
        if self.batch is None:
            asked = ask()
            self.layout = asked.requests[0].layout
            stopping = Stopping(asked.new_tokens, asked.end_token_ids)
            prompts = [request.prompt_tokens for request in asked.requests]
            canvas = Canvas(prompts, stopping, DecodingStats(), self.target.device)
            random = RandomStream.from_seed(seed, len(asked.requests), self.target.device)
            decoder = Decoder(self.drafter, SpeculativeSampling())
            self.batch, _ = begin(self.target, decoder, asked.sampler, asked.requests, canvas, random)
            cast(RecordingSession, self.batch.session).records = self.records
        self.batch.decode_round()
        self.batch.read_round()
        self.batch.tighten()
        if self.batch.canvas.finished:
            self.batch.state.close()
            self.batch = None


class CorrectorLoss(DrafterLoss):
    """Total variation of the corrected distributions to the target's, on the head's own windows.

    The Kullback-Leibler divergence helps in early steps. Places at the front weigh more, as they are verified
    more often.

    Args:
        learnt_window: nodes of the drafted windows, all of which are corrected except the root.

    Raises:
        InputError: `learnt_window` is out of range.
    """

    head: CorrectorHead
    updates: Tensor
    outer = ("of_states", "of_new", "of_old", "flags", "places", "to_states", "corrections")

    def __init__(self, head: CorrectorHead, target: CausalTarget, *, learnt_window: int = 48) -> None:
        super().__init__(head, target)
        if not is_integer(learnt_window) or learnt_window < 2:
            raise InputError("learnt_window", learnt_window, "must be an integer of at least 2")
        drafter = RecordingDrafter(head, learnt_window, learnt_window - 1).fit(target)
        self.rollouts = [Rollout(drafter, target) for _ in range(LIVE)]
        self.register_buffer("updates", torch.zeros((), dtype=torch.long))

    def make(self, data: PromptData, step: int, process: int) -> WindowBatch:  # type: ignore[override]
        """Return the windows of a step, some of them new."""
        index = step % LIVE
        rollout = self.rollouts[index]
        is_new = not rollout.records
        rollout.advance(lambda: data.prompts(step, process), step * 1009 + process)
        while is_new and rollout.share < index / LIVE:  # so that the batches begin and end at other steps
            rollout.advance(lambda: data.prompts(step, process), step * 1009 + process)
        rng = torch.Generator().manual_seed(step)
        known = [record for each in self.rollouts for record in each.records]
        chosen = torch.randint(len(known), (LEARNT - 1,), generator=rng).tolist()
        return WindowBatch.join([rollout.records[-1], *(known[index] for index in chosen)])

    def measure(self, batches: Iterable[object]) -> Keywords:
        """Return attributes of the config that describe the images of the training."""
        return learnt_images(self.target, self.rollouts[0].layout)

    def forward(self, batch: WindowBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss and figures: the total variation at each of the first places."""
        context = self.head.config.context
        states = self.head.of_states(batch.states.to(self.head.dtype))
        stale = StaleWindow(states, batch.old, batch.is_known, batch.logits, context)
        log_q = correct_window(self.head, self.target, stale, batch.new).log_softmax(-1)
        log_p = batch.goal.float().clamp_min(EXCLUDED).log_softmax(-1)
        distance = (log_q.exp() - log_p.exp()).abs().sum(-1) / 2
        divergence = kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)
        share = torch.exp(-self.updates / DIVERGENCE_STEPS).clamp_min(LEAST_DIVERGENCE)
        place = torch.arange(distance.shape[1], device=distance.device)
        weight = (EVERYWHERE + FRONT * torch.exp(-place / REACH)) * batch.counted
        loss = ((distance + share * divergence) * weight).sum() / weight.sum()
        if self.training:
            self.updates.add_(1)
        seen = batch.counted.sum(0).clamp_min(1)
        return loss, {"distance": ((distance.detach() * batch.counted).sum(0) / seen)[:8]}


def correct_window(head: CorrectorHead, target: CausalTarget, stale: StaleWindow, new: Tensor) -> Tensor:
    """Correct all n places of a window in one pass, given the tokens [B, n] that were drawn.

    Returns:
        [B, n, V] guided logits of the place after each slot, in float32.
    """
    tables = head.tables(target.embed, target.head, target.dtype)
    words = torch.cat([stale.old[:, : stale.context], new], 1)
    same, other = head.rows(stale.states, stale.old, stale.is_known, tables)
    rows = same.where((words == stale.old)[..., None], other)
    state, _ = head(rows + tables.of_new(words), stale.mask(), None, tables)
    logits = stale.logits.float().clamp_min(EXCLUDED)
    return head.correct(state[:, stale.context :], logits, tables)
