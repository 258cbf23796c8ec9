"""Distributions that a denoising head draws from: chains of normal transitions, from noise to a vector.

The value of a node is the last state of a chain x_0, ..., x_S whose transitions are normal given the state
before. The density of the value alone has no closed form, that of a whole chain has: exact rules compare the
chains (acceptance rules of this package; De Bortoli et al., 2501.05370, on single steps).
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
    """Transitions of M chains, each with a condition of its own.

    Attributes:
        steps: number of transitions S.
        size: d of a state.
        is_noisy: whether every step has noise, so that chains have a density.
        has_fixed_noise: whether the deviations of the steps do not depend on condition or state.
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
        """The chains of rows [K]."""
        ...


class StepSchedule(Protocol):
    """Schedule of the steps of a denoising head: a frozen dataclass of the head's own, with tables."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def steps(self) -> int: ...

    def __hash__(self) -> int: ...


@lru_cache(maxsize=1024)
def with_steps(schedule: StepSchedule, steps: int) -> StepSchedule:
    """A schedule with another number of steps; the same object for equal arguments: its tables are kept."""
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
            scale: of guidance, a number or [M, 1].
            temperature: factor of the deviations, a number or [M, 1].
            schedule: of the head's kind.
        """


@dataclass(frozen=True)
class Denoising(Continuous):
    """Distributions of vectors at [T, n] nodes, or [T] of them, by a denoising head.

    Attributes:
        source: the head.
        schedule: of its steps.
        condition: [T, n, D].
        unconditional: [T, n, D] under guidance.
        scale, temperature: a number for all, or [T, n, 1].
        drawn: [T, n, S + 1, d] the chains of the values that were drawn, where this is the q of a draft.
        normalize: whether a value is the last state of its chain with mean 0 and variance 1, as NextStep-1.1
            is sampled (`stepfun-ai/NextStep-1, nextstep/models/pipeline_nextstep.py`, `use_norm`).
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
        """The chains of all nodes, one after another."""
        rows = self.map(lambda each: each.flatten(0, -2))
        settings = rows.scale, rows.temperature, self.schedule
        return self.source.process(rows.condition, rows.unconditional, *settings)

    def sample(self, random: RandomStream, place: Tensor, purpose: Purpose | Tensor) -> Tensor:
        return self.value_of(self.draw(random, place, purpose))

    def candidate(self, random: RandomStream, place: Tensor, purpose: Purpose) -> tuple[Tensor, Denoising]:
        chains = self.draw(random, place, purpose)
        return self.value_of(chains), replace(self, drawn=chains)

    def value_of(self, chains: Tensor) -> Tensor:
        """The values [..., d] that chains [..., S + 1, d] end in."""
        last = chains[..., -1, :]
        return layer_norm(last, last.shape[-1:], eps=NORM_EPS) if self.normalize else last

    def draw(self, random: RandomStream, place: Tensor, purpose: Purpose | Tensor) -> Tensor:
        """Draw a chain from each, [T, n, S + 1, d] or [T, S + 1, d]; arguments as of `sample`."""
        noise = self.noise(random, place, purpose)
        return self.process.run(noise).view(*self.condition.shape[:-1], *noise.shape[1:])

    def noise(self, random: RandomStream, place: Tensor, purpose: Purpose | Tensor) -> Tensor:
        """[M, S + 1, d] standard normal numbers of the chains of all nodes; arguments as of `sample`."""
        keys = place if place.dim() == 2 else place[:, None]
        if isinstance(purpose, Tensor):
            purpose = purpose.view(keys.shape)
        states, size = self.process.steps + 1, self.process.size
        return random.normal(keys, purpose, states * size, self.dtype).view(-1, states, size)

    def choose(self, draft: Tree, random: RandomStream, first: Tensor) -> Tensor:
        """As of `Distribution`; a chain takes long, so that the values are kept for who asks again."""
        found: Tensor | None = self.__dict__.get("_chosen")
        if found is None:
            found = super().choose(draft, random, first)
            object.__setattr__(self, "_chosen", found)
        return found

    def log_ratio(self, x: Tensor, q: Denoising) -> Tensor:
        """[T, n] log p / q of the chains that the candidates end, both on the chain of q."""
        if q.drawn is None:
            raise TypeError("candidates of a denoising head are judged by the chains that drew them")
        chains = q.drawn.flatten(0, -3)
        ratio = log_likelihood(self.process, chains) - log_likelihood(q.process, chains)
        return ratio.view(x.shape[:-1])

    @property
    def uniforms(self) -> int:
        return 2 * (self.process.steps + 1) * self.process.size

    def propose(self, q: Denoising, u: Tensor) -> tuple[Tensor, Tensor]:
        """Draw whole chains: one of p stays with 1 - min(1, q / p)."""
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
        advance: draws the states [M, d] after others, given the step and its noise [M, d].
        noise: [M, S + 1, d] the first state, then the noise of every step.
        known: states [M, S + 1, d], and [M, S + 1] which of them are not drawn but taken as they are.
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
    """Raise InputError if a step has no noise: its states have no density to judge candidates by."""
    if not process.is_noisy:
        allowed = "one whose last step has noise too; reflection and shared noise take any"
        raise InputError("schedule", "a step without noise", allowed)


def log_likelihood(process: DenoisingProcess, chains: Tensor) -> Tensor:
    """[M] log density of the transitions of chains [M, S + 1, d].

    Raises:
        InputError: a step has no noise, so that there is none.
    """
    require_noise(process)
    mean, std = process.transitions(chains[:, :-1])
    z = (chains[:, 1:] - mean) / std
    return -(z.square() / 2 + std.log() + math.log(2 * math.pi) / 2).sum((-1, -2))
