"""Cache layer for mixers with a recurrent state: short convolutions, linear attention, state spaces.

The state summarises all committed tokens, so that rejected tokens cannot be removed from it. Scoring
therefore does not change it: every node is computed from the committed state and the node's path. The layer
keeps the data with which a commit moves the state to any node: an update per node for mixers with a closed
form, a state per node for all others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from mmspec.core.draft import Nodes
from mmspec.core.indexing import pick, take
from mmspec.errors import UnsupportedModelError
from mmspec.kernels import gated_delta_tree
from mmspec.kernels.gated_delta import path_decay

if TYPE_CHECKING:
    from mmspec.core.cache import WritePlan

RECURRENT_LAYERS = frozenset({"linear_attention", "conv"})
HYBRID_LAYER = "hybrid"  # attention and a recurrent mixer in one layer

States = dict[tuple[str, int], Tensor]
"""States of one mixer, as in transformers: ("conv", i) [R, C, k] last inputs of convolution i, zeros before
the prompt; ("recurrent", i) [R, ...] state after the last token."""

CONV, STATE = ("conv", 0), ("recurrent", 0)  # the only states of mixers with a closed form


class NodeUpdates(NamedTuple):
    """Updates of a recurrent state by each node of a draft, for the gated delta rule or a state space.

    A node adds its key k and its update u to the committed state S, under the decay G since that state.
    """

    keys: Tensor  # [B, heads, n, d_k]
    values: Tensor  # [B, heads, n, d_v] u: a value, minus the delta rule's prediction for its key
    decay: Tensor  # [B, heads, n] log decay G from the committed state to the node, inclusive


def state_after(state: Tensor, updates: NodeUpdates, path: Tensor, node: Tensor) -> Tensor:
    """Recurrent state after one node [B] of each row, in closed form.

    The state after node a is exp(G_a) S + sum_j exp(G_a - G_j) k_j u_j^T, over its path [B, n].
    """
    keys, values, decay = updates
    last = decay.gather(2, node[:, None, None].expand(-1, decay.shape[1], 1))  # [B, heads, 1]
    weight = (last - decay).masked_fill(~path[:, None], float("-inf")).exp()
    return last.exp()[..., None] * state + (keys * weight[..., None]).mT @ values


def state_space_tree(
    x: Tensor, b: Tensor, c: Tensor, g: Tensor, state: Tensor, ancestors: Tensor
) -> tuple[Tensor, NodeUpdates]:
    """Run the state space of Mamba-2 (2405.21060) along every path of a tree, without changing its state.

    Per token, S_t = exp(g_t) S_{t-1} + x_t b_t^T and y_t = S_t c_t. Unrolled along the path to node i (STree,
    2505.14969), where G_i is the sum of g down to node i, and j runs over its ancestors and itself,

        y_i = exp(G_i) S c_i + sum_j exp(G_i - G_j) (b_j . c_i) x_j.

    Args:
        x: [B, n, heads, d] inputs, multiplied by their step sizes.
        b, c: [B, n, groups, N]; each group serves consecutive heads.
        g: [B, n, heads] log decay of each node.
        state: [B, heads, d, N] after the last committed token; its dtype is used throughout.
        ancestors: [B, n, n] True where node j is node i or one of its ancestors.

    Returns:
        Outputs [B, n, heads, d], and the updates for `state_after`.
    """
    x, b, c, g = (part.transpose(1, 2).to(state.dtype) for part in (x, b, c, g))
    shared = x.shape[1] // b.shape[1]
    total, decay = path_decay(g, ancestors)
    alike = (c @ b.mT).repeat_interleave(shared, 1)  # [B, heads, n, n]
    b, c = b.repeat_interleave(shared, 1), c.repeat_interleave(shared, 1)
    out = total.exp()[..., None] * (c @ state.mT) + (decay * alike) @ x
    return out.transpose(1, 2), NodeUpdates(x, b, total)


@dataclass(frozen=True)
class Paths:
    """Paths of a draft tree in the form that recurrent layers need.

    Attributes:
        ancestors: [B, n, n] True where node j is node i or one of its ancestors.
        taps: [B, n, k] indices of the inputs of a convolution of k taps at each node, from the oldest to the
            node's own: 0 to k - 2 are the last committed inputs, k - 1 + j is node j.
    """

    ancestors: Tensor
    taps: Tensor

    @property
    def parents(self) -> Tensor:
        """[B, n] 0 if a node follows the last committed token, 1 + j if it follows node j."""
        return (self.taps[:, :, -2] - self.taps.shape[2] + 2).clamp_min(0)

    @classmethod
    def of(cls, nodes: Nodes, kernel: int) -> Paths:
        """Build the paths of a whole tree for convolutions of `kernel` taps."""
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
        """Move the paths to a device; a device_map may put layers on several."""
        return Paths(self.ancestors.to(device), self.taps.to(device))


@dataclass(frozen=True)
class ScoredPaths:
    """Nodes of a draft that were computed in closed form; kept until the next draft."""

    paths: Paths
    known: Tensor  # [R, k - 1 + n, C] last committed inputs of the convolution, then those of the nodes
    updates: NodeUpdates | None = None  # of the recurrent state, where there is one

    def after(self, committed: States, node: Tensor) -> States:
        """States after one node [R] of each row."""
        states = {CONV: pick(self.known, take(self.paths.taps, node)).transpose(1, 2)}
        if self.updates is not None:
            states[STATE] = state_after(
                committed[STATE], self.updates, take(self.paths.ancestors, node), node
            )
        return states

    def nbytes(self) -> int:
        return self.known.nbytes + sum(update.nbytes for update in self.updates or ())


@dataclass(frozen=True)
class ScoredSteps:
    """Nodes that were computed one by one: [R, 1 + n, ...] the committed states, then those after nodes."""

    states: States

    def after(self, committed: States, node: Tensor) -> States:
        return {key: take(states, 1 + node) for key, states in self.states.items()}

    def nbytes(self) -> int:
        return sum(states.nbytes for states in self.states.values())


class RecurrentLayer(LinearAttentionLayer):
    """States of one mixer for R rows: transformers writes them in the prefill, mmspec at commits.

    Models find no state before a prompt. Mixers with a closed form do not read states here while a draft is
    scored; the others read the state of a node's parent (`step`).

    Attributes:
        committed: the states after the last committed token of each row.
        scored: the last scored draft.
    """

    is_croppable = False
    scored: ScoredPaths | ScoredSteps
    _known: Tensor

    def __init__(self, plan: WritePlan, number_of_states: int = 1) -> None:
        super().__init__(number_of_states)
        self.plan = plan
        self.committed: States = {}
        self._is_entered = False

    @property
    def place(self) -> torch.device:
        """Device of the states; a device_map may put layers on several."""
        return next(iter(self.committed.values())).device

    @property
    def taps(self) -> int:
        """Kernel size k of the convolutions; 2 without convolutions: a node and its parent."""
        return max(
            (state.shape[2] for (kind, _), state in self.committed.items() if kind == "conv"), default=2
        )

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **kwargs: object
    ) -> Tensor:
        """Store the last k of the inputs [B, C, L]; return the inputs with those before them."""
        if not self._is_entered:
            self.is_conv_states_initialized[state_idx] = False  # allocated for another number of rows
        inputs: Tensor = super().update_conv_state(conv_states, state_idx, conv_kernel_size, **kwargs)
        last = self.conv_states[state_idx]
        if not self._is_entered and last is not None:
            self._keep(("conv", state_idx), last)
        return inputs

    def update_recurrent_state(
        self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: object
    ) -> Tensor:
        """Store the state after the last token."""
        if not self._is_entered:
            self._keep(("recurrent", state_idx), recurrent_states)
            return recurrent_states
        states: Tensor = super().update_recurrent_state(recurrent_states, state_idx, **kwargs)
        return states

    def enter(self, states: States) -> None:
        """Let the mixer continue from `states`, and update them in place, until `leave`."""
        for (kind, index), state in states.items():
            self.has_previous_state[index] = True
            if kind == "conv":
                self.conv_states[index], self.conv_kernel_size[index] = state, state.shape[2]
                self.is_conv_states_initialized[index] = True
            else:
                self.recurrent_states[index], self.is_recurrent_states_initialized[index] = state, True
        self._is_entered = True

    def leave(self) -> None:
        """Hide the states from the mixer again."""
        self.has_previous_state = dict.fromkeys(self.has_previous_state, False)
        self._is_entered = False

    def step(self, mixer: Callable[[Tensor], Tensor], hidden: Tensor, parents: Tensor) -> Tensor:
        """Run a mixer on the nodes one by one, each from the state after its parent.

        Args:
            mixer: computes one token of each row [R, 1, d] from the states in this layer.
            hidden: [R, n, d].
            parents: [R, n] 0 for the committed state, 1 + j for node j, parents first.

        Returns:
            [R, n, d].
        """
        nodes = hidden.shape[1]
        after = {
            key: torch.cat([state[:, None], state.new_empty(len(state), nodes, *state.shape[1:])], 1)
            for key, state in self.committed.items()
        }
        outputs = []
        try:
            for node in range(nodes):
                states = {key: take(known, parents[:, node]) for key, known in after.items()}
                self.enter(states)
                outputs.append(mixer(hidden[:, node : node + 1]))
                for key, known in after.items():
                    known[:, 1 + node] = states[key]
        finally:
            self.leave()
        self.scored = ScoredSteps(after)
        return torch.cat(outputs, 1)

    def convolved(self, inputs: Tensor, paths: Paths) -> Tensor:
        """Inputs of a convolution at every node, [B, n, C] -> [B, n, k, C], each preceded by its path."""
        self._known = torch.cat([self.committed[CONV][:, :, 1:].transpose(1, 2), inputs], 1)
        self.scored = ScoredPaths(paths, self._known)
        return pick(self._known, paths.taps.flatten(1)).view(*paths.taps.shape, -1)

    def delta_rule(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, paths: Paths) -> Tensor:
        """Apply `gated_delta_tree` to the committed state; return its outputs [B, n, heads, d_v]."""
        out, *updates = gated_delta_tree(q, k, v, g, beta, self.committed[STATE], paths.ancestors)
        self.scored = ScoredPaths(paths, self._known, NodeUpdates(*updates))
        return out

    def state_space(self, x: Tensor, b: Tensor, c: Tensor, g: Tensor, paths: Paths) -> Tensor:
        """Apply `state_space_tree` to the committed state; return its outputs [B, n, heads, d]."""
        out, updates = state_space_tree(x, b, c, g, self.committed[STATE], paths.ancestors)
        self.scored = ScoredPaths(paths, self._known, updates)
        return out

    def commit(self, node: Tensor, active: Tensor) -> None:
        """Set the state of active rows [R] to that after a node [R] of the last scored draft."""
        device = self.place
        node, active = node.to(device), active.to(device)
        for key, new in self.scored.after(self.committed, node).items():
            state = self.committed[key]
            state.copy_(new.where(active.view(-1, *[1] * (state.dim() - 1)), state))

    def row_states(self, row: int) -> States:
        """Copy the states of one row, each [1, ...]."""
        return {key: state[row : row + 1].clone() for key, state in self.committed.items()}

    def load(self, row: int, states: Mapping[tuple[str, int], Tensor]) -> None:
        """Write the states of one row, each [1, ...]."""
        for key, state in states.items():
            self._row_of(key, state)[row] = state[0]

    def nbytes(self) -> int:
        return sum(state.nbytes for state in self.committed.values())

    def _keep(self, key: tuple[str, int], state: Tensor) -> None:
        """Store a state of the row that is prefilled; the next prompt starts without one."""
        self.has_previous_state[key[1]] = False
        if not self.plan.keeps:
            return
        if self.plan.prefill_row is None:
            raise UnsupportedModelError(
                "a recurrent layer of the model changes its state while a draft is scored, which cannot be "
                "undone for rejected draft tokens; mmspec does not support this layer"
            )
        self._row_of(key, state)[self.plan.prefill_row] = state[0]

    def _row_of(self, key: tuple[str, int], state: Tensor) -> Tensor:
        """Buffer of a state for all rows."""
        if key not in self.committed:
            self.committed[key] = state.new_zeros(self.plan.rows, *state.shape[1:])
        return self.committed[key]
