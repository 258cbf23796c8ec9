"""Base class of the losses of drafting heads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from torch import nn

from mmspec.drafting.window_states import codebook_sample
from mmspec.models.feature_head import EMBEDDINGS, HIDDEN
from mmspec.targets import CausalTarget
from mmspec.training.data.sequences import DrafterBatch, DrafterData
from mmspec.training.teacher import Reading, read

__all__ = ["DrafterLoss", "images_of"]


class DrafterLoss(nn.Module):
    """The loss of a head on sequences that its target reads.

    `forward` takes a `DrafterBatch` and returns the loss, a scalar, and a table of figures.

    Args:
        head: learns.
        target: does not; its embeddings and output matrix are used as they are.

    Attributes:
        outer: names of matrices that read inputs or write outputs, which Muon is not for.
    """

    outer: ClassVar[tuple[str, ...]] = ()

    def __init__(self, head: Any, target: CausalTarget) -> None:
        super().__init__()
        self.head = head
        self.target = target  # no module: neither trained nor saved

    def read(self, batch: DrafterBatch) -> Reading:
        """Run the target over the sequences, and keep its hidden states that the head reads or learns."""
        taps = dict.fromkeys((EMBEDDINGS, *self.head.taps, HIDDEN))
        return read(self.target, batch.examples, tuple(taps))

    def make(self, data: DrafterData, step: int, process: int) -> Any:
        """The batch of a step, in one of the processes that train: by default, sequences of the data."""
        return data.batch(step, process)

    @staticmethod
    def prepare(head: Any, data: DrafterData) -> None:
        """Prepare a new head, once, before it learns from the data."""

    def measure(self, batches: Iterable[DrafterBatch]) -> dict[str, Any]:
        """Measure a trained head on batches that it has not seen: attributes of its config."""
        return {}


def images_of(target: CausalTarget, columns: int) -> dict[str, Any]:
    """What a head has learnt of, for its config: the length of rows, and the codebook."""
    sample = codebook_sample(target).tolist()
    codebook = [] if target.codebook is None else [float(f"{number:.4g}") for number in sample]
    return {"columns": columns, "codebook": codebook}
