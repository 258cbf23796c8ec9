"""The closed forms over random trees equal the recurrence over every path, token by token, in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from mmspec.core import recurrent
from mmspec.core.cache import WritePlan
from mmspec.core.draft import Draft, DraftKind
from mmspec.core.recurrent import CONV, STATE, Paths, RecurrentLayer
from mmspec.kernels import gated_delta
from tests.oracles import ragged_tree

ROWS, NODES, KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM = 4, 12, 2, 4, 5, 3
KERNEL, CHANNELS = 4, 6
TOLERANCE = 1e-12  # of numbers about 1, in float64


def ragged_draft(seed: int = 0) -> Draft:
    """Random trees, one a row; one of them a chain, so that paths are longer than a convolution."""
    generator = torch.Generator().manual_seed(seed)
    parents = (torch.rand(ROWS, NODES, generator=generator) * torch.arange(NODES)).long()
    parents[0] = (torch.arange(NODES) - 1).clamp_min(0)
    tokens = torch.randint(9, (ROWS, NODES), generator=generator)
    return ragged_tree(tokens, parents, torch.ones_like(tokens).bool(), DraftKind.POINT)


def paths_of(draft: Draft) -> list[tuple[int, int, list[int]]]:
    """Every node of every row with its path from the root, by walking up."""
    found = []
    for row in range(ROWS):
        for node in range(NODES):
            path = [node]
            while path[0]:
                path.insert(0, int(draft.parents[row, path[0]]))
            found.append((row, node, path))
    return found


def inputs(seed: int = 1) -> tuple[tuple[Tensor, ...], Tensor]:
    """Queries, keys, values, log decays and step sizes of all nodes; the committed state."""
    torch.manual_seed(seed)
    q, k = torch.randn(2, ROWS, NODES, KEY_HEADS, KEY_DIM, dtype=torch.float64)
    v = torch.randn(ROWS, NODES, HEADS, VALUE_DIM, dtype=torch.float64)
    g, beta = -torch.rand(ROWS, NODES, HEADS).double(), torch.rand(ROWS, NODES, HEADS).double()
    return (q, k, v, g, beta), torch.randn(ROWS, HEADS, KEY_DIM, VALUE_DIM, dtype=torch.float64)


def read_token_by_token(
    parts: tuple[Tensor, ...], state: Tensor, row: int, path: list[int]
) -> tuple[Tensor, Tensor]:
    """The output of the last node of a path and the state after it, by the recurrence itself."""
    q, k, v, g, beta = (part[row] for part in parts)
    state = state[row]
    for node in path:
        key = gated_delta.norm(k[node]).repeat_interleave(HEADS // KEY_HEADS, 0)
        state = g[node].exp()[:, None, None] * state
        recalled = torch.einsum("hkv,hk->hv", state, key)
        state = state + torch.einsum("hk,hv->hkv", key, beta[node][:, None] * (v[node] - recalled))
    query = gated_delta.norm(q[path[-1]]).repeat_interleave(HEADS // KEY_HEADS, 0) * KEY_DIM**-0.5
    return torch.einsum("hkv,hk->hv", state, query), state


def test_every_node_reads_its_own_path() -> None:
    draft, (parts, state) = ragged_draft(), inputs()
    out, *_ = gated_delta.gated_delta_tree(*parts, state, draft.ancestors)
    for row, node, path in paths_of(draft):
        expected, _ = read_token_by_token(parts, state, row, path)
        assert (out[row, node] - expected).abs().max() < TOLERANCE, f"row {row}, path {path}"


def scored_layer(draft: Draft) -> tuple[RecurrentLayer, Tensor, Tensor, tuple[Tensor, ...]]:
    """A layer with prompts of 1, 2, .. tokens that has scored the draft, and what it was given and gave."""
    plan = WritePlan(ROWS, 0)
    layer, (parts, state) = RecurrentLayer(plan), inputs()
    prompt, nodes = torch.randn(CHANNELS, ROWS), torch.randn(ROWS, NODES, CHANNELS)
    for plan.prefill_row in range(ROWS):
        layer.update_conv_state(prompt[None, :, : plan.prefill_row + 1], conv_kernel_size=KERNEL)
        layer.update_recurrent_state(state[plan.prefill_row][None])
        assert not layer.has_previous_state[0], "the next prompt would go on from this one"
    plan.prefill_row = None
    paths = Paths.of(draft.nodes, KERNEL)
    seen = layer.convolved(nodes, paths)
    layer.delta_rule(*parts, paths)
    return layer, seen, torch.cat([prompt.T.expand(ROWS, -1, -1), nodes], 1), (*parts, state)


def last_inputs(known: Tensor, row: int, path: list[int], count: int) -> Tensor:
    """The last inputs of a row's prompt and a path; zeros before the prompt."""
    line = torch.cat(
        [torch.zeros(KERNEL, CHANNELS), known[row, : row + 1], known[row, [ROWS + n for n in path]]]
    )
    return line[-count:]


def test_convolutions_see_the_path_behind_the_prompt() -> None:
    draft = ragged_draft()
    _, seen, known, _ = scored_layer(draft)
    for row, node, path in paths_of(draft):
        assert torch.equal(seen[row, node], last_inputs(known, row, path, KERNEL)), f"row {row}, path {path}"


def test_a_commit_leaves_what_reading_the_path_leaves() -> None:
    """Inactive rows keep their states, even a row with NaN."""
    draft = ragged_draft()
    for node in range(NODES):
        layer, _, known, (*parts, state) = scored_layer(draft)
        active = torch.arange(ROWS) != node % ROWS
        before = layer.committed[CONV].clone()
        layer.scored.updates.values[~active] = float("nan")
        layer.commit(torch.full((ROWS,), node), active)
        for row, _, path in paths_of(draft)[node::NODES]:
            if not active[row]:
                assert torch.equal(layer.committed[STATE][row], state[row])
                assert torch.equal(layer.committed[CONV][row], before[row])
                continue
            window = layer.committed[CONV][row].T
            assert torch.equal(window, last_inputs(known, row, path, KERNEL)), f"path {path}"
            _, expected = read_token_by_token(tuple(parts), state, row, path)
            assert (layer.committed[STATE][row] - expected).abs().max() < TOLERANCE, f"row {row}, path {path}"


def state_space_inputs(seed: int = 2) -> tuple[tuple[Tensor, ...], Tensor]:
    """Inputs times step sizes, B, C and log decays of all nodes; the committed state."""
    torch.manual_seed(seed)
    x = torch.randn(ROWS, NODES, HEADS, KEY_DIM, dtype=torch.float64)
    b, c = torch.randn(2, ROWS, NODES, KEY_HEADS, VALUE_DIM, dtype=torch.float64)
    g = -torch.rand(ROWS, NODES, HEADS).double()
    return (x, b, c, g), torch.randn(ROWS, HEADS, KEY_DIM, VALUE_DIM, dtype=torch.float64)


def test_a_state_space_reads_every_path_as_its_recurrence_does() -> None:
    """Compares outputs and committed states; complete decay at one token does not overflow."""
    draft, (parts, state) = ragged_draft(), state_space_inputs()
    parts[3][:, 4, 0] = -2000.0
    out, updates = recurrent.state_space_tree(*parts, state, draft.ancestors)
    for row, node, path in paths_of(draft):
        x, b, c, g = (part[row] for part in parts)
        known = state[row]
        for step in path:
            key = b[step].repeat_interleave(HEADS // KEY_HEADS, 0)
            known = g[step].exp()[:, None, None] * known + torch.einsum("hd,hn->hdn", x[step], key)
        query = c[node].repeat_interleave(HEADS // KEY_HEADS, 0)
        assert (out[row, node] - torch.einsum("hdn,hn->hd", known, query)).abs().max() < TOLERANCE
        after = recurrent.state_after(state, updates, draft.ancestors[:, node], torch.full((ROWS,), node))
        assert (after[row] - known).abs().max() < TOLERANCE, f"row {row}, path {path}"
