"""Low-rank maps beside the layers of a target, which act in drafting forward passes alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from torch.nn.functional import silu

from mmspec.errors import UnsupportedModelError
from mmspec.heads.configuration import SizedHeadConfig
from mmspec.heads.model import DraftingHead
from mmspec.models.replaced import Replacement
from mmspec.open_types import AnyFunction

EPSILON = 1e-6


@strict
class AdaptersConfig(SizedHeadConfig):
    """Config of maps beside layers.

    Attributes:
        rank: of each map.
    """

    rank: int = 32

    @property
    def reads_targets_matrix(self) -> bool:
        return False  # the target itself computes the logits, for all tokens

    def validate_architecture(self) -> None:
        """Raise ValueError for a rank that is out of range; called by `strict`."""
        if not 1 <= self.rank <= self.hidden_size:
            raise ValueError(f"rank must be from 1 to {self.hidden_size}, the hidden size; got {self.rank}")


class Adapters(DraftingHead):
    """Maps of the output x of each layer l: x + |x| U_l silu(D_l x / |x|), with |x| the root mean square.

    Attributes:
        down, up: [L, r, d] and [L, d, r]; `up` begins as zeros.
    """

    config: AdaptersConfig

    def __init__(self, config: AdaptersConfig, layers: int) -> None:
        super().__init__(config)
        size = layers, config.rank, config.hidden_size
        self.down = nn.Parameter(torch.randn(size) * config.hidden_size**-0.5)
        self.up = nn.Parameter(torch.zeros(size).mT.contiguous())
        self.post_init()

    @property
    def taps(self) -> tuple[int, ...]:
        return ()

    def repair(self, layer: int, states: Tensor) -> Tensor:
        """Map the output [..., d] of a layer."""
        states, given = states.to(self.dtype), states.dtype
        size = states.square().mean(-1, keepdim=True).add(EPSILON).sqrt()
        return (states + size * (silu(states / size @ self.down[layer].mT) @ self.up[layer].mT)).to(given)

    def beside(
        self, layers: Iterable[nn.Module], gates: Sequence[Tensor | None] | None = None
    ) -> list[Replacement]:
        """Replacements of the `forward` of the first layers of the target, with the maps after them.

        Args:
            layers: the layers.
            gates: of each layer [R, 1, 1], from 0 (the row skips it) to 1 (it is run); None skips it in all
                rows. None runs all layers.
        """

        def replacement(index: int, layer: nn.Module) -> Replacement:
            gate = None if gates is None else gates[index]

            def make(own: AnyFunction) -> AnyFunction:
                def forward(hidden_states: Tensor, *args: object, **kwargs: object) -> Tensor:
                    if gates is not None and gate is None:
                        return self.repair(index, hidden_states)
                    states = own(hidden_states, *args, **kwargs)
                    if not isinstance(states, Tensor):
                        rule = "returns more than hidden states, which a skipped layer cannot return"
                        raise UnsupportedModelError(f"{type(layer).__name__} {rule}")
                    if gate is not None:
                        states = torch.lerp(hidden_states, states, gate.to(states.dtype))
                    return self.repair(index, states)

                return forward

            return Replacement(layer, make)

        return [replacement(index, layer) for index, layer in enumerate(layers)]
