"""Cache layer of a mixer with a recurrent state: short convolutions, linear attention.

The state is of all committed tokens at once, so that rejected ones cannot be cut off again. Scoring therefore
leaves it alone: every node is computed from the committed state and its own path, and what a commit needs to
bring the state to any node stays here meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from mmspec.decoding.delta_rule import NodeUpdates, state_after
from mmspec.decoding.draft import Nodes
from mmspec.decoding.indexing import pick, take
from mmspec.errors import UnsupportedModelError
from mmspec.kernels import gated_delta_tree

if TYPE_CHECKING:
    from mmspec.decoding.cache import WritePlan

RECURRENT_LAYERS = frozenset({"linear_attention", "conv"})


@dataclass(frozen=True)
class Paths:
    """Paths of a draft tree, as recurrent layers need them.

    Attributes:
        ancestors: [B, n, n] True where node j is node i or one of its ancestors.
        taps: [B, n, k] where a convolution of k taps finds its inputs at each node, the oldest first and the
            node's own last: 0 to k - 2 are the last committed inputs, k - 1 + j is node j.
    """

    ancestors: Tensor
    taps: Tensor

    @classmethod
    def of(cls, nodes: Nodes, kernel: int) -> Paths:
        """Build the paths for convolutions of `kernel` taps, of the nodes of a whole tree."""
        committed, depth = kernel - 1, nodes.depth
        above = depth[:, :, None] - depth[:, None, :]  # [B, n, n]
        taps = [
            torch.where(
                depth >= back,
                committed + (nodes.visible & (above == back)).long().argmax(-1),
                committed + depth - back,
            )
            for back in reversed(range(kernel))
        ]
        return cls(nodes.visible, torch.stack(taps, 2))

    def to(self, device: torch.device) -> Paths:
        """The same on another device; a device_map may put layers on several."""
        return Paths(self.ancestors.to(device), self.taps.to(device))


class RecurrentLayer(LinearAttentionCacheLayerMixin):
    """State of one mixer for R rows; transformers writes it when prompts are prefilled, mmspec at commits.

    Models find no state before a prompt, which is true, and are not asked while a draft is scored.

    Attributes:
        window: [R, k - 1, C] last inputs of a convolution of k taps, zeros before the prompt.
        state: [R, heads, d_k, d_v] after the last committed token; short convolutions have none.
    """

    is_croppable = False
    window: Tensor
    state: Tensor
    _scored: tuple[Paths, Tensor]

    def __init__(self, plan: WritePlan) -> None:
        super().__init__()
        self.plan = plan
        self._updates: NodeUpdates | None = None

    def lazy_initialization(
        self, conv_states: Tensor | None = None, recurrent_states: Tensor | None = None, state_idx: int = 0
    ) -> None:
        """Make buffers for inputs like [1, k - 1, C], and for states like [1, heads, d_k, d_v]."""
        if conv_states is not None and not self.is_conv_states_initialized[0]:
            self.window = conv_states.new_zeros(self.plan.rows, *conv_states.shape[1:])
            self.is_conv_states_initialized[0] = True
        if recurrent_states is not None and not self.is_recurrent_states_initialized[0]:
            self.state = recurrent_states.new_zeros(self.plan.rows, *recurrent_states.shape[1:])
            self.is_recurrent_states_initialized[0] = True

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int = 0, **kwargs: object
    ) -> Tensor:
        """Keep the last inputs of a prompt [1, C, L]; return them all."""
        row = self._row()
        if row is not None:
            committed = conv_kernel_size - 1
            last = pad(conv_states, (committed, 0))[:, :, -committed:].transpose(1, 2)
            self.lazy_initialization(conv_states=last)
            self.window[row] = last[0]
        return conv_states

    def update_recurrent_state(
        self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: object
    ) -> Tensor:
        """Keep the state [1, heads, d_k, d_v] after a prompt."""
        row = self._row()
        if row is not None:
            self.lazy_initialization(recurrent_states=recurrent_states)
            self.state[row] = recurrent_states[0]
        return recurrent_states

    def convolved(self, inputs: Tensor, paths: Paths) -> Tensor:
        """Inputs of a convolution at every node, [B, n, C] -> [B, n, k, C], each with its path before it."""
        known = torch.cat([self.window, inputs], 1)
        self._scored = paths, known
        return pick(known, paths.taps.flatten(1)).view(*paths.taps.shape, -1)

    def delta_rule(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, paths: Paths) -> Tensor:
        """Apply `gated_delta_tree` to the committed state; return its outputs [B, n, heads, d_v]."""
        out, *updates = gated_delta_tree(q, k, v, g, beta, self.state, paths.ancestors)
        self._updates = NodeUpdates(*updates)
        return out

    def commit(self, node: Tensor, active: Tensor) -> None:
        """Bring the rows that are active [R] to the state after a node [R] of the draft scored last."""
        paths, known = self._scored
        node, active = node.to(known.device), active.to(known.device)
        window = pick(known, take(paths.taps, node)[:, 1:])
        self.window.copy_(window.where(active[:, None, None], self.window))
        if self._updates is not None:
            state = state_after(self.state, self._updates, take(paths.ancestors, node), node)
            self.state.copy_(state.where(active[:, None, None, None], self.state))

    def nbytes(self) -> int:
        window = self.window.nbytes if self.is_conv_states_initialized[0] else 0
        return window + (self.state.nbytes if self.is_recurrent_states_initialized[0] else 0)

    def _row(self) -> int | None:
        """The row that is prefilled; None if nothing is kept."""
        if self.plan.keeps and self.plan.prefill_row is None:
            raise UnsupportedModelError("a recurrent state would be changed by tokens that may be rejected")
        return self.plan.prefill_row
