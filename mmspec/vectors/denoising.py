"""Distributions of a denoising head: chains of Gaussian transitions from noise to a vector.

The value of a node is the last state of a chain x_0, ..., x_S whose transitions are Gaussian given the state
before. The density of the value alone has no closed form, but that of a whole chain has: exact rules compare
the chains (acceptance rules of this package; De Bortoli et al., 2501.05370, on single steps).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from mmspec.core.distributions import Continuous
from mmspec.core.draft import Tree
from mmspec.core.once import once
from mmspec.core.random_stream import Purpose, RandomStream, box_muller
from mmspec.errors import InputError

__all__ = [
    "Denoising",
    "DenoisingProcess",
    "DenoisingSource",
    "StepSchedule",
    "log_likelihood",
    "require_noise",
    "run_chain",
    "with_steps",
]

NORM_EPS = 1e-6


class DenoisingProcess(Protocol):
    """Transitions of M chains, each with its own condition.

    Attributes:
        steps: number of transitions S.
        size: d of a state.
        is_noisy: whether every step adds noise, so that chains have a density.
        has_fixed_noise: whether the deviations of the steps are independent of condition and state.
    """

    steps: int
    size: int
    is_noisy: bool
    has_fixed_noise: bool

    def run(self, noise: Tensor, known: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Run the chains, as `run_chain`."""
        return run_chain(self.advance, noise, known)

    def advance(self, x: Tensor, step: int, noise: Tensor) -> Tensor:
        """Draw the state [M, d] after x [M, d] at a step, with noise [M, d]."""
        mean, std = self.transition(x, step)
        return mean + std * noise

    def transition(self, x: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation [M, d] of the state after x [M, d] at a step."""
        ...

    def transitions(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Means and deviations [M, S, d] after states [M, S, d], the s-th at step s, by one network call."""
        ...

    def select(self, rows: Tensor) -> DenoisingProcess:
        """Return the chains of rows [K]."""
        ...


class StepSchedule(Protocol):
    """Schedule of the steps of a denoising head: a frozen dataclass with tables, of the head's own type."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def steps(self) -> int: ...

    def __hash__(self) -> int: ...


@lru_cache(maxsize=1024)
def with_steps(schedule: StepSchedule, steps: int) -> StepSchedule:
    """Return a schedule with another number of steps, cached so that its tables are kept."""
    return replace(schedule, steps=steps)


class DenoisingSource(Protocol):
    """Denoising head of a model."""

    def process(
        self,
        condition: Tensor,
        unconditional: Tensor | None,
        scale: float | Tensor,
        temperature: float | Tensor,
        schedule: Any,
    ) -> DenoisingProcess:
        """Set up M chains.

        Args:
            condition: [M, D].
            unconditional: [M, D] of the unconditional prompt; None without guidance.
            scale: guidance scale, a number or [M, 1].
            temperature: factor of the deviations, a number or [M, 1].
            schedule: for the head's kind.
        """


@dataclass(frozen=True)
class Denoising(Continuous):
    """Distributions of vectors at [T, n] nodes, or at [T] nodes, given by a denoising head.

    Attributes:
        source: the head.
        schedule: of its steps.
        condition: [T, n, D].
        unconditional: [T, n, D] under guidance.
        scale, temperature: a number for all, or [T, n, 1].
        drawn: [T, n, S + 1, d] the chains of the drawn values, if this is the q of a draft.
        normalize: whether a value is its chain's last state, normalised to mean 0 and variance 1, as in
            NextStep-1.1 (`stepfun-ai/NextStep-1, nextstep/models/pipeline_nextstep.py`, `use_norm`).
    """

    source: DenoisingSource
    schedule: StepSchedule
    condition: Tensor
    unconditional: Tensor | None
    scale: float | Tensor
    temperature: float | Tensor
    drawn: Tensor | None = None
    normalize: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.condition.dtype == torch.float64 else torch.float32

    @once
    def process(self) -> DenoisingProcess:
        """The chains of all nodes in order."""
        rows = self.map(lambda each: each.flatten(0, -2))
        settings = rows.scale, rows.temperature, self.schedule
        return self.source.process(rows.condition, rows.unconditional, *settings)

    def sample(self, random: RandomStream, place: Tensor, purpose: Purpose | Tensor) -> Tensor:
        return self.value_of(self.draw(random, place, purpose))

    def candidate(self, random: RandomStream, place: Tensor, purpose: Purpose) -> tuple[Tensor, Denoising]:
        chains = self.draw(random, place, purpose)
        return self.value_of(chains), replace(self, drawn=chains)

    def value_of(self, chains: Tensor) -> Tensor:
        """The values [..., d] at the ends of chains [..., S + 1, d]."""
        last = chains[..., -1, :]
        return layer_norm(last, last.shape[-1:], eps=NORM_EPS) if self.normalize else last

    def draw(self, random: RandomStream, place: Tensor, purpose: Purpose | Tensor) -> Tensor:
        """Draw a chain from each, [T, n, S + 1, d] or [T, S + 1, d]; the arguments are those of `sample`."""
        noise = self.noise(random, place, purpose)
        return self.process.run(noise).view(*self.condition.shape[:-1], *noise.shape[1:])

    def noise(self, random: RandomStream, place: Tensor, purpose: Purpose | Tensor) -> Tensor:
        """[M, S + 1, d] standard normal noise of the chains of all nodes; arguments as in `sample`."""
        keys = place if place.dim() == 2 else place[:, None]
        if isinstance(purpose, Tensor):
            purpose = purpose.view(keys.shape)
        states, size = self.process.steps + 1, self.process.size
        return random.normal(keys, purpose, states * size, self.dtype).view(-1, states, size)

    def choose(self, draft: Tree, random: RandomStream, first: Tensor) -> Tensor:
        """See `Distribution.choose`. The values are cached, because running a chain is expensive."""
        found: Tensor | None = self.__dict__.get("_chosen")
        if found is None:
            found = super().choose(draft, random, first)
            object.__setattr__(self, "_chosen", found)
        return found

    def log_ratio(self, x: Tensor, q: Denoising) -> Tensor:
        """[T, n] log p / q of the candidates' chains, both evaluated on the chain of q."""
        if q.drawn is None:
            raise TypeError("candidates of a denoising head are verified with their chains; q.drawn is None")
        chains = q.drawn.flatten(0, -3)
        ratio = log_likelihood(self.process, chains) - log_likelihood(q.process, chains)
        return ratio.view(x.shape[:-1])

    @property
    def uniforms(self) -> int:
        return 2 * (self.process.steps + 1) * self.process.size

    def propose(self, q: Denoising, u: Tensor) -> tuple[Tensor, Tensor]:
        """Draw whole chains from p; one is kept with probability 1 - min(1, q / p)."""
        process, (rows, proposals) = self.process, u.shape[:2]
        chosen = torch.arange(rows, device=u.device).repeat_interleave(proposals)
        own, other = process.select(chosen), q.process.select(chosen)
        chains = own.run(box_muller(u).view(rows * proposals, -1, process.size))
        ratio = log_likelihood(other, chains) - log_likelihood(own, chains)
        return self.value_of(chains).view(rows, proposals, -1), ratio.view(rows, proposals)

    def is_finite(self) -> Tensor:
        return self.condition.isfinite().all(-1)


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


def require_noise(process: DenoisingProcess) -> None:
    """Raise InputError if a step has no noise: its states have no density for the acceptance test."""
    if not process.is_noisy:
        rule = "must have noise in every step: pass last_step_noise=True, or use reflection or shared_noise"
        raise InputError("schedule", "a step without noise", rule)


def log_likelihood(process: DenoisingProcess, chains: Tensor) -> Tensor:
    """[M] log density of the transitions of chains [M, S + 1, d].

    Raises:
        InputError: a step has no noise, and therefore no density.
    """
    require_noise(process)
    mean, std = process.transitions(chains[:, :-1])
    z = (chains[:, 1:] - mean) / std
    return -(z.square() / 2 + std.log() + math.log(2 * math.pi) / 2).sum((-1, -2))
