"""Denoising heads: the distribution of a continuous token, sampled by a chain of normal transitions."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from mmspec.errors import InputError
from mmspec.models.denoising.net import DenoisingNet, Modulations, at_least_float32
from mmspec.models.denoising.schedule import TRAINING_STEPS, DDPMSchedule, DDPMTables, DenoisingSchedule

__all__ = ["DenoisingHead", "DenoisingHeadConfig", "DenoisingProcess"]


@dataclass(frozen=True)
class DenoisingHeadConfig:
    """The shape of a denoising head.

    Attributes:
        input_size: d of a token.
        condition_size: D of a condition.
        width, depth: of the network.
        kind: "ddpm" predicts noise and variance, "flow" a velocity.
    """

    input_size: int
    condition_size: int
    width: int
    depth: int
    kind: Literal["ddpm", "flow"]

    def __post_init__(self) -> None:
        if self.kind not in ("ddpm", "flow"):
            raise InputError("kind", self.kind, "'ddpm' or 'flow'")


class DenoisingHead(nn.Module):
    """A distribution of continuous tokens, given a condition (2406.11838).

    Args:
        config: its shape.

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
        """The chains of M tokens, with all that does not depend on their states computed.

        Args:
            condition: [M, D].
            unconditional: [M, D] conditions without the prompt, or None for no guidance.
            scale: of the guidance, for all rows or [M, 1]; predictions are u + scale (c - u).
            temperature: factor of the noise of every step but not of the first state, for all rows or [M, 1].
            schedule: of this head's kind.

        Raises:
            InputError: the schedule is of the other kind.
        """
        if schedule.kind != self.config.kind:
            allowed = f"one for heads of kind {self.config.kind!r}"
            raise InputError("schedule", type(schedule).__name__, allowed)
        precise = at_least_float32(self.net.dtype)
        schedule = schedule.to(condition.device, precise)
        branches = torch.stack([condition] if unconditional is None else [condition, unconditional])
        tables = self.net.modulations(schedule.times, branches.to(self.net.dtype))
        template = condition.new_empty(len(condition), 1, dtype=precise)
        return DenoisingProcess(
            self.net, schedule, tables, _column(scale, template), _column(temperature, template)
        )

    def loss(self, x0: Tensor, condition: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Loss of each token at a random time.

        "ddpm": squared error of the noise, plus the variational bound in bits, which trains the variance
        alone (L_hybrid of 2102.09672: 0.001 times the bound's 1,000 terms, of which one is drawn). In its
        first term a token has a density, where pixels would have bins. "flow": squared error of the velocity
        at a logit-normal time (`stepfun-ai/NextStep-1, nextstep/models/modeling_fm_head.py`).

        Args:
            x0: [M, d] tokens.
            condition: [M, D].
            generator: of times and noises, on the device of x0.

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
        """As `loss`, at given steps [M] of the schedule of training."""
        schedule = DDPMSchedule(TRAINING_STEPS).to(x0.device, x0.dtype)
        tables = DDPMTables(*(table[step, 0] for table in schedule.tables))
        output = self._predict(tables.signal * x0 + tables.noise * noise, schedule.times[step], condition)
        predicted, value = output.chunk(2, dim=-1)
        error = predicted - noise
        # the means of posterior and model are the same function of the state and of the noise
        apart = (tables.of_noise * error.detach()).square()
        log_posterior = tables.log_posterior
        log_variance = torch.lerp(log_posterior, tables.log_beta, (value + 1) / 2)
        surprise = log_variance + apart * torch.exp(-log_variance)
        divergence = surprise - 1 - log_posterior + torch.exp(log_posterior - log_variance)
        likelihood = surprise + math.log(2 * math.pi)
        bound = torch.where((step == TRAINING_STEPS - 1)[:, None], likelihood, divergence)
        return error.square().mean(-1) + bound.mean(-1) / (2 * math.log(2))

    def _predict(self, states: Tensor, times: Tensor, condition: Tensor) -> Tensor:
        """The network's output at least in float32."""
        dtype = self.net.dtype
        output: Tensor = self.net(states.to(dtype), times, condition.to(dtype))
        return output.to(states.dtype)


@dataclass(frozen=True)
class DenoisingProcess:
    """The denoising chains of M tokens: normal distributions of the next state, step by step.

    Arithmetic around the network is at least in float32. Nothing passes between host and device, so that a
    whole chain can be captured in a CUDA graph.

    Attributes:
        net: the network.
        schedule: where the tables are.
        tables: modulations [S, branches, M, ...], of the condition and, under guidance, of none.
        scale, temperature: [M, 1].
    """

    net: DenoisingNet
    schedule: DenoisingSchedule
    tables: Modulations
    scale: Tensor
    temperature: Tensor

    @property
    def steps(self) -> int:
        """Steps of a chain, S."""
        return self.schedule.steps

    @property
    def is_noisy(self) -> bool:
        """True if every step has noise."""
        return self.schedule.is_noisy

    @property
    def has_fixed_noise(self) -> bool:
        """True if the schedule alone says how much noise a step has."""
        return self.schedule.kind == "flow"

    @property
    def size(self) -> int:
        """Numbers of a token, d."""
        return self.net.input_size

    def transition(self, x: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation [M, d] of what follows the states [M, d]; step 0 follows pure noise."""
        return self._transition(x, step, self.tables.at(step))

    def transitions(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """The transitions out of all states of a path, in one call of the network.

        Args:
            states: [M, S, d], that before step i at [:, i].

        Returns:
            Mean and standard deviation [M, S, d] of the state after each step.
        """
        mean, std = self._transition(states.transpose(0, 1), slice(None), self.tables)
        return mean.transpose(0, 1), std.transpose(0, 1)

    def select(self, rows: Tensor) -> DenoisingProcess:
        """The chains of some rows [K]."""
        return replace(
            self,
            tables=self.tables.select(rows),
            scale=self.scale.index_select(0, rows),
            temperature=self.temperature.index_select(0, rows),
        )

    def sample(self, noises: Tensor) -> Tensor:
        """Run the chains.

        Args:
            noises: [M, S + 1, d] standard normal numbers: the first states, then the noise of each step.

        Returns:
            [M, d] tokens.
        """
        noises = noises.to(self.scale.dtype)
        x = noises[:, 0]
        for step in range(self.steps):
            mean, std = self.transition(x, step)
            x = mean + std * noises[:, 1 + step]
        return x

    def _transition(self, x: Tensor, step: int | slice, tables: Modulations) -> tuple[Tensor, Tensor]:
        """As `transition`, for [M, d] at one step or [S, M, d] at all."""
        x = x.to(self.scale.dtype)
        output = self.net.run(x.to(self.net.dtype).unsqueeze(-3), tables).to(x.dtype)
        mean, std = self.schedule.transition(x, step, self._guided(output))
        return mean, std * self.temperature

    def _guided(self, output: Tensor) -> Tensor:
        """[..., branches, M, outputs] -> [..., M, outputs]; the variance is of the conditional branch."""
        conditional = output.select(-3, 0)
        if output.shape[-3] == 1:
            return conditional
        # lerp is exact at a scale of 1, where guided rows equal unguided ones
        predicted = torch.lerp(
            output.select(-3, 1)[..., : self.size], conditional[..., : self.size], self.scale
        )
        return torch.cat([predicted, conditional[..., self.size :]], dim=-1)


def _column(value: float | Tensor, template: Tensor) -> Tensor:
    """[M, 1] of a number for all rows, or of one for each, in the template's dtype and on its device."""
    if isinstance(value, Tensor):
        return value.to(template).expand_as(template)
    return torch.full_like(template, value)
