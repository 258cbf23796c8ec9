"""Routers of FiRST (2410.12513): one for each layer of a target, with maps that repair what is skipped."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mmspec_extras.methods.early_exit.adapters import Adapters, AdaptersConfig

UNDECIDED = 1.0  # logit of a new router, which keeps its layer


class RoutedLayersConfig(AdaptersConfig):
    """Config of routers and maps."""

    model_type = "mmspec_first"


class RoutedLayers(Adapters):
    """A router for each layer, which reads the mean state of the prompt that enters the layer; and the maps.

    Attributes:
        routers: [L, d], zeros at first.
        bias: [L].
    """

    config: RoutedLayersConfig
    config_class = RoutedLayersConfig
    base_model_prefix = "first"

    def __init__(self, config: RoutedLayersConfig) -> None:
        super().__init__(config, config.target_layers)
        self.routers = nn.Parameter(torch.zeros(config.target_layers, config.hidden_size))
        self.bias = nn.Parameter(torch.full((config.target_layers,), UNDECIDED))

    @property
    def taps(self) -> tuple[int, ...]:
        return tuple(range(self.config.target_layers))

    def route(self, prompts: Sequence[Sequence[Tensor]]) -> Tensor:
        """Return the logits [R, L] of keeping each layer.

        Args:
            prompts: for each layer, R states [1, T, d] of prompts that enter it.
        """
        means = torch.stack([torch.cat([each.mean(1) for each in states]) for states in prompts], 1)
        means = nn.functional.rms_norm(means.to(self.dtype), means.shape[-1:])
        return (means * self.routers).sum(-1) + self.bias
