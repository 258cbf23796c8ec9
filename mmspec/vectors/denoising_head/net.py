"""Network of a denoising head: a residual MLP on one token, modulated by the time and by a condition.

The architecture and the names of the weights are those of MAR's diffusion loss (2406.11838), which NextStep-1
also uses (`stepfun-ai/NextStep-1, nextstep/models/modeling_fm_head.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, silu

from mmspec.core.graphs import GraphCache
from mmspec.kernels import gated_linear, modulated_linear

__all__ = ["DenoisingNet", "Modulations", "at_least_float32"]

FREQUENCIES = 256  # width of the sinusoidal embedding of times
MAX_PERIOD = 10_000
EPS = 1e-6  # of every LayerNorm


@dataclass(frozen=True)
class Modulations:
    """Modulations of the layers of a `DenoisingNet` by times and conditions, for every step of a chain.

    Scale and shift of a residual block include those of its LayerNorm, which `run` therefore skips.

    Attributes:
        blocks: for each residual block [S, ..., 3 w]: scale, shift and gate, side by side.
        final: [S, ..., 2 w] scale and shift of the last layer.
    """

    blocks: tuple[Tensor, ...]
    final: Tensor

    def at(self, step: int) -> Modulations:
        """Return the modulations of one step, [..., 3 w] and [..., 2 w], as views."""
        return Modulations(tuple(block[step] for block in self.blocks), self.final[step])

    def select(self, rows: Tensor) -> Modulations:
        """Return the modulations of some rows [K] of the last axis but one."""
        kept = tuple(block.index_select(-2, rows) for block in self.blocks)
        return Modulations(kept, self.final.index_select(-2, rows))


class DenoisingNet(nn.Module):
    """Residual MLP with adaptive LayerNorm, which takes a noisy token, a time and a condition.

    `forward` is the reference implementation. Only the token changes along a chain, so that `modulations`
    computes the rest for all steps at once, with one matrix product per layer, and `run` computes the
    remainder.

    Args:
        input_size: d of a token.
        condition_size: D of a condition.
        width: w of the hidden layers.
        depth: number of residual blocks.
        output_size: d for a velocity, 2 d for noise and variance.

    Attributes:
        graphs: CUDA graphs of its chains.
    """

    def __init__(
        self, input_size: int, condition_size: int, width: int, depth: int, output_size: int
    ) -> None:
        super().__init__()
        self.input_size, self.output_size = input_size, output_size
        self.time_embed = TimeEmbedding(width)
        self.cond_embed = nn.Linear(condition_size, width)
        self.input_proj = nn.Linear(input_size, width)
        # nn.ModuleList is not generic in its element type
        self.res_blocks: Any = nn.ModuleList(ResidualBlock(width) for _ in range(depth))
        self.final_layer = FinalLayer(width, output_size)
        self.graphs = GraphCache(type(self).__name__)
        self.initialize()

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the weights."""
        return self.input_proj.weight.dtype

    def initialize(self) -> None:
        """Initialise as published: modulations and outputs are zero, so that blocks start as identity."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
            elif isinstance(module, nn.LayerNorm):
                nn.init.ones_(module.weight)
                nn.init.zeros_(module.bias)
        for module in self.modules():
            if isinstance(module, Modulation):
                for weight in module.parameters():
                    nn.init.zeros_(weight)
        for layer in self.time_embed.mlp:
            if isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, std=0.02)
        nn.init.zeros_(self.final_layer.linear.weight)

    def forward(self, x: Tensor, t: Tensor, c: Tensor) -> Tensor:
        """Predict [M, output_size] for noisy tokens [M, d] at times [M], under conditions [M, D]."""
        y = self.time_embed(t) + self.cond_embed(c)
        hidden = self.input_proj(x)
        for block in self.res_blocks:
            hidden = block(hidden, y)
        output: Tensor = self.final_layer(hidden, y)
        return output

    def modulations(self, times: Tensor, condition: Tensor) -> Modulations:
        """Compute the modulations [S, ...] for times [S] and conditions [..., D]: all but the token's part.

        They take S * M * (3 depth + 2) * w numbers of memory; callers with very many rows M split them.
        """
        embedded = self.time_embed(times).view(-1, *[1] * (condition.dim() - 1), self.input_proj.out_features)
        y = silu(embedded + self.cond_embed(condition))
        blocks = tuple(block.modulation(y) for block in self.res_blocks)
        return Modulations(blocks, self.final_layer.modulation(y))

    def run(self, x: Tensor, tables: Modulations) -> Tensor:
        """Equal to `forward` if each token [..., d] has its modulation [..., 3 w], of any step."""
        hidden = self.input_proj(x)
        for block, table in zip(self.res_blocks, tables.blocks, strict=True):
            hidden = block.run(hidden, table)
        return self.final_layer.run(hidden, tables.final)


class TimeEmbedding(nn.Module):
    """Sinusoidal time embedding, followed by two linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(FREQUENCIES, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, times: Tensor) -> Tensor:
        """Embed times [n], [n, w]."""
        dtype = next(self.parameters()).dtype
        precise = at_least_float32(dtype)
        index = torch.arange(FREQUENCIES // 2, device=times.device, dtype=precise)
        angles = times[:, None].to(precise) * torch.exp(index * (-2 * math.log(MAX_PERIOD) / FREQUENCIES))
        embedded: Tensor = self.mlp(torch.cat([angles.cos(), angles.sin()], -1).to(dtype))
        return embedded


class Modulation(nn.Sequential):
    """SiLU and a linear layer: shift, scale and, with three parts, gate."""

    def __init__(self, width: int, parts: int) -> None:
        super().__init__(nn.SiLU(), nn.Linear(width, parts * width))


class ResidualBlock(nn.Module):
    """x + gate * mlp(norm(x) * (1 + scale) + shift)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.in_ln = nn.LayerNorm(width, eps=EPS)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.adaLN_modulation = Modulation(width, parts=3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        shift, scale, gate = self.adaLN_modulation(y).chunk(3, dim=-1)
        output: Tensor = x + gate * self.mlp(self.in_ln(x) * (1 + scale) + shift)
        return output

    def modulation(self, y: Tensor) -> Tensor:
        """Modulation [..., 3 w] for `run`, from the output [..., w] of the SiLU."""
        shift, scale, gate = self.adaLN_modulation[1](y).chunk(3, dim=-1)
        scale = 1 + scale
        return torch.cat([self.in_ln.weight * scale, self.in_ln.bias * scale + shift, gate], dim=-1)

    def run(self, x: Tensor, table: Tensor) -> Tensor:
        """`forward` with a precomputed modulation; the result is at least in float32."""
        scale, shift, gate = table.chunk(3, dim=-1)
        first, _, second = self.mlp
        hidden = modulated_linear(x, scale, shift, first.weight, first.bias, EPS, True)
        return gated_linear(x, hidden, gate, second.weight, second.bias)


class FinalLayer(nn.Module):
    """Linear(norm(x) * (1 + scale) + shift)."""

    def __init__(self, width: int, output_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, output_size)
        self.adaLN_modulation = Modulation(width, parts=2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        shift, scale = self.adaLN_modulation(y).chunk(2, dim=-1)
        output: Tensor = self.linear(layer_norm(x, x.shape[-1:], eps=EPS) * (1 + scale) + shift)
        return output

    def modulation(self, y: Tensor) -> Tensor:
        """Modulation [..., 2 w] for `run`, from the output [..., w] of the SiLU."""
        shift, scale = self.adaLN_modulation[1](y).chunk(2, dim=-1)
        return torch.cat([1 + scale, shift], dim=-1)

    def run(self, x: Tensor, table: Tensor) -> Tensor:
        """`forward` with a precomputed modulation."""
        scale, shift = table.chunk(2, dim=-1)
        return modulated_linear(x, scale, shift, self.linear.weight, self.linear.bias, EPS, False)


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """Data type of arithmetic around a network of `dtype`: float32, or float64 for float64 networks."""
    return torch.promote_types(dtype, torch.float32)
