"""Schedules of denoising chains: the times of the steps, and the Gaussian distribution of each next state.

A chain of S steps starts from a standard normal state. Step i passes the time `times[i]` to the network, and
moves to a Gaussian distribution whose mean is linear in the state and in the network's prediction.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import accumulate, repeat
from typing import Any, ClassVar, NamedTuple, Self, cast

import torch
from torch import Tensor

from mmspec.errors import InputError
from mmspec.kernels.denoising_update import denoising_transition
from mmspec.validation import require_number

__all__ = ["DDPMSchedule", "DDPMTables", "DenoisingSchedule", "FlowSchedule", "TRAINING_STEPS"]

TRAINING_STEPS = 1000  # of the diffusion with which MAR's heads are trained
COSINE_OFFSET = 0.008  # keeps the first steps from being vanishingly small (2102.09672, section 3.2)
MAX_BETA = 0.999
CPU = torch.device("cpu")
# tables are cached, and must work in training even if they were first computed in inference mode
KEPT = torch.inference_mode(False)


@dataclass(frozen=True)
class DenoisingSchedule(ABC):
    """Times and transitions of a denoising chain.

    A schedule is immutable; its tables are computed in float64 and stored in `dtype` on `device`. Indexing
    them by a step moves no data between host and device.

    Attributes:
        kind: kind of head that it fits: "ddpm" (noise and variance) or "flow" (velocity).
        steps: S.
        last_step_noise: whether to add noise in the last step too. The published samplers do not, so that
            their result has no density.
        device, dtype: of the tables; see `to`.
    """

    kind: ClassVar[str]
    steps: int
    last_step_noise: bool = field(default=False, kw_only=True)
    device: torch.device = field(default=CPU, kw_only=True)
    dtype: torch.dtype = field(default=torch.float32, kw_only=True)

    @property
    def is_noisy(self) -> bool:
        """True if every step has noise."""
        return self.last_step_noise

    @property
    @abstractmethod
    def times(self) -> Tensor:
        """[S] times for the network, from pure noise on."""

    @property
    @abstractmethod
    def coefficients(self) -> Tensor:
        """[S, 4 or 7] coefficients of each step for `denoising_transition`."""

    def transition(self, x: Tensor, step: int | slice, output: Tensor) -> tuple[Tensor, Tensor]:
        """Gaussian distribution of the next state: mean and deviation, which is 0 if a step adds no noise.

        Args:
            x: [M, d] states; [S, M, d] if `step` is `slice(None)`.
            step: index, 0 for pure noise.
            output: of the network, [M, d or 2 d]; [S, M, d or 2 d].
        """
        return denoising_transition(x, output.unsqueeze(-3), self.coefficients[step])

    def to(self, device: torch.device, dtype: torch.dtype = torch.float32) -> Self:
        """Return the schedule with its tables there, cached by the arguments."""
        if (device, dtype) == (self.device, self.dtype):
            return self
        return cast(Self, _changed(self, device=device, dtype=dtype))

    def with_steps(self, steps: int) -> Self:
        """Return the schedule with another number of steps, cached so that its tables are kept."""
        return cast(Self, _changed(self, steps=steps))

    def _check_steps(self) -> None:
        if self.steps < 2:
            raise InputError("steps", self.steps, "must be at least 2")

    def _table(self, *columns: Tensor) -> Tensor:
        """Stack columns [S] to a table on the schedule's device."""
        return torch.stack(columns, 1).to(self.device, self.dtype)


@lru_cache(maxsize=1024)
def _changed(schedule: DenoisingSchedule, **fields: Any) -> DenoisingSchedule:
    return replace(schedule, **fields)


class DDPMTables(NamedTuple):
    """Coefficients [S, 1] of a `DDPMSchedule`.

    Attributes:
        signal, noise: factors of the clean token and of the noise in a state.
        of_state, of_noise: factors of the state and of the predicted noise in the mean of the next state.
        beside_token, of_token: factors of the state and of the predicted token in the same mean.
        log_beta, log_posterior: bounds of the log variance.
    """

    signal: Tensor
    noise: Tensor
    of_state: Tensor
    of_noise: Tensor
    beside_token: Tensor
    of_token: Tensor
    log_beta: Tensor
    log_posterior: Tensor


@dataclass(frozen=True)
class DDPMSchedule(DenoisingSchedule):
    """Ancestral sampling with predicted noise and variance, as in MAR's head (2102.09672, 2406.11838).

    A cosine schedule of 1,000 steps is respaced to `steps`; the network gets the original indices. Its output
    is the noise, and a number v in [-1, 1] that interpolates the log variance between that of the posterior
    and that of beta.

    Attributes:
        steps: S, from 2 to 1,000.
        last_step_noise: see `DenoisingSchedule`; of standard deviation 0.0062 to 0.0064 at 100 steps.
        clip_sample_range: largest absolute component of a predicted token, as in diffusers. The published
            sampler does not clip; its first step multiplies the error of the predicted noise by some 300,
            which makes small heads diverge.

    Raises:
        InputError: the number of steps is out of range, or the clip range is not above 0.
    """

    kind: ClassVar[str] = "ddpm"
    steps: int = 100
    clip_sample_range: float | None = None

    def __post_init__(self) -> None:
        self._check_steps()
        clip = self.clip_sample_range
        if clip is not None:
            require_number(
                "clip_sample_range", clip, 0.0, math.inf, "must be a positive number", open_below=True
            )
        if self.steps > TRAINING_STEPS:
            raise InputError("steps", self.steps, f"must be at most {TRAINING_STEPS}, the number in training")

    @cached_property
    @KEPT
    def times(self) -> Tensor:
        """[S] indices of the 1,000 training steps, 999 first."""
        return torch.tensor(_respaced(self.steps)[::-1], device=self.device, dtype=self.dtype)

    @cached_property
    @KEPT
    def tables(self) -> DDPMTables:
        """Named coefficients of each step, for training."""
        return DDPMTables(*(self._table(values) for values in _ddpm_tables(self.steps)))

    @cached_property
    @KEPT
    def coefficients(self) -> Tensor:
        exact = _ddpm_tables(self.steps)
        # log deviation at v = 0, and half of its range
        middle = (exact.log_posterior + exact.log_beta) / 4
        half = (exact.log_beta - exact.log_posterior) / 4
        if not self.last_step_noise:
            middle[-1] = -math.inf
        if self.clip_sample_range is None:
            return self._table(exact.of_state, exact.of_noise, middle, half)
        # the mean uses the predicted token (x - noise * predicted) / signal, clipped
        limit = torch.full_like(middle, self.clip_sample_range)
        token = 1 / exact.signal, -exact.noise / exact.signal, limit
        return self._table(exact.beside_token, exact.of_token, middle, half, *token)


def _respaced(steps: int) -> list[int]:
    """Indices of the training steps that are used, the least noisy first, both ends included."""
    stride = (TRAINING_STEPS - 1) / (steps - 1)
    return [round(place) for place in accumulate(repeat(stride, steps - 1), initial=0.0)]


def _ddpm_tables(steps: int) -> DDPMTables:
    """The tables in float64, [S] each, the noisiest step first."""
    edges = torch.arange(TRAINING_STEPS + 1, dtype=torch.float64, device=CPU) / TRAINING_STEPS
    curve = torch.cos((edges + COSINE_OFFSET) / (1 + COSINE_OFFSET) * math.pi / 2) ** 2
    betas = (1 - curve[1:] / curve[:-1]).clamp(max=MAX_BETA)
    kept = torch.cumprod(1 - betas, dim=0)[_respaced(steps)]  # share of the signal's variance
    previous = torch.cat([kept.new_ones(1), kept[:-1]])
    beta = 1 - kept / previous
    posterior = beta * (1 - previous) / (1 - kept)
    posterior[0] = posterior[1]  # 0 has no logarithm
    of_token = beta * previous.sqrt() / (1 - kept)
    of_state = (1 - previous) * (1 - beta).sqrt() / (1 - kept)
    columns = (
        kept.sqrt(),
        (1 - kept).sqrt(),
        of_state + of_token / kept.sqrt(),  # the predicted token is (x - noise * predicted) / signal
        -of_token * ((1 - kept) / kept).sqrt(),
        of_state,
        of_token,
        beta.log(),
        posterior.log(),
    )
    return DDPMTables(*(column.flip(0) for column in columns))


@dataclass(frozen=True)
class FlowSchedule(DenoisingSchedule):
    """NextStep-1's sampler of a flow: a stochastic differential equation, then one deterministic step.

    A state at time t is t * token + (1 - t) * noise, and the network predicts the velocity v = token - noise.
    The score is (t v - x) / (1 - t), so that the drift v + (1 - t) * score is (1 + t) v - x; a step of length
    dt adds noise of standard deviation sqrt(2 (1 - t) dt), which does not depend on the network. The last
    step moves `last_step_size` along the velocity and adds no noise (`stepfun-ai/NextStep-1,
    nextstep/models/modeling_fm_head.py`, `sample`).

    Attributes:
        steps: S, at least 2, the last one included.
        shift: above 1 for more steps at early times. The length of the last step does not depend on it, as
            published.
        last_step_size: length of the last step, in (0, 1).
        last_step_noise: see `DenoisingSchedule`; of the same standard deviation as the others, 0.057 with the
            default size.

    Raises:
        InputError: a setting is out of its range.
    """

    kind: ClassVar[str] = "flow"
    steps: int = 20
    shift: float = 1.0
    last_step_size: float = 0.04

    def __post_init__(self) -> None:
        self._check_steps()
        if not 0 < self.last_step_size < 1:
            raise InputError("last_step_size", self.last_step_size, "must be a number between 0 and 1")
        if not 0 < self.shift < math.inf:
            raise InputError("shift", self.shift, "must be a positive number")

    @cached_property
    @KEPT
    def _exact_times(self) -> Tensor:
        times = torch.linspace(0, 1 - self.last_step_size, self.steps, dtype=torch.float64, device=CPU)
        return times / (self.shift - (self.shift - 1) * times)

    @cached_property
    @KEPT
    def times(self) -> Tensor:
        """[S] times from 0, pure noise, towards 1."""
        return self._exact_times.to(self.device, self.dtype)

    @cached_property
    @KEPT
    def coefficients(self) -> Tensor:
        times = self._exact_times
        lengths = times.diff()
        end = times.new_tensor([1.0, self.last_step_size, 0.0])
        of_state = torch.cat([1 - lengths, end[:1]])
        of_velocity = torch.cat([(1 + times[:-1]) * lengths, end[1:2]])
        if self.last_step_noise:
            end[2] = math.sqrt(2 * float(1 - times[-1]) * self.last_step_size)
        std = torch.cat([torch.sqrt(2 * (1 - times[:-1]) * lengths), end[2:]])
        return self._table(of_state, of_velocity, std, torch.zeros_like(std))
