"""Loss of FiRST's routers and maps (2410.12513): that of the layers that draft, and of their number."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from mmspec.core.interfaces import PromptOutput
from mmspec.training.data.sequences import DrafterBatch
from mmspec_extras.methods.early_exit.exits import first_layers, stack_of
from mmspec_extras.methods.early_exit.loss import LayersLoss
from mmspec_extras.methods.first.head import RoutedLayers


class RoutedLayersLoss(LayersLoss):
    """The loss of the kept layers, and the probability of keeping a layer times `penalty`.

    Layers are kept or skipped as in drafting; the gradient of a router is that of a mixture of both. Routers
    and maps are trained together.

    Args:
        cuts, discount, length: see `LayersLoss`.
        penalty: see above; in nats, for all layers together.
    """

    head: RoutedLayers
    kept: Tensor

    def __init__(self, head: Any, target: Any, *, penalty: float = 2.0, **how: Any) -> None:
        super().__init__(head, target, **how)
        self.penalty = penalty

    def forward(self, batch: DrafterBatch) -> tuple[Tensor, dict[str, Tensor]]:
        loss, figures = super().forward(batch)
        figures["kept"] = (self.kept > 0.5).float().mean()
        return loss + self.penalty * self.kept.mean(), figures

    def layers(self, batch: DrafterBatch, read: PromptOutput) -> AbstractContextManager[None]:
        ends = [int(each.learnt.long().argmax()) for each in batch.examples]
        prompts = [
            [states[:, :end] for states, end in zip(read.taps[layer], ends, strict=True)]
            for layer in self.head.taps
        ]
        self.kept = self.head.route(prompts).sigmoid()
        gates = (self.kept > 0.5) + self.kept - self.kept.detach()
        model, count = self.target.model, len(self.head.taps)
        maps = self.head.beside(stack_of(model)[1][:count], [*gates.T[..., None, None]])
        return first_layers(model, count, maps)
