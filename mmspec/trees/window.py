"""Parts of a Jacobi window: its places in the output, its tree of nodes, and how places are redrawn.

Initial drafts are those of SJD's code (2410.01699), but with the q that they were really drawn from. That q
is one-hot only if the preceding tokens determine the draft. A random draft x with a one-hot q would be
accepted with probability p(x) instead of min(1, p(x) / q(x)). A redrawn token is coupled with that of the
last round maximally (MC-SJD, 2510.24211), by shared Gumbel noise (GS, 2510.24211), or not at all (SJD).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from mmspec.core.draft import DraftKind, Tree
from mmspec.core.image_grid import FREE, Grammar, ImageGrid, Layout
from mmspec.errors import InputError
from mmspec.kernels import redraw
from mmspec.kernels.redraw import invert
from mmspec.trees.verification import sampled_distribution
from mmspec.validation import is_integer

NEIGHBOURS = ("repeat", "above")
KIND_OF_COUPLING = {
    "fresh": DraftKind.IID,
    "maximal": DraftKind.IID,
    "gumbel": DraftKind.IID,
    "exact": DraftKind.COUPLED,
}
MAX_CHAINS = 64


class WindowLayout:
    """Output places of a batch, on the device. Rows without a layout have no last and no forced places.

    Attributes:
        length, stride: [B, 1] number of places, and number of places from a cell to the one below it.
        grammar: the forced syntax tokens.
        uniform: [B, 1, V] uniform over the codes; over all tokens in rows without a layout.
        has_syntax: True if a grammar forces some places.
    """

    def __init__(self, layouts: Sequence[Layout | None], vocabulary: int, device: torch.device) -> None:
        self.grammar = Grammar([() if layout is None else layout.forced for layout in layouts], device)
        length = torch.full((len(layouts), 1), torch.iinfo(torch.long).max, device="cpu")
        stride, codes = torch.ones_like(length), torch.full_like(length, vocabulary)
        for row, layout in enumerate(layouts):
            if layout is not None:
                length[row], codes[row] = layout.length, layout.codebook_size
            if isinstance(layout, ImageGrid):
                stride[row] = layout.stride
        is_free = self.grammar.forced == FREE
        self.has_syntax = not bool(is_free.all())
        # distance to the cell above the next place, or to the last cell before the end of a row
        self.reach = 1 + int(stride.max())
        free = torch.arange(is_free.shape[1], device=device).where(is_free, 0)
        self._left = free.cummax(-1).values.roll(1, -1)  # [B, places] the last free place before
        self.stride = stride.to(device)
        self.length = length.to(device)
        known = torch.arange(vocabulary, device="cpu") < codes
        self.uniform = (known.float() / codes)[:, None].to(device)

    def left(self, place: Tensor, first: Tensor) -> Tensor:
        """[B, n] the last free place before `first` [B, 1], whose token all places repeat."""
        return look_up(self._left, first).expand_as(place)

    def above(self, place: Tensor, first: Tensor) -> Tensor:
        """[B, n] the last place before `first` [B, 1] in each place's column; as `left` in the first row."""
        upper = place - ((place - first).clamp_min(0) // self.stride + 1) * self.stride
        return torch.where(upper >= 0, upper, self.left(place, first))

    def copy(self, init: str, place: Tensor, first: Tensor, tokens: Tensor, recent: Tensor) -> Tensor:
        """[B, n] token of each place's neighbour, "repeat" or "above", as an initial draft.

        Args:
            place: [B, n] consecutive places, from that of the newest emitted token on.
            first: [B, 1] the first place without a token.
            tokens, recent: [B, n] tokens in these places, where known; [B, reach] the newest emitted tokens.
        """
        known = torch.cat([recent, tokens[:, 1:]], 1)
        source = (self.left if init == "repeat" else self.above)(place, first)
        return look_up(known, source - place[:, :1] + self.reach - 1)


@lru_cache(maxsize=32)
def layout_on(layouts: tuple[Layout | None, ...], vocabulary: int, device: torch.device) -> WindowLayout:
    """The places of a batch on a device; batches of equal layouts share one, and so their CUDA graphs."""
    return WindowLayout(layouts, vocabulary, device)


def look_up(table: Tensor, index: Tensor) -> Tensor:
    """Look up index [B, n] in a table [B, m], clamped to its ends; results beyond them are discarded."""
    return table.gather(1, index.clamp(0, table.shape[1] - 1))


def read_front(front: str | Sequence[int]) -> tuple[int, ...]:
    """Parse the numbers of candidates at the first places, (4, 2) or "4x2"; () if every place has one.

    Raises:
        InputError: the numbers are invalid, or give more than `MAX_CHAINS` chains.
    """
    try:
        sizes = tuple(map(int, front.split("x") if isinstance(front, str) and front else front))
    except (TypeError, ValueError):
        sizes = (0,)
    if any(size < 1 for size in sizes) or prod(sizes) > MAX_CHAINS:
        rule = f"must be numbers of candidates such as 4x2, with at most {MAX_CHAINS} chains"
        raise InputError("front", front, rule)
    return sizes if prod(sizes) > 1 else ()


class WindowTree:
    """Tree of the nodes of a window, ordered by slot, and by parent within a slot.

    A chain runs from the root to the end of the window. Up to slot `reach` every chain has its own nodes.
    After it there is one node per slot, which all chains share. In the tree it descends from the first chain.

    Args:
        window: number of slots, the root's included.
        front: candidates at each of the first slots after the root's, for every candidate before.
        reach: last slot with nodes of every chain; None for the last of the window.

    Attributes:
        parents: of each node, 0 for the root itself.
        slots: of each node.
        nodes: of each chain, one for each slot.
        chain: the first chain through each node.
        choices: index of each chain's candidate at each place of the front.

    Raises:
        InputError: the front does not fit into the window, or `reach` is outside of the two.
    """

    def __init__(self, window: int, front: tuple[int, ...], reach: int | None = None) -> None:
        if len(front) >= window:
            rule = f"must have at most {window - 1} places, those of the window after the root"
            raise InputError("front", front, rule)
        if reach is not None and (not is_integer(reach) or not len(front) <= reach < window):
            raise InputError("reach", reach, f"must be from {len(front)} (the front) to {window - 1}")
        self.window, self.front, self.reach = window, front, window - 1 if reach is None else reach
        count = prod(front)
        self.parents, self.slots, self.chain, levels = [0], [0], [0], [[0]]
        for slot in range(1, window):
            start, before = len(self.parents), levels[-1]
            branch, forked = self.branch(slot), before[: self.chains(slot)]
            self.parents += [parent for parent in forked for _ in range(branch)]
            level = list(range(start, len(self.parents)))
            self.slots += [slot] * len(level)
            self.chain += [count // len(level) * node for node in range(len(level))]
            levels.append(level)
        self.nodes = [[level[chain * len(level) // count] for level in levels] for chain in range(count)]
        self.choices = [list(choice) for choice in product(*map(range, front))]

    def tensors(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The attributes `parents`, `slots`, `chain` and `nodes` on a device; equal trees share them."""
        return tree_on(self.window, self.front, self.reach, device)

    def branch(self, slot: int) -> int:
        """Number of candidates of each parent at a slot."""
        return self.front[slot - 1] if slot <= len(self.front) else 1

    def chains(self, slot: int) -> int:
        """Number of parents of the nodes of a slot."""
        return prod(self.front[: slot - 1]) if slot <= self.reach else 1


@lru_cache(maxsize=32)
def tree_on(
    window: int, front: tuple[int, ...], reach: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `WindowTree.tensors`."""
    tree = WindowTree(window, front, reach)
    lists = (tree.parents, tree.slots, tree.chain)
    parents, slots, chain = (torch.tensor(each, device=device) for each in lists)
    return parents, slots, chain, torch.tensor(tree.nodes, device=device)


class LastDraft(NamedTuple):
    """The last draft as input of redraws: tokens [B, n], which of them are valid, and their q."""

    tokens: Tensor
    valid: Tensor
    q: Tensor | None  # [B, n - 1, V] of all but the root; None for independent redraws

    @staticmethod
    def of(draft: Tree, coupling: str) -> LastDraft:
        """Extract the data that a coupling needs from a draft; only the maximal one needs q."""
        q = sampled_distribution(draft).p if coupling == "maximal" else None
        return LastDraft(draft.tokens, draft.valid, q)


def draw_coupled(coupling: str, p: Tensor, last: LastDraft, stood: Tensor, noise: Tensor) -> Tensor:
    """[B, W] a token from each new distribution p [B, W, V], coupled with the place's old one.

    Args:
        stood: [B, W] node of the last draft with the place's old token; 0 if there was none.
        noise: [B, W, 3] uniforms, new in every round; or [B, W, V] Gumbel noise, the same in every round.
    """
    if coupling in ("gumbel", "exact"):
        return (p.log() + noise).argmax(-1)
    if last.q is None:
        return invert(p, noise[..., 1:])
    return redraw(p, last.q, last.tokens, last.valid, stood, noise)


def ranked_candidates(first: Tensor, p: Tensor, noise: Tensor, branch: int) -> tuple[Tensor, Tensor]:
    """Draw further candidates from p [B, n, V] without replacement, given the first [B, n].

    Uses the Gumbel top-k trick with noise [B, 1, V] (Kool et al., 1903.06059).

    Returns:
        [B, n, branch] all candidates, and whether each could be drawn.
    """
    left = p.scatter(-1, first[..., None], 0.0)
    further = (left.log() + noise).topk(branch - 1, dim=-1).indices
    could = torch.cat([torch.ones_like(first)[..., None] > 0, left.gather(-1, further) > 0], -1)
    return torch.cat([first[..., None], further], -1), could
