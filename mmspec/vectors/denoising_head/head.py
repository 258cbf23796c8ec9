"""Denoising head: the distribution of a continuous token, sampled by a chain of Gaussian transitions."""

from __future__ import annotations

import math
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
from mmspec.vectors.denoising import run_chain
from mmspec.vectors.denoising_head.net import DenoisingNet, Modulations, at_least_float32
from mmspec.vectors.denoising_head.schedule import TRAINING_STEPS, DDPMSchedule, DDPMTables, DenoisingSchedule

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

    def loss(self, x0: Tensor, condition: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Training loss of each token at a random time.

        "ddpm": squared error of the noise, plus the variational bound in bits, which trains the variance
        alone (L_hybrid of 2102.09672: 0.001 times the bound's 1,000 terms, of which one is drawn). In its
        first term a token has a density, where pixels would have bins. "flow": squared error of the velocity
        at a logit-normal time (`stepfun-ai/NextStep-1, nextstep/models/modeling_fm_head.py`).

        Args:
            x0: [M, d] tokens.
            condition: [M, D].
            generator: for times and noises, on the device of x0.

        Returns:
            [M], the mean over the d numbers of a token.
        """
        x0 = x0.to(at_least_float32(self.net.dtype))
        noise = torch.randn(x0.shape, generator=generator, device=x0.device, dtype=x0.dtype)
        if self.config.kind == "flow":
            normal = torch.randn(len(x0), generator=generator, device=x0.device, dtype=x0.dtype)
            return self._flow_loss(x0, noise, torch.sigmoid(normal), condition)
        step = torch.randint(TRAINING_STEPS, (len(x0),), generator=generator, device=x0.device)
        return self._ddpm_loss(x0, noise, step, condition)

    def _flow_loss(self, x0: Tensor, noise: Tensor, times: Tensor, condition: Tensor) -> Tensor:
        state = torch.lerp(noise, x0, times[:, None])
        return (self._predict(state, times, condition) - (x0 - noise)).square().mean(-1)

    def _ddpm_loss(self, x0: Tensor, noise: Tensor, step: Tensor, condition: Tensor) -> Tensor:
        """Loss at given steps [M] of the training schedule; see `loss`."""
        schedule = DDPMSchedule(TRAINING_STEPS).to(x0.device, x0.dtype)
        tables = DDPMTables(*(table[step] for table in schedule.tables))
        output = self._predict(tables.signal * x0 + tables.noise * noise, schedule.times[step], condition)
        predicted, value = output.chunk(2, dim=-1)
        error = predicted - noise
        # the means of posterior and model are the same function of state and noise
        apart = (tables.of_noise * error.detach()).square()
        log_posterior = tables.log_posterior
        log_variance = torch.lerp(log_posterior, tables.log_beta, (value + 1) / 2)
        surprise = log_variance + apart * torch.exp(-log_variance)
        divergence = surprise - 1 - log_posterior + torch.exp(log_posterior - log_variance)
        likelihood = surprise + math.log(2 * math.pi)
        bound = torch.where((step == TRAINING_STEPS - 1)[:, None], likelihood, divergence)
        return error.square().mean(-1) + bound.mean(-1) / (2 * math.log(2))

    def _predict(self, states: Tensor, times: Tensor, condition: Tensor) -> Tensor:
        """The network's output, at least in float32."""
        dtype = self.net.dtype
        output: Tensor = self.net(states.to(dtype), times, condition.to(dtype))
        return output.to(states.dtype)


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

    def sample(self, noises: Tensor) -> Tensor:
        """Run the chains: noises [M, S + 1, d] of the first states and of each step -> tokens [M, d]."""
        return self.run(noises)[:, -1]

    def _transition(self, x: Tensor, step: int | slice, tables: Modulations) -> tuple[Tensor, Tensor]:
        """`transition` for [M, d] at one step, or for [S, M, d] at all steps."""
        x = x.to(self.scale.dtype)
        output = self._predict(x, tables).to(x.dtype)
        return denoising_transition(x, output, self.schedule.coefficients[step], self.scale, self.temperature)

    def _predict(self, x: Tensor, tables: Modulations) -> Tensor:
        """Output [..., branches, M, d or 2 d] of the network for states [..., M, d]."""
        return self.net.run(x.to(self.net.dtype).unsqueeze(-3), tables)


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
