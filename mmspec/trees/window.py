"""Parts of a Jacobi window: its places in the output, its tree of nodes, and how places are drawn anew.

Initial drafts are those of SJD's code (2410.01699), but with the q that they were really drawn from. That q
is one-hot only where the tokens before it determine the draft. A random draft x with a one-hot q would be
accepted with probability p(x) instead of min(1, p(x) / q(x)). A redrawn token is coupled with that of the
round before maximally (MC-SJD, 2510.24211), by shared Gumbel noise (GS, 2510.24211), or not at all (SJD).
"""

from __future__ import annotations

from collections.abc import Sequence
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
    """Output places of a batch, on the device. A row without a layout has no last place and no forced ones.

    Attributes:
        length, stride: [B, 1] number of places, and distance in places from a cell to the one below it.
        grammar: which tokens are forced in which places.
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
        # how far back the cell above the next place is, or the last cell before the end of a row
        self.reach = 1 + int(stride.max())
        free = torch.arange(is_free.shape[1], device=device).where(is_free, 0)
        self._left = free.cummax(-1).values.roll(1, -1)  # [B, places] the last free one before
        self.stride = stride.to(device)
        self.length = length.to(device)
        known = torch.arange(vocabulary, device="cpu") < codes
        self.uniform = (known.float() / codes)[:, None].to(device)

    def left(self, place: Tensor, first: Tensor) -> Tensor:
        """[B, n] the last free place before `first` [B, 1], whose token every place repeats."""
        return look_up(self._left, first).expand_as(place)

    def above(self, place: Tensor, first: Tensor) -> Tensor:
        """[B, n] the last place before `first` [B, 1] in the column of each; in the first row, as `left`."""
        upper = place - ((place - first).clamp_min(0) // self.stride + 1) * self.stride
        return torch.where(upper >= 0, upper, self.left(place, first))

    def copy(self, init: str, place: Tensor, first: Tensor, tokens: Tensor, recent: Tensor) -> Tensor:
        """[B, n] token of each place's neighbour, "repeat" or "above", as an initial draft.

        Args:
            place: [B, n] consecutive places; the first of them is that of the newest emitted token.
            first: [B, 1] the first place that holds no token yet.
            tokens, recent: [B, n] tokens in these places, where they have any; [B, reach] the newest.
        """
        known = torch.cat([recent, tokens[:, 1:]], 1)
        source = (self.left if init == "repeat" else self.above)(place, first)
        return look_up(known, source - place[:, :1] + self.reach - 1)


def look_up(table: Tensor, index: Tensor) -> Tensor:
    """Look up index [B, n] in a table [B, m], clamped to its ends; results beyond them are never kept."""
    return table.gather(1, index.clamp(0, table.shape[1] - 1))


def read_front(front: str | Sequence[int]) -> tuple[int, ...]:
    """Read the numbers of candidates at the first places, (4, 2) or "4x2"; () if every place has one.

    Raises:
        InputError: no such numbers, or more than `MAX_CHAINS` chains.
    """
    try:
        sizes = tuple(map(int, front.split("x") if isinstance(front, str) and front else front))
    except (TypeError, ValueError):
        sizes = (0,)
    if any(size < 1 for size in sizes) or prod(sizes) > MAX_CHAINS:
        raise InputError("front", front, f"numbers of candidates as 4x2, of at most {MAX_CHAINS} chains")
    return sizes if prod(sizes) > 1 else ()


class WindowTree:
    """Tree of the nodes of a window, ordered by slot, and within a slot by parent.

    A chain goes from the root to the end of the window. Up to slot `reach` every chain has nodes of its own.
    Behind it there is one node a slot, which all chains share. In the tree it descends from the first chain.

    Args:
        window: slots, the root's included.
        front: candidates at each of the first slots behind the root's, for every candidate before.
        reach: last slot with nodes of every chain; None for the last of the window.

    Attributes:
        parents: of each node, 0 for the root itself.
        slots: of each node.
        nodes: of each chain, one for each slot.
        chain: the first chain through each node.
        choices: of each chain, the candidate that it takes at each place of the front.

    Raises:
        InputError: the front does not fit into the window, or the reach ends before it or behind the window.
    """

    def __init__(self, window: int, front: tuple[int, ...], reach: int | None = None) -> None:
        if len(front) >= window:
            raise InputError("front", front, f"at most {window - 1} places, those of the window")
        if reach is not None and (not is_integer(reach) or not len(front) <= reach < window):
            raise InputError("reach", reach, f"{len(front)} to {window - 1}, behind the front")
        self.front, self.reach = front, window - 1 if reach is None else reach
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

    def branch(self, slot: int) -> int:
        """Candidates of each parent at a slot."""
        return self.front[slot - 1] if slot <= len(self.front) else 1

    def chains(self, slot: int) -> int:
        """Parents of the nodes of a slot."""
        return prod(self.front[: slot - 1]) if slot <= self.reach else 1


class LastDraft(NamedTuple):
    """What redraws need of the last draft: its tokens [B, n], which of them are valid, and their q."""

    tokens: Tensor
    valid: Tensor
    q: Tensor | None  # [B, n - 1, V] of all but the root; None where new ones are drawn independently

    @staticmethod
    def of(draft: Tree, coupling: str) -> LastDraft:
        """Take from a draft what a coupling needs; only the maximal one needs q."""
        q = sampled_distribution(draft).p if coupling == "maximal" else None
        return LastDraft(draft.tokens, draft.valid, q)


def draw_coupled(coupling: str, p: Tensor, last: LastDraft, stood: Tensor, noise: Tensor) -> Tensor:
    """[B, W] a token from each new distribution p [B, W, V], coupled with the place's old one.

    Args:
        stood: [B, W] the node of the last draft that held the place's old token; 0 where it had none.
        noise: [B, W, 3] uniforms, new in every round; or [B, W, V] Gumbel noise, the same in every round.
    """
    if coupling in ("gumbel", "exact"):
        return (p.log() + noise).argmax(-1)
    if last.q is None:
        return invert(p, noise[..., 1:])
    return redraw(p, last.q, last.tokens, last.valid, stood, noise)


def ranked_candidates(first: Tensor, p: Tensor, noise: Tensor, branch: int) -> tuple[Tensor, Tensor]:
    """Draw further candidates of p [B, n, V] without replacement, given the first [B, n].

    Uses the Gumbel top-k trick with noise [B, 1, V] (Kool et al., 1903.06059).

    Returns:
        [B, n, branch] all candidates, and whether each could be drawn.
    """
    left = p.scatter(-1, first[..., None], 0.0)
    further = (left.log() + noise).topk(branch - 1, dim=-1).indices
    could = torch.cat([torch.ones_like(first)[..., None] > 0, left.gather(-1, further) > 0], -1)
    return torch.cat([first[..., None], further], -1), could
