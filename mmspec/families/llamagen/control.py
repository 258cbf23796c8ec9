"""Image control of ControlAR (2410.02705): vectors of an edge or depth image, added to hidden states.

The vectors of a cell are added to the token that predicts it: the token of the previous cell, or the last
condition slot. The token's position alone determines its vectors, not the number of tokens in a forward pass,
so that windows and trees are controlled in the same way as single tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate
from transformers import Dinov2Model

from mmspec.families.llamagen.configuration import CONTROLLED_LAYERS, LlamaGenConfig

__all__ = ["ControlEncoder", "control_of_tokens", "two_layers"]


def two_layers(inputs: int, width: int) -> nn.Sequential:
    """Two linear layers `fc1` and `fc2` without biases, with the tanh form of GELU between; maps 0 to 0."""
    parts = OrderedDict[str, nn.Module](fc1=nn.Linear(inputs, width, bias=False), act=nn.GELU("tanh"))
    parts["fc2"] = nn.Linear(width, width, bias=False)
    return nn.Sequential(parts)


class ControlEncoder(nn.Module):
    """DINOv2 of the control image, and the layers that map its patches to the vectors of cells.

    Args:
        config: a config with a `control_config`.
    """

    def __init__(self, config: LlamaGenConfig) -> None:
        super().__init__()
        vision: Any = config.control_config
        self.adapter = Dinov2Model(vision)
        self.side = config.grid_size * vision.patch_size  # one patch per cell
        self.resize = config.control_resize
        width = config.hidden_size
        self.projection = two_layers(vision.hidden_size, width)
        self.condition = two_layers(width, width)
        self.layers = nn.ModuleList(two_layers(width, width) for _ in range(CONTROLLED_LAYERS))

    def forward(self, pixels: Tensor) -> Tensor:
        """Encode images [B, 3, H, W] in [-1, 1] to [B, 3, N, D], a vector per controlled layer and cell."""
        corners = None if self.resize == "nearest" else True
        resized = interpolate(pixels.float(), (self.side, self.side), mode=self.resize, align_corners=corners)
        patches = self.adapter(resized.to(self.adapter.dtype)).last_hidden_state[:, 1:]
        cells = self.condition(self.projection(patches))
        return torch.stack([layer(cells) for layer in self.layers], 1)


def control_of_tokens(control: Tensor, position_ids: Tensor, config: LlamaGenConfig) -> tuple[Tensor, ...]:
    """Return the vectors to add to tokens: the control of the cell that each predicts, or 0 without a cell.

    Args:
        control: [B, 3, N, D] control of all cells.
        position_ids: [B or 1, T] positions in the sequence; the first condition slot is 0.
        config: config of the model, which determines where the image begins.

    Returns:
        [B, T, D] for each controlled layer.
    """
    predicted = position_ids.expand(len(control), -1) + 1 - config.prefix_length
    inside = (predicted >= 0) & (predicted < config.image_tokens)
    index = predicted.clamp(0, config.image_tokens - 1)[:, None, :, None]
    return (torch.take_along_dim(control, index, 2) * inside[:, None, :, None]).unbind(1)
