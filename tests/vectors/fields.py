"""A Gaussian field in place of MAR: cells of one number, each normal around a sum of those that are known."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from mmspec.core.canvas import Stopping, VectorCanvas
from mmspec.core.decoder import Decoder
from mmspec.core.image_grid import ImageGrid
from mmspec.core.interfaces import AcceptanceRule, Drafter, Request
from mmspec.core.loop import speculate
from mmspec.core.random_stream import RandomStream
from mmspec.core.statistics import DecodingStats
from mmspec.families.mar.cells import CellOrderDrafter
from mmspec.families.mar.target import MARSampler, MARTarget
from mmspec.vectors.denoising_head.head import run_chain


class ChainProcess:
    """Base of chains with the interface of `DenoisingProcess`."""

    transition: Callable[[Tensor, int], tuple[Tensor, Tensor]]

    def run(self, noise: Tensor, known: tuple[Tensor, Tensor] | None = None) -> Tensor:
        return run_chain(self.advance, noise, known)

    def advance(self, x: Tensor, step: int, noise: Tensor) -> Tensor:
        mean, std = self.transition(x, step)
        return mean + std * noise


@dataclass
class Chain(ChainProcess):
    """Chains towards a mean: each state keeps a share of its distance to it, and gets noise."""

    mean: Tensor
    std: Tensor
    steps: int
    keeps: float = 0.6
    size: int = 1
    is_noisy: bool = True
    has_fixed_noise: bool = False

    def transition(self, x: Tensor, step: int) -> tuple[Tensor, Tensor]:
        return self.mean + self.keeps * (x - self.mean), self.std.expand_as(x)

    def transitions(self, states: Tensor) -> tuple[Tensor, Tensor]:
        both = [self.transition(states[:, step], step) for step in range(self.steps)]
        mean, std = zip(*both, strict=True)
        return torch.stack(mean, 1), torch.stack(std, 1)

    def select(self, rows: Tensor) -> Chain:
        return replace(self, mean=self.mean[rows], std=self.std[rows])


@dataclass
class Head:
    """Head whose conditions are mean and deviation.

    Attributes:
        steps: of its chains.
        keeps: share of the distance that a step leaves; 0 makes the last state all there is.
    """

    steps: int = 3
    keeps: float = 0.6

    def process(
        self, condition: Tensor, unconditional: Tensor | None, scale: Any, temperature: Any, schedule: Any
    ) -> Chain:
        mean, std = condition.chunk(2, -1)
        if unconditional is not None:
            mean = unconditional[..., :1] + scale * (mean - unconditional[..., :1])
        return Chain(mean, std * temperature, self.steps, self.keeps)


class Field:
    """Model of an image of numbers, as `MARTarget` takes one.

    Args:
        side: of the grid.
        pull: weight of the average of the known cells in the mean of another.
        bias: added to every mean.
        std: deviation of a step.
        head: of its chains.
    """

    device, dtype = torch.device("cpu"), torch.float32

    def __init__(
        self, side: int = 2, pull: float = 0.7, bias: float = 0.0, std: float = 0.6, head: Head | None = None
    ) -> None:
        self.config = SimpleNamespace(num_classes=1, token_size=1, grid_size=side, hidden_size=2)
        self.pull, self.bias, self.std = pull, bias, std
        self.diffloss = head or Head()

    def modules(self) -> Iterator[torch.nn.Module]:
        return iter(())

    def conditions(self, tokens: Tensor, known: Tensor, labels: Tensor, count: int | None = None) -> Tensor:
        total = tokens[..., 0].where(known, 0.0).sum(-1, keepdim=True)
        average = total / known.sum(-1, keepdim=True).clamp_min(1)
        mean = self.bias + self.pull * average + 0.3 * (labels == 0)[:, None]
        return torch.stack([mean.expand(known.shape), torch.full(known.shape, self.std)], -1)


def cells_of(canvas: VectorCanvas) -> Tensor:
    """[B, N] numbers of the cells of images with one number each."""
    return torch.stack(canvas.outputs())[..., 0]


def decode_cells(
    target: MARTarget,
    rows: int,
    drafter: Drafter | None = None,
    rule: AcceptanceRule | None = None,
    seed: int = 0,
    **settings: Any,
) -> VectorCanvas:
    """Decode images to their end; the default is one cell in each forward."""
    from mmspec.trees.matching import SampleAndMatch

    length = target.grid.length
    sampler: Any = MARSampler(source=target.model.diffloss, **{"schedule": None, "length": length} | settings)
    grid = ImageGrid(target.grid.rows, target.grid.columns, 1)
    null = {"input_ids": torch.tensor([[target.vocabulary - 1]])} if sampler.is_guided else None
    request = Request({"input_ids": torch.tensor([[0]])}, negative_inputs=null, layout=grid)
    canvas = VectorCanvas([[0]] * rows, Stopping(length), DecodingStats(), target.device, target.vector_size)
    fitted = (drafter or CellOrderDrafter(length)).fit(target)
    roles = target, Decoder(fitted, rule or SampleAndMatch()), sampler
    for _ in speculate(*roles, [request] * rows, canvas, RandomStream.from_seed(seed, rows)):
        assert canvas.stats.target_forwards < 400, "places stay open for ever"
    assert canvas.finish_reasons == ["length"] * rows
    return canvas
