"""Drafter of FiRST (2410.12513): the layers that routers choose from the prompt draft the whole reply."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Self

from torch import Tensor

from mmspec.core.interfaces import AnyTarget
from mmspec.core.rows import named
from mmspec.core.session import PromptBatch
from mmspec.heads.drafter import TrainedDrafter
from mmspec_extras.methods.early_exit.drafter import EarlyExitDrafter, EarlyExitSession
from mmspec_extras.methods.early_exit.exits import first_layers, stack_of
from mmspec_extras.methods.first.head import RoutedLayers


class RoutedLayersSession(EarlyExitSession):
    """Drafts of a batch.

    Attributes:
        keeps: [R, L] whether a row runs each layer in drafting.
        gates: those of `Adapters.beside`.
    """

    row_fields = named("keeps")

    drafter: RoutedLayersDrafter
    gates: list[Tensor | None]

    def __init__(self, drafter: RoutedLayersDrafter, batch: PromptBatch) -> None:
        super().__init__(drafter, batch)
        head, taps = drafter.model, batch.prefill.taps
        self.keeps = head.route([taps[layer] for layer in head.taps]) > 0
        self.rows_changed()

    def rows_changed(self) -> None:
        super().rows_changed()
        some = self.keeps.any(0).tolist()
        each = self.keeps.T[..., None, None]
        self.gates = [gate if used else None for gate, used in zip(each, some, strict=True)]

    def layers(self, exit: int) -> AbstractContextManager[None]:
        model = self.drafter.uncompiled.model
        return first_layers(model, exit, self.drafter.model.beside(stack_of(model)[1][:exit], self.gates))


class RoutedLayersDrafter(EarlyExitDrafter, TrainedDrafter):
    """Drafts a chain with the layers of the target that trained routers choose for each prompt.

    Tokens are drawn with the target's own noise, so that the output is bitwise that of plain sampling. The
    routers of a row decide once, after its prompt.

    Args:
        model: the trained routers.
        num_draft_tokens: length of the chain.

    Raises:
        InputError: a value is out of range.
    """

    session = RoutedLayersSession
    model: RoutedLayers

    def __init__(self, model: RoutedLayers, num_draft_tokens: int = 6) -> None:
        super().__init__(model.config.target_layers, num_draft_tokens)
        self.model, self.taps, self.runs_ahead = model, model.taps, False

    def fit(self, target: AnyTarget) -> Self:
        self.check(target)
        return super().fit(target)
