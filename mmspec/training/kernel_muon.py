"""Muon for convolutions, which `torch.optim.Muon` refuses: each kernel is a matrix of its outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

__all__ = ["KernelMuon", "orthogonalize"]

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic iteration (Jordan et al., 2024)
ITERATIONS = 5


def orthogonalize(matrix: Tensor) -> Tensor:
    """Approximate the nearest orthogonal matrix in float32: singular values end between 0.7 and 1.2."""
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.float().T if tall else matrix.float()
    x = x / x.norm().clamp(min=1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


class KernelMuon(torch.optim.Optimizer):
    """Muon whose parameters may have more than two dimensions; all but the first are taken as one.

    Args:
        params: parameters or groups, as in any optimizer.
        lr: in AdamW's units: an update's root mean square is a fifth of it.
        momentum: of Nesterov's kind.
        weight_decay: decoupled, as in AdamW.
    """

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, momentum: float = 0.95, weight_decay: float = 0.01
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
