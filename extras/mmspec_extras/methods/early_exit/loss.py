"""Loss of layers that draft: their predictions in the target's own cache, at random cuts of a text."""

from __future__ import annotations

from abc import abstractmethod
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mmspec.core.draft import Nodes
from mmspec.core.interfaces import PromptOutput
from mmspec.methods.ppd.loss import PromptTokensLoss
from mmspec.targets import CausalTarget
from mmspec.targets.causal import CausalState
from mmspec.training.data.sequences import DrafterBatch, DrafterData


class LayersLoss(PromptTokensLoss):
    """Cross-entropy of chains that some layers predict with the target's own predictions.

    The target reads a text once. After many cuts, the layers then read the tokens of the text again, with the
    keys and values of the target before the cut and their own after it, as in drafting.

    Args:
        cuts, discount: see `PromptTokensLoss`.
        length: number of tokens after each cut.
    """

    rate = 2.0
    head: Any

    def __init__(
        self, head: Any, target: CausalTarget, *, cuts: int = 32, discount: float = 0.8, length: int = 3
    ) -> None:
        super().__init__(head, target, cuts=cuts, discount=discount)
        self.length = length

    @property
    def probes(self) -> int:
        return self.length

    @staticmethod
    def prepare(head: Any, data: DrafterData, target: CausalTarget) -> None:
        """Keep the maps, which begin as identities."""

    def measure(self, batches: object) -> dict[str, Any]:
        return {}  # chains have no ranks

    def score(
        self, batch: DrafterBatch, state: CausalState, read: PromptOutput, root: Tensor, nodes: Nodes
    ) -> Tensor:
        ids = pad_sequence([each.inputs["input_ids"][0] for each in batch.examples], batch_first=True)
        ahead = (root[..., None] + torch.arange(self.probes, device=root.device)).flatten(1)
        tokens = ids.gather(1, ahead.clamp_max(ids.shape[1] - 1))
        with self.layers(batch, read):
            return self.target.score_nodes(state, replace(nodes, tokens=tokens)).logits

    @abstractmethod
    def layers(self, batch: DrafterBatch, read: PromptOutput) -> AbstractContextManager[None]:
        """Return a context in which the target runs the layers that draft."""
