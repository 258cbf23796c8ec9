"""Several cells of an image per forward pass, with features from a cache (LazyMAR, 2503.12450)."""

from __future__ import annotations

import copy
from typing import Any, cast

from mmspec.core.interfaces import Target
from mmspec.core.promise import Level
from mmspec.core.session import PromptBatch
from mmspec.families.mar.cells import CellOrderDrafter, CellOrderSession
from mmspec.families.mar.target import MARState, MARTarget
from mmspec_extras.methods.lazymar.feature_cache import FeatureCache, FeatureCaching


class LazyCellSession(CellOrderSession):
    """Decoding order of a batch of images, whose conditions come from a cache of features."""

    def __init__(self, drafter: LazyCellDrafter, batch: PromptBatch) -> None:
        super().__init__(drafter, batch)
        self.model, self.caching, self.rows = drafter.target.model, drafter.caching, len(batch.requests)

    def attach(self, state: MARState) -> None:
        copies = len(state.labels) // self.rows  # 2 with guidance
        state.reader = FeatureCache(self.model, self.caching, self.rows, copies)


class LazyCellDrafter(CellOrderDrafter):
    """Decides the cells of an image as `CellOrderDrafter` does, with cached features.

    Args:
        iterations, order, last_steps, annealing: see `CellOrderDrafter`.
        refresh, share, test_layer: see `FeatureCaching`.

    Raises:
        InputError: a value is out of range; in `fit`, the model has no such test layer.
    """

    session = LazyCellSession
    target: MARTarget

    def __init__(
        self,
        iterations: int | None = None,
        order: str = "random",
        last_steps: int | None = None,
        annealing: str = "linear",
        refresh: int = 9,
        share: float = 0.1,
        test_layer: int = 3,
    ) -> None:
        super().__init__(iterations, order, last_steps, annealing)
        self.caching = FeatureCaching(refresh, share=share, test_layer=test_layer)
        self.exactness = Level.APPROXIMATE

    def fit(self, target: Target[Any]) -> LazyCellDrafter:
        self.check(target)
        self.caching.check(target.config)
        fitted = copy.copy(self)
        fitted.target = cast(MARTarget, target)
        return fitted
