"""ZipAR from its published rule: no cache, each forward pass recomputed with an explicit mask."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mmspec.core.image_grid import ImageGrid

#: Choose a token from logits [V] (of the conditional and the unconditional prompt) for an output index.
Choose = Callable[[list[Tensor], int], int]
#: Logits [m, V] of a sequence of tokens at positions, under a mask [m, m].
Forward = Callable[[Sequence[int], Sequence[int], Tensor], Tensor]


@dataclass
class Node:
    """An input token: its place, and the nodes that it attended to."""

    token: int
    place: int
    seen: list[int]


def naive_image(
    forwards: Sequence[Forward],
    prompts: Sequence[Sequence[int]],
    grid: ImageGrid,
    window: int,
    choose: Choose,
) -> tuple[list[int], int]:
    """Decode an image: its tokens, and the number of forwards.

    Args:
        forwards, prompts: the model, with the conditional prompt and perhaps the unconditional one.
        grid: of the image; tokens are those of the model.
        window: s.
        choose: how a token is drawn.
    """
    tokens = list(grid.forced)
    stride, columns = grid.stride, grid.columns
    nodes: list[Node] = []

    def logits(extra: list[Node]) -> list[Tensor]:
        """[V] of each prompt, after the last of the nodes."""
        every = [*nodes, *extra]
        results = []
        for forward, prompt in zip(forwards, prompts, strict=True):
            size = len(prompt)
            mask = torch.eye(size + len(every), dtype=torch.bool)
            mask[:size, :size] = torch.ones(size, size).tril().bool()
            for index, node in enumerate(every):
                mask[size + index, :size] = True
                mask[size + index, [size + other for other in node.seen]] = True
            ids = [*prompt, *(node.token for node in every)]
            places = [*range(size), *(size + node.place for node in every)]
            results.append(forward(ids, places, mask)[-1])
        return results

    def node_at(place: int, token: int) -> Node:
        return Node(token, place, [i for i, other in enumerate(nodes) if other.place < place])

    tokens[0] = choose(logits([]), 0)
    fresh = [0]
    step = 0
    while -1 in tokens:
        step += 1
        # new tokens are processed from the top, so that a lower row sees them in the same forward pass
        group = [(row, step - row * window) for row in range(grid.rows) if 0 <= step - row * window < columns]
        begun = [row * stride for row, column in group if column == 0]
        known = [cell - 1 for cell in begun if tokens[cell - 1] != -1]
        for place in sorted({*fresh, *known}):
            nodes.append(node_at(place, tokens[place]))
        decided = {}
        for row, column in group:
            cell = row * stride + column
            if tokens[cell - 1] != -1:
                fed = next(i for i, node in enumerate(nodes) if node.place == cell - 1)
                decided[cell] = choose(logits([nodes[fed]]), cell)
            else:
                above = [
                    token
                    for token in tokens[(row - 1) * stride : (row - 1) * stride + columns]
                    if token != -1
                ]
                decided[cell] = choose(logits([node_at(cell - 1, above[-1])]), cell)
        for cell, token in decided.items():
            tokens[cell] = token
        fresh = sorted(decided)
    return tokens, step + 1
