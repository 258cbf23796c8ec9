"""Drafter of Hidden Transfer (2404.12022): pseudo hidden states predict the levels of the next tree.

They are query nodes as in `ppd`, whose states are replaced where they enter an inner layer of the target. The
layers below compute those nodes in vain.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmspec.core.draft import Nodes
from mmspec.core.interfaces import AnyTarget
from mmspec.errors import InputError
from mmspec.methods.ppd.drafter import PromptTokensDrafter, PromptTokensSession
from mmspec.targets.causal import CausalState
from mmspec_extras.methods.hidden_transfer.head import HiddenTransfer


def hosts_of(nodes: Nodes, is_query: Tensor) -> Tensor:
    """[R, n] the deepest node that each sees, query nodes [R, n] excluded; all slots are of these nodes."""
    seen = nodes.visible & ~is_query[:, None]
    return nodes.depths[:, None].expand_as(seen).masked_fill(~seen, -1).argmax(-1)


class HiddenTransferSession(PromptTokensSession):
    """Pseudo hidden states that draft for one batch."""

    head: HiddenTransfer  # type: ignore[assignment]  # it has `embeddings` too

    def attach(self, state: CausalState) -> None:
        if self.target.steps is not None:
            raise InputError("compile", True, "must be False: hidden states change within the forward pass")
        super().attach(state)
        state.hidden.change = self._transfer

    def _transfer(self, layer: int, states: Tensor, nodes: Nodes) -> Tensor:
        """Replace the states [R, n, d] of query nodes by those that their hosts' states are mapped to."""
        is_query = nodes.tokens >= self.target.vocabulary
        host = hosts_of(nodes, is_query)[..., None]
        pseudo = self.head(states.gather(1, host.expand_as(states)))  # [R, n, K, d]
        step = (nodes.tokens - self.target.vocabulary).clamp_min(0)[..., None, None]
        chosen = pseudo.gather(2, step.expand(-1, -1, 1, states.shape[-1]))[:, :, 0]
        return torch.where(is_query[..., None], chosen, states)


class HiddenTransferDrafter(PromptTokensDrafter):
    """Drafts a tree of the likeliest tokens at pseudo hidden states in the target's own forward pass.

    Args:
        model: the trained maps.
        num_draft_tokens, top_k, sampling: see `PromptTokensDrafter`.
        depth: see `HeadDrafter`. At most the number of maps.
        tree: see `PromptTokensDrafter`.
        probes_per_node: mean number of pseudo hidden states after a candidate, which are placed where their
            gain is largest, from 0 to the number of maps, which puts all of them after each.

    Raises:
        InputError: a value is out of range; in `fit`, the maps are not finite.
    """

    session = HiddenTransferSession
    model: HiddenTransfer  # type: ignore[assignment]

    def check(self, target: AnyTarget) -> None:
        super().check(target)
        if not self.model.weight.isfinite().all():
            raise InputError("drafter", "maps with NaN or infinity", "must be finite")
