"""Denoising head: the distribution of a continuous token, sampled by a chain of Gaussian transitions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from mmspec.core.graphs import can_capture
from mmspec.core.once import once
from mmspec.errors import InputError
from mmspec.kernels import denoising_update
from mmspec.kernels.backend import use_triton
from mmspec.kernels.denoising_update import denoising_transition
from mmspec.vectors.denoising_head.net import DenoisingNet, Modulations, at_least_float32
from mmspec.vectors.denoising_head.schedule import DenoisingSchedule

__all__ = ["DenoisingHead", "DenoisingHeadConfig", "DenoisingProcess"]


@dataclass(frozen=True)
class DenoisingHeadConfig:
    """Configuration of a denoising head for tokens [d] and conditions [D], and of its network.

    `kind` "ddpm" predicts noise and variance, "flow" a velocity.
    """

    input_size: int
    condition_size: int
    width: int
    depth: int
    kind: Literal["ddpm", "flow"]

    def __post_init__(self) -> None:
        if self.kind not in ("ddpm", "flow"):
            raise InputError("kind", self.kind, "must be 'ddpm' or 'flow'")


class DenoisingHead(nn.Module):
    """Denoising head: a distribution of continuous tokens, given a condition (2406.11838).

    Args:
        config: the sizes and the kind.

    Attributes:
        net: the network; its weights have the published names.

    Raises:
        InputError: an unknown kind.
    """

    def __init__(self, config: DenoisingHeadConfig) -> None:
        super().__init__()
        self.config = config
        size = config.input_size
        outputs = 2 * size if config.kind == "ddpm" else size
        self.net = DenoisingNet(size, config.condition_size, config.width, config.depth, outputs)

    def process(
        self,
        condition: Tensor,
        unconditional: Tensor | None,
        scale: float | Tensor,
        temperature: float | Tensor,
        schedule: DenoisingSchedule,
    ) -> DenoisingProcess:
        """Set up the denoising chains of M tokens.

        Args:
            condition: [M, D].
            unconditional: [M, D] conditions without the prompt, or None for no guidance.
            scale: guidance scale, for all rows or [M, 1]; predictions are u + scale (c - u).
            temperature: factor of the noise of every step except the first state, for all rows or [M, 1].
            schedule: for this head's kind.

        Raises:
            InputError: the schedule is for the other kind.
        """
        if schedule.kind != self.config.kind:
            rule = f"must be a schedule for heads of kind {self.config.kind!r}"
            raise InputError("schedule", type(schedule).__name__, rule)
        precise = at_least_float32(self.net.dtype)
        schedule = schedule.to(condition.device, precise)
        branches = torch.stack([condition] if unconditional is None else [condition, unconditional])
        template = condition.new_empty(len(condition), 1, dtype=precise)
        return DenoisingProcess(
            self.net,
            schedule,
            branches.to(self.net.dtype),
            _column(scale, template),
            _column(temperature, template),
        )


@dataclass(frozen=True)
class DenoisingProcess:
    """The denoising chains of M tokens: Gaussian distributions of the next state, step by step.

    Arithmetic around the network is at least in float32. No data passes between host and device, so that
    whole chains are captured in CUDA graphs.

    Attributes:
        net: the network.
        schedule: on the device and in the dtype of its coefficients.
        branches: [branches, M, D] conditions and, under guidance, the unconditional ones.
        scale, temperature: [M, 1].
    """

    net: DenoisingNet
    schedule: DenoisingSchedule
    branches: Tensor
    scale: Tensor
    temperature: Tensor

    @once
    def tables(self) -> Modulations:
        """[S, branches, M, ...] modulations of the network."""
        return self.net.modulations(self.schedule.times, self.branches)

    @property
    def steps(self) -> int:
        """Number of steps of a chain, S."""
        return self.schedule.steps

    @property
    def is_noisy(self) -> bool:
        """True if every step has noise."""
        return self.schedule.is_noisy

    @property
    def has_fixed_noise(self) -> bool:
        """True if the noise of a step depends on the schedule alone."""
        return self.schedule.kind == "flow"

    @property
    def size(self) -> int:
        """Size of a token, d."""
        return self.net.input_size

    def transition(self, x: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation [M, d] of the state after x [M, d]; step 0 follows pure noise."""
        return self._transition(x, step, self.tables.at(step))

    def transitions(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation after every state of a path [M, S, d], in one network call."""
        mean, std = self._transition(states.transpose(0, 1), slice(None), self.tables)
        return mean.transpose(0, 1), std.transpose(0, 1)

    def select(self, rows: Tensor) -> DenoisingProcess:
        """Return the chains of some rows [K]."""
        columns = (each.index_select(0, rows) for each in (self.scale, self.temperature))
        selected = DenoisingProcess(self.net, self.schedule, self.branches.index_select(1, rows), *columns)
        object.__setattr__(selected, "tables", self.tables.select(rows))
        return selected

    def advance(self, x: Tensor, step: int, noise: Tensor) -> Tensor:
        """Draw the next states [M, d] after x [M, d], with noise [M, d], both in the dtype of `scale`."""
        output = self._predict(x, self.tables.at(step))
        coefficients = self.schedule.coefficients[step]
        return denoising_update(x, output, noise, coefficients, self.scale, self.temperature)

    def run(self, noise: Tensor, known: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Run the chains as in `run_chain`; on CUDA as one graph."""
        noise = noise.to(self.scale.dtype)
        if not can_capture(noise.device):
            return run_chain(self.advance, noise, known)
        # a graph depends on these: the implementation of the ops, and the addresses of the weights
        weights = tuple(weight.data_ptr() for weight in self.net.parameters())
        key = self.schedule, use_triton(noise.device), weights
        inputs = self.branches.transpose(0, 1), self.scale, self.temperature, noise, *(known or ())
        return self.net.graphs(key, partial(run_rows, self.net, self.schedule), inputs)

    def _transition(self, x: Tensor, step: int | slice, tables: Modulations) -> tuple[Tensor, Tensor]:
        """`transition` for [M, d] at one step, or for [S, M, d] at all steps."""
        x = x.to(self.scale.dtype)
        output = self._predict(x, tables).to(x.dtype)
        return denoising_transition(x, output, self.schedule.coefficients[step], self.scale, self.temperature)

    def _predict(self, x: Tensor, tables: Modulations) -> Tensor:
        """Output [..., branches, M, d or 2 d] of the network for states [..., M, d]."""
        return self.net.run(x.to(self.net.dtype).unsqueeze(-3), tables)


def run_chain(
    advance: Callable[[Tensor, int, Tensor], Tensor],
    noise: Tensor,
    known: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Run chains of M values, and return all their states [M, S + 1, d].

    Args:
        advance: draws the next states [M, d], given the states, the step and its noise [M, d].
        noise: [M, S + 1, d] the first state, then the noise of every step.
        known: states [M, S + 1, d], and [M, S + 1] which of them are taken instead of drawn.
    """
    states = list[Tensor]()
    for index in range(noise.shape[1]):
        state = noise[:, index]
        if index:
            state = advance(states[-1], index - 1, state)
        if known is not None:
            state = torch.where(known[1][:, index, None], known[0][:, index], state)
        states.append(state)
    return torch.stack(states, 1)


def run_rows(
    net: DenoisingNet,
    schedule: DenoisingSchedule,
    branches: Tensor,
    scale: Tensor,
    temperature: Tensor,
    noise: Tensor,
    *known: Tensor,
) -> Tensor:
    """`DenoisingProcess.run` as a function of tensors with one row per chain, for a CUDA graph."""
    process = DenoisingProcess(net, schedule, branches.transpose(0, 1), scale, temperature)
    return run_chain(process.advance, noise, (known[0], known[1]) if known else None)


def _column(value: float | Tensor, template: Tensor) -> Tensor:
    """Expand a number, or one number per row, to [M, 1] in the template's dtype and on its device."""
    if isinstance(value, Tensor):
        return value.to(template).expand_as(template)
    return torch.full_like(template, value)
