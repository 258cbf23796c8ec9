"""Verdicts: the decision of a round, still on the device, and the rule's measurements."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch
from torch import Tensor

from mmspec.core.indexing import take
from mmspec.kernels import path_to

if TYPE_CHECKING:
    from mmspec.core.draft import Tree

MILLIONTHS = 1_000_000  # measurements travel to the host as integers, to avoid a second read


@dataclass(frozen=True)
class Path:
    """The accepted path in the tree of every row, which is appended to the output.

    Attributes:
        nodes: [B, max_depth + 1] accepted nodes from the root down; entries past `accepted` are padding.
        accepted: [B] number of accepted candidates, without the root.
        values: [B, max_depth + 1] or [B, max_depth + 1, d] the value after each node of the path: that of the
            node below it, and the target's own (bonus or residual) after the last accepted one.
        decided: [B] number of decided values: accepted + 1, or one less if the last value could not be drawn
            in this round.
        failed: [B] True where the target's numbers on the path are NaN or infinite.
    """

    nodes: Tensor
    accepted: Tensor
    values: Tensor
    decided: Tensor
    failed: Tensor

    @property
    def last(self) -> Tensor:
        """[B] the last accepted node, which the next token follows."""
        return take(self.nodes, self.accepted)

    @classmethod
    def choose(cls, which: Tensor, one: Path, other: Path) -> Path:
        """Take one path where `which` [B] is true, and the other elsewhere."""
        pairs = ((getattr(one, each.name), getattr(other, each.name)) for each in fields(cls))
        return cls(*(torch.where(which.view(-1, *[1] * (a.dim() - 1)), a, b) for a, b in pairs))

    @classmethod
    def root(cls, draft: Tree, next_token: Tensor) -> Path:
        """Build the path that accepts the root alone."""
        return cls.at(draft, torch.zeros_like(draft.parents[:, 0]), next_token)

    @classmethod
    def at(cls, draft: Tree, node: Tensor, next_token: Tensor) -> Path:
        """Build the path that ends in `node` [B]."""
        return cls.along(*path_to(draft.tokens, *draft.paths, node, next_token, draft.max_depth))

    @classmethod
    def along(cls, nodes: Tensor, accepted: Tensor, values: Tensor) -> Path:
        """Build a path with all values decided."""
        return cls(nodes, accepted, values, accepted + 1, torch.zeros_like(accepted, dtype=torch.bool))


@dataclass(frozen=True)
class Fill:
    """Places of the output that are decided in place, or reopened.

    Attributes:
        places: [B, k] output indices.
        values: [B, k] or [B, k, d] values at the places.
        decided: [B, k] True where the value is decided in this round.
        is_draft: [B, k] True where the value is a candidate's.
        failed: [B] True where the target's numbers at a place to decide are NaN or infinite.
        reopened: [B, k] True where the place is opened again.
        settled: [B] output index below which no place is reopened; tokens are emitted up to there.
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
        """Build a fill that reopens no place."""
        settled = torch.full((len(places),), torch.iinfo(torch.long).max, device=places.device)
        return cls(places, values, decided, is_draft, failed, torch.zeros_like(decided), settled)


Verdict: TypeAlias = Path | Fill
"""Decision of a round: a tree's path, or the places of a block."""


class Measured(NamedTuple):
    """A rule's measurement in one round: the change of the distribution, or the drift of the values.

    Attributes:
        name: "tv" or "drift".
        rows: [B, 3] sum and maximum over the verified places of each row, in millionths, and their number.
    """

    name: str
    rows: Tensor

    @classmethod
    def nothing(cls, rows: Tensor) -> Measured:
        """Return an empty measurement for rows [B]."""
        return cls("tv", torch.zeros(len(rows), 3, dtype=torch.long, device=rows.device))

    @classmethod
    def along(cls, path: Path, values: Tensor, name: str, rows: int) -> Measured:
        """Summarise the values measured at the depths of every lane, [T, max_depth]; NaN where none was.

        Total variation is counted at the first rejected place too, where a token was drawn; drift only at
        accepted places.
        """
        if not values.shape[1]:  # an exact rule, or an empty draft
            return cls(name, path.accepted.new_zeros(rows, 3))
        depths = torch.arange(values.shape[1], device=values.device)
        judged = depths < path.accepted[:, None] + (name == "tv")
        measured = (judged & ~values.isnan()).reshape(rows, -1)
        shares = (values.reshape(rows, -1) * MILLIONTHS).where(measured, 0.0).round().long()
        return cls(name, torch.stack([shares.sum(-1), shares.amax(-1), measured.sum(-1)], 1))
