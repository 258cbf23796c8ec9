"""Loss of Hidden Transfer (2404.12022): that of `ppd`, at pseudo hidden states."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mmspec.core.indexing import pick
from mmspec.core.interfaces import PromptOutput
from mmspec.methods.ppd.loss import PromptTokensLoss
from mmspec.targets import CausalTarget
from mmspec.targets.causal import CausalState
from mmspec.training.data.sequences import DrafterData
from mmspec_extras.methods.hidden_transfer.head import HiddenTransfer


class HiddenTransferLoss(PromptTokensLoss):
    """Cross-entropy of the target's predictions at pseudo hidden states with its own at the same places.

    Args:
        cuts, discount: see `PromptTokensLoss`.
    """

    rate = 3.0
    head: HiddenTransfer

    @staticmethod
    def prepare(head: Any, data: DrafterData, target: CausalTarget) -> None:
        """Keep the maps, which begin as identities."""

    def put_probes(self, state: CausalState, read: PromptOutput, root: Tensor) -> None:
        super().put_probes(state, read, root)
        entering = pad_sequence([states[0] for states in read.taps[self.head.config.layer]], batch_first=True)
        pseudo = self.head(pick(entering, (root - 1).clamp_min(0))).flatten(1, 2)  # [B, C * K, d]
        state.hidden.change = lambda layer, states, nodes: pseudo
