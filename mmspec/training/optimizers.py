"""Optimizers of trainings (Muon and AdamW) and their learning rate schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from mmspec.open_types import Keywords

__all__ = ["Muon", "learning_rate", "muon_and_adamw", "orthogonalize"]

MUON_RATE, ADAMW_RATE = (
    2e-3,
    1e-3,
)  # in AdamW's units: Muon's updates are scaled to its root mean square
WARMUP_STEPS = 20
FINAL_SHARE = 0.05
NOT_HIDDEN = ("embed", "shared", "relative_attention_bias", "lm_head", "heads.", "conv1d")
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic iteration (Jordan et al., 2024)
ITERATIONS = 5


def learning_rate(peak: float, step: int, progress: float) -> float:
    """Learning rate of a step: linear warm-up times a cosine decay over the progress down to five per cent.

    `transformers.get_scheduler` does not fit: its cosine counts steps, and a training that is limited by
    minutes does not know its number of steps.
    """
    cosine = 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
    return peak * min(1.0, (step + 1) / WARMUP_STEPS) * (FINAL_SHARE + (1 - FINAL_SHARE) * cosine)


def muon_and_adamw(
    named: Iterable[tuple[str, nn.Parameter]], *, slow: str, slow_factor: float, outer: Sequence[str] = ()
) -> list[torch.optim.Optimizer]:
    """Create the optimizers: Muon for matrices and kernels of hidden layers, AdamW for other parameters.

    Args:
        named: parameters with their names; those without `requires_grad` are left out.
        slow, slow_factor, outer: see `Stage`.
    """
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for name, parameter in named:
        if parameter.requires_grad:
            hidden = parameter.ndim >= 2 and not any(part in name for part in (*NOT_HIDDEN, *outer))
            groups.setdefault((hidden, slow in name), []).append(parameter)
    made: list[torch.optim.Optimizer] = []
    for hidden, peak in ((True, MUON_RATE), (False, ADAMW_RATE)):
        chosen = [
            {"params": groups[hidden, is_slow], "lr": rate, "peak": rate}
            for is_slow, rate in ((False, peak), (True, peak * slow_factor))
            if (hidden, is_slow) in groups
        ]
        if chosen and hidden:
            made.append(Muon(chosen, lr=peak, weight_decay=0.01))
        elif chosen:
            made.append(torch.optim.AdamW(chosen, lr=peak, weight_decay=0.0, betas=(0.9, 0.98)))
    return made


def orthogonalize(matrix: Tensor) -> Tensor:
    """Approximate the nearest orthogonal matrix in float32; the singular values end between 0.7 and 1.2."""
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.float().T if tall else matrix.float()
    x = x / x.norm().clamp(min=1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


class Muon(torch.optim.Optimizer):
    """Muon optimizer in float32 (Jordan et al., 2024) for matrices and convolution kernels.

    A kernel is flattened to a matrix with one row per output. Rates are in AdamW's units: the root mean
    square of an update is a fifth of the rate. Momentum is Nesterov's, and weight decay is decoupled.
    `torch.optim.Muon` does not accept kernels, and it orthogonalizes in bfloat16, which takes up to twenty
    times as long on processors without bfloat16 units.
    """

    def __init__(
        self, params: Iterable[Keywords], lr: float = 1e-3, momentum: float = 0.95, weight_decay: float = 0.01
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
                buffer = state["momentum_buffer"]
                buffer.lerp_(parameter.grad, 1 - group["momentum"])
                ahead = parameter.grad.lerp(buffer, group["momentum"])
                matrix = ahead.flatten(1)
                step = 0.2 * group["lr"] * max(matrix.shape) ** 0.5
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(orthogonalize(matrix).view_as(parameter), alpha=-step)
        return loss
