"""Entropy-bounded sampling from uniform noise: confident tokens are kept for a step, others are redrawn."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mmspec.core.distributions import Scores
from mmspec.core.interfaces import Rule, TargetOutput
from mmspec.core.promise import Level, Promise
from mmspec.core.random_stream import Purpose, RandomStream
from mmspec.core.verdict import Measured, Verdict
from mmspec.errors import InputError
from mmspec.open_types import Keywords
from mmspec.places.noise_canvas import CanvasBlock, CanvasFill
from mmspec.places.policies import entropy, within
from mmspec.targets import AnyTarget
from mmspec.validation import is_integer, require_number

__all__ = ["Renoise", "uniform_tokens"]

#: DiffusionGemma's settings, where neither the caller nor the checkpoint has others.
DEFAULTS = {
    "entropy_bound": 0.1,
    "denoising_steps": 48,
    "t_min": 0.4,
    "t_max": 0.8,
    "stability_threshold": 1,
    "confidence_threshold": 0.005,
}


@dataclass(frozen=True)
class Renoise(Rule[CanvasBlock]):
    """Denoise a canvas in steps, as DiffusionGemma does (its `EntropyBoundSampler` in transformers).

    Each step draws a token at every place, at a falling temperature. The tokens of lowest entropy are kept,
    as long as the entropies of those ranked before each sum to at most a bound (EB-Sampler, 2505.24857); all
    other places become uniform noise. The canvas ends with the likeliest tokens once these are stable and
    confident, or no step is left. With the checkpoint's settings this is its plain decoding.

    Args:
        entropy_bound: largest sum of entropies of the tokens that are kept, in nats, above 0; checkpoint's if
            None.
        denoising_steps: most steps of a canvas, 1 or more; checkpoint's if None.
        t_min: temperature of the last step, above 0; checkpoint's if None.
        t_max: temperature of, nearly, the first step, above 0; checkpoint's if None.
        stability_threshold: previous steps in which the likeliest tokens must have been the same, 0 or more;
            checkpoint's if None.
        confidence_threshold: mean entropy in nats, above 0, below which a canvas is confident; checkpoint's
            if None.

    Raises:
        InputError: a value outside its range.
    """

    entropy_bound: float | None = None
    denoising_steps: int | None = None
    t_min: float | None = None
    t_max: float | None = None
    stability_threshold: int | None = None
    confidence_threshold: float | None = None
    settled: Keywords = field(default_factory=dict, init=False, compare=False, repr=False)

    exactness = Level.LOSSY

    @property
    def promise(self) -> Promise:
        own = all(getattr(self, name) is None for name in DEFAULTS)
        return Promise(Level.EXACT if own else Level.LOSSY)

    def __post_init__(self) -> None:
        for name in ("entropy_bound", "t_min", "t_max", "confidence_threshold"):
            if (value := getattr(self, name)) is not None:
                require_number(name, value, 0.0, 1e6, "must be above 0, and at most 1000000", open_below=True)
        for name, least in (("denoising_steps", 1), ("stability_threshold", 0)):
            value = getattr(self, name)
            if value is not None and (not is_integer(value) or value < least):
                raise InputError(name, value, f"must be an integer of at least {least}")

    def fit(self, target: AnyTarget) -> Renoise:
        fitted, own = copy.copy(self), {**DEFAULTS, **getattr(target, "published", {})}
        settled = {name: own[name] if getattr(self, name) is None else getattr(self, name) for name in own}
        object.__setattr__(fitted, "settled", settled)
        return fitted

    def decide(
        self, draft: CanvasBlock, output: TargetOutput, scores: Scores, random: RandomStream, first: Tensor
    ) -> tuple[Verdict, Measured]:
        own, shape = self.settled, draft.starts.shape
        heat = own["t_min"] + (own["t_max"] - own["t_min"]) * draft.steps / own["denoising_steps"]
        logits = scores.logits.view(*shape, -1) / heat[:, None, None]
        at = random.at(draft.steps.repeat_interleave(shape[1])[:, None])
        gumbel = at.gumbel(first[:, None], Purpose.REDRAW, logits.shape[-1], scores.dtype).view_as(logits)
        likeliest = logits.argmax(-1)
        drawn = (logits + gumbel).argmax(-1)
        greedy = scores.greedy if isinstance(scores.greedy, bool) else scores.greedy.view(-1, shape[1])
        drawn = likeliest if greedy is True else drawn if greedy is False else likeliest.where(greedy, drawn)
        nats = entropy(logits)
        kept = within(nats, own["entropy_bound"])
        canvas = torch.where(kept, drawn, uniform_tokens(at, first, logits.shape[-1]).view(shape))
        stable = (draft.past[:, : own["stability_threshold"]] == likeliest[:, None]).all(-1).all(-1)
        sure = nats.mean(-1) < own["confidence_threshold"]
        done = (stable & sure) | (draft.steps <= 1)
        failed = ~scores.is_finite().view(shape).all(-1)
        decided = (done & ~failed)[:, None].expand(shape)
        nothing = torch.zeros_like(decided)
        settled = torch.full_like(draft.steps, torch.iinfo(torch.long).max)
        parts = draft.starts, likeliest, decided, nothing, failed, nothing, settled
        return CanvasFill(*parts, canvas=canvas, logits=logits), Measured.nothing(done)


def uniform_tokens(random: RandomStream, places: Tensor, vocabulary: int) -> Tensor:
    """Draw uniform tokens [T] at output indices [T], one for each row of the stream."""
    u = random.uniform(places[:, None], Purpose.DRAFT, 1, torch.float64)
    return (u.flatten() * vocabulary).long()
