"""Keys of a denoising head as MAR and NextStep-1 publish them, and random weights for them."""

from __future__ import annotations

import torch
from torch import Tensor

FREQUENCIES = 256


def net_shapes(
    token: int, condition: int, width: int, depth: int, outputs: int, prefix: str = ""
) -> dict[str, tuple[int, ...]]:
    layers = {
        "time_embed.mlp.0": (width, FREQUENCIES),
        "time_embed.mlp.2": (width, width),
        "cond_embed": (width, condition),
        "input_proj": (width, token),
        "final_layer.linear": (outputs, width),
        "final_layer.adaLN_modulation.1": (2 * width, width),
    }
    norms = []
    for block in range(depth):
        norms.append(f"res_blocks.{block}.in_ln")
        layers[f"res_blocks.{block}.mlp.0"] = (width, width)
        layers[f"res_blocks.{block}.mlp.2"] = (width, width)
        layers[f"res_blocks.{block}.adaLN_modulation.1"] = (3 * width, width)
    shapes: dict[str, tuple[int, ...]] = {f"{prefix}{name}.weight": (width,) for name in norms}
    shapes |= {f"{prefix}{name}.weight": shape for name, shape in layers.items()}
    shapes |= {f"{prefix}{name}.bias": (width,) for name in norms}
    return shapes | {f"{prefix}{name}.bias": shape[:1] for name, shape in layers.items()}


def randomize(module: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """Weights of which none is zero: matrices at 1 / sqrt(fan-in), the rest about 0.3."""
    generator = torch.Generator().manual_seed(seed)
    for weight in module.parameters():
        values: Tensor = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
        scale = weight.shape[1] ** -0.5 if weight.dim() > 1 else 0.3
        weight.data = (values * scale).to(weight.dtype)
    return module
