"""Distributions of a denoising head: chains of Gaussian transitions from noise to a vector.

The value of a node is the last state of a chain x_0, ..., x_S whose transitions are Gaussian given the state
before. The density of the value alone has no closed form, but that of a whole chain has: exact rules compare
the chains (acceptance rules of this package; De Bortoli et al., 2501.05370, on single steps).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from mmspec.core.distributions import Continuous
from mmspec.core.draft import Tree
from mmspec.core.once import once
from mmspec.core.random_stream import Purpose, RandomStream, box_muller
from mmspec.errors import InputError
from mmspec.vectors.denoising_head.head import DenoisingHead, DenoisingProcess
from mmspec.vectors.denoising_head.schedule import DenoisingSchedule

__all__ = ["Denoising", "log_likelihood", "require_noise"]

NORM_EPS = 1e-6


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

    source: DenoisingHead
    schedule: DenoisingSchedule
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
