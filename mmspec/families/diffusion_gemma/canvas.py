"""Drafter of DiffusionGemma: drafts the whole canvas of a row in every denoising step."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from mmspec.core.canvas import Canvas
from mmspec.core.draft import Draft
from mmspec.core.interfaces import AnyVerdict, DraftSession, TargetOutput
from mmspec.core.session import PromptBatch
from mmspec.errors import InputError
from mmspec.families.diffusion_gemma.renoise import Renoise, uniform_tokens
from mmspec.families.diffusion_gemma.target import DiffusionGemmaTarget
from mmspec.families.masked_language.unmasking import PlacesDrafter
from mmspec.places.noise_canvas import CanvasBlock, CanvasFill
from mmspec.targets import AnyTarget

__all__ = ["NoiseCanvasDrafter"]

OWN_STEPS = "the checkpoint's own steps"


class NoiseCanvasSession(DraftSession):
    """Canvases of a batch, each at its own step.

    Attributes:
        tokens: [B, L] tokens of the next step.
        steps: [B] steps that are left.
        past: [B, H, L] likeliest tokens of the last steps, the newest first.
        begins: output index at which each row's canvas begins; -1 before the first canvas.
    """

    def __init__(self, drafter: NoiseCanvasDrafter, batch: PromptBatch) -> None:
        self.drafter, self.random = drafter, batch.random
        rows, device, length = len(batch.requests), batch.prefill.logits.device, drafter.length
        self.tokens = torch.zeros(rows, length, dtype=torch.long, device=device)
        self.steps = torch.zeros(rows, dtype=torch.long, device=device)
        self.past = torch.zeros(rows, max(1, drafter.memory), length, dtype=torch.long, device=device)
        self.begins = [-1] * rows

    def open(self, canvas: Canvas) -> Draft:
        return self.block(canvas, 0)

    def propose(self, canvas: Canvas) -> Draft:
        canvas.reserve(max(canvas.length_bounds) + 2 * self.drafter.length)
        fresh = [now != before for now, before in zip(canvas.output_lengths, self.begins, strict=True)]
        self.begins = list(canvas.output_lengths)
        if any(fresh):
            new = torch.tensor(fresh, device=self.tokens.device)
            places = self.places.flatten()
            noise = uniform_tokens(self.random.repeat(len(places)), places, self.drafter.vocabulary)
            self.tokens = torch.where(new[:, None], noise.view_as(self.tokens), self.tokens)
            self.steps = torch.where(new, self.drafter.steps, self.steps)
            self.past = torch.where(new[:, None, None], -1, self.past)
        return self.block(canvas, self.drafter.length)

    @property
    def places(self) -> Tensor:
        """[B, L] output indices of the canvases."""
        begin = torch.tensor(self.begins, device=self.tokens.device).clamp_min(0)
        return begin[:, None] + torch.arange(self.drafter.length, device=begin.device)

    def block(self, canvas: Canvas, count: int) -> CanvasBlock:
        """The draft of the first `count` places of the canvases."""
        places = self.places[:, :count]
        nothing = torch.zeros(len(places), 1, dtype=torch.long, device=places.device)
        going = zip(canvas.finish_reasons, self.begins, strict=True)
        return CanvasBlock.single(
            self.tokens[:, :count],
            places,
            torch.ones_like(places, dtype=torch.bool),
            nothing,
            nothing[:, None] == 0,
            completes=count,
            steps=self.steps,
            past=self.past,
            begins=[begin if reason is None else None for reason, begin in going],
        )

    def observe(self, draft: Draft, output: TargetOutput, scores: object, verdict: AnyVerdict) -> None:
        if isinstance(verdict, CanvasFill):
            self.tokens, self.steps = verdict.canvas, self.steps - 1
            self.past = torch.cat([verdict.values[:, None], self.past[:, :-1]], 1)


class NoiseCanvasDrafter(PlacesDrafter):
    """Drafts the canvas of each row, which the rule `renoise` redraws in every step.

    Attributes:
        length: places of a canvas.
        vocabulary: size of the target's vocabulary.
        steps: most steps per canvas.
        memory: number of steps whose likeliest tokens are stored.
    """

    judged_by = Renoise
    keeps = OWN_STEPS
    session = NoiseCanvasSession
    length: int
    vocabulary: int
    steps: int
    memory: int

    def __init__(self, rule: Renoise) -> None:
        self.rule = rule

    def fit(self, target: AnyTarget) -> NoiseCanvasDrafter:
        if not isinstance(target, DiffusionGemmaTarget):
            raise InputError("accelerator", "renoise", "needs a model that denoises canvases: DiffusionGemma")
        fitted, own = copy.copy(self), self.rule.fit(target).settled
        fitted.length, fitted.vocabulary = target.canvas_length, target.vocabulary
        fitted.steps, fitted.memory = own["denoising_steps"], own["stability_threshold"]
        return fitted
