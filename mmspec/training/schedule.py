"""Learning-rate schedule, linear warm-up and then a cosine to five per cent; budget of a training."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from mmspec.errors import InputError
from mmspec.training.kernel_muon import KernelMuon

__all__ = ["Budget", "learning_rate", "muon_and_adamw"]

WARMUP_STEPS = 20
FINAL_SHARE = 0.05
NOT_HIDDEN = ("embed", "shared", "relative_attention_bias", "lm_head", "heads.", "conv1d")


@dataclass(frozen=True, slots=True)
class Budget:
    """Length of a training in steps or in seconds; exactly one of the two is given."""

    steps: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.seconds is None):
            raise InputError("steps", self.steps, "either steps or minutes, not both and not neither")
        if self.steps is not None and self.steps < 1:
            raise InputError("steps", self.steps, "at least 1")
        if self.seconds is not None and self.seconds <= 0:
            raise InputError("minutes", self.seconds / 60, "more than 0")

    def share(self, fraction: float) -> Budget:
        """A part of this budget, of at least one step."""
        if self.steps is not None:
            return Budget(steps=max(1, round(self.steps * fraction)))
        return Budget(seconds=max(1e-9, (self.seconds or 0.0) * fraction))

    def progress(self, step: int, seconds: float) -> float:
        """Share of the budget that is used up: 0 at the start, 1 and more at the end."""
        return step / self.steps if self.steps is not None else seconds / (self.seconds or 1.0)


def learning_rate(peak: float, step: int, progress: float) -> float:
    """The learning rate of a step."""
    cosine = 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
    return peak * min(1.0, (step + 1) / WARMUP_STEPS) * (FINAL_SHARE + (1 - FINAL_SHARE) * cosine)


def muon_and_adamw(
    named: Iterable[tuple[str, nn.Parameter]],
    *,
    slow: str,
    slow_factor: float,
    muon_lr: float,
    adamw_lr: float,
    outer: Sequence[str] = (),
) -> list[torch.optim.Optimizer]:
    """Optimizers: Muon for matrices and kernels of hidden layers, AdamW for all other parameters.

    Args:
        named: parameters with their names; those without gradient are left out.
        slow: parameters whose name holds this text learn at `slow_factor` times the rate.
        slow_factor: see `slow`.
        muon_lr: peak rate of Muon, in AdamW's units (updates are rescaled to AdamW's root mean square).
        adamw_lr: peak rate of AdamW.
        outer: parts of names of further matrices that AdamW takes.
    """
    groups: dict[tuple[str, bool], list[nn.Parameter]] = {}
    for name, parameter in named:
        if parameter.requires_grad:
            hidden = parameter.ndim >= 2 and not any(part in name for part in (*NOT_HIDDEN, *outer))
            kind = "other" if not hidden else "matrix" if parameter.ndim == 2 else "kernel"
            groups.setdefault((kind, slow in name), []).append(parameter)
    made: list[torch.optim.Optimizer] = []
    for kind, peak in (("matrix", muon_lr), ("kernel", muon_lr), ("other", adamw_lr)):
        chosen = [
            {"params": groups[kind, is_slow], "lr": rate, "peak": rate}
            for is_slow, rate in ((False, peak), (True, peak * slow_factor))
            if (kind, is_slow) in groups
        ]
        if chosen and kind == "matrix":
            made.append(torch.optim.Muon(chosen, lr=peak, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"))
        elif chosen and kind == "kernel":
            made.append(KernelMuon(chosen, lr=peak, weight_decay=0.01))
        elif chosen:
            made.append(torch.optim.AdamW(chosen, lr=peak, weight_decay=0.0, betas=(0.9, 0.98)))
    return made
