"""Verdicts: what a round decides, still on the device; and what the rule measured on the way."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch
from torch import Tensor

from mmspec.core.indexing import take
from mmspec.kernels import path_to

if TYPE_CHECKING:
    from mmspec.core.draft import Tree

MILLIONTHS = 1_000_000  # what was measured travels to the host among integers, to cost no second read


@dataclass(frozen=True)
class Path:
    """Path down the tree of every row, whose nodes are accepted: it is appended to the output.

    Attributes:
        nodes: [B, max_depth + 1] accepted nodes from the root down; entries past `accepted` are padding.
        accepted: [B] number of accepted candidates, the root not counted.
        values: [B, max_depth + 1] or [B, max_depth + 1, d] the value that is decided after each node of the
            path: that of the node below it, and the target's own after the last accepted one (bonus or
            residual).
        decided: [B] number of values that are decided: all of those, or one less where the last one could
            not be drawn in this round.
        failed: [B] True where the target's numbers on the path were not usable.
    """

    nodes: Tensor
    accepted: Tensor
    values: Tensor
    decided: Tensor
    failed: Tensor

    @property
    def last(self) -> Tensor:
        """[B] the last accepted node, after which the next token stands."""
        return take(self.nodes, self.accepted)

    @classmethod
    def choose(cls, which: Tensor, one: Path, other: Path) -> Path:
        """Take one path where `which` [B] is true, and the other elsewhere."""
        pairs = ((getattr(one, each.name), getattr(other, each.name)) for each in fields(cls))
        return cls(*(torch.where(which.view(-1, *[1] * (a.dim() - 1)), a, b) for a, b in pairs))

    @classmethod
    def root(cls, draft: Tree, next_token: Tensor) -> Path:
        """Build the path that accepts nothing but the root."""
        return cls.at(draft, torch.zeros_like(draft.parents[:, 0]), next_token)

    @classmethod
    def at(cls, draft: Tree, node: Tensor, next_token: Tensor) -> Path:
        """Build the path that ends in `node` [B]."""
        return cls.along(*path_to(draft.tokens, *draft.paths, node, next_token, draft.max_depth))

    @classmethod
    def along(cls, nodes: Tensor, accepted: Tensor, values: Tensor) -> Path:
        """Build a path all of whose values are decided."""
        return cls(nodes, accepted, values, accepted + 1, torch.zeros_like(accepted, dtype=torch.bool))


@dataclass(frozen=True)
class Fill:
    """Places of the output that are decided where they stand, or opened again.

    Attributes:
        places: [B, k] output indices.
        values: [B, k] or [B, k, d] what is decided there.
        decided: [B, k] True where the value is decided in this round.
        is_draft: [B, k] True where the value is a candidate's.
        failed: [B] True where the target's numbers at a place that was to be decided were not usable.
        reopened: [B, k] True where the place is open again.
        settled: [B] output index below which nothing is opened again; tokens are emitted up to there.
    """

    places: Tensor
    values: Tensor
    decided: Tensor
    is_draft: Tensor
    failed: Tensor
    reopened: Tensor
    settled: Tensor

    @classmethod
    def of(cls, places: Tensor, values: Tensor, decided: Tensor, is_draft: Tensor, failed: Tensor) -> Fill:
        """Build a fill that opens nothing again."""
        settled = torch.full((len(places),), torch.iinfo(torch.long).max, device=places.device)
        return cls(places, values, decided, is_draft, failed, torch.zeros_like(decided), settled)


Verdict: TypeAlias = Path | Fill
"""Decision of a round: a tree's path, or the places of a block."""


class Measured(NamedTuple):
    """Measurement of a rule in one round: the change of the distribution, or drift of the values.

    Attributes:
        name: "tv" or "drift".
        rows: [B, 3] sum and maximum over the judged places of each row, in millionths, and their number.
    """

    name: str
    rows: Tensor

    @classmethod
    def nothing(cls, rows: Tensor) -> Measured:
        """Nothing was measured in rows [B]."""
        return cls("tv", torch.zeros(len(rows), 3, dtype=torch.long, device=rows.device))

    @classmethod
    def along(cls, path: Path, values: Tensor, name: str, rows: int) -> Measured:
        """Summarise what was measured at the depths of every lane, [T, max_depth]; NaN where nothing was.

        Total variation counts at the first rejected place too, where a token was drawn; drift at accepted
        places.
        """
        if not values.shape[1]:  # an exact rule, or a draft of nothing
            return cls(name, path.accepted.new_zeros(rows, 3))
        depths = torch.arange(values.shape[1], device=values.device)
        judged = depths < path.accepted[:, None] + (name == "tv")
        measured = (judged & ~values.isnan()).reshape(rows, -1)
        shares = (values.reshape(rows, -1) * MILLIONTHS).where(measured, 0.0).round().long()
        return cls(name, torch.stack([shares.sum(-1), shares.amax(-1), measured.sum(-1)], 1))
