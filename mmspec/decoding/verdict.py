"""Verdict: the decision of an acceptance rule, still on the device."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from mmspec.decoding.draft import Draft
from mmspec.decoding.indexing import take
from mmspec.kernels import path_to


@dataclass(frozen=True)
class Verdict:
    """Decision of an acceptance rule for every row.

    Attributes:
        path: [B, max_depth + 1] accepted nodes from the root down; entries past `accepted` are padding.
        accepted: [B] number of accepted draft tokens, the root not counted.
        values: [B, max_depth + 1] or [B, max_depth + 1, d] the value that is decided after each node of the
            path: that of the node below it, and the target's own after the last accepted one (bonus or
            residual).
        filled: [B] False where that last one is not decided in this round; its place stays open.
        tv: [B, max_depth] total variation between the output distribution and the target's, at
            the place of each depth, for rules that are not exact; NaN at places that were not measured. None
            for exact rules.
        drift: [B, max_depth] root mean square of candidate minus value at the place of each depth, for rules
            that keep vectors which are near enough; None for others.
    """

    path: Tensor
    accepted: Tensor
    values: Tensor
    filled: Tensor
    tv: Tensor | None = None
    drift: Tensor | None = None

    @property
    def next_token(self) -> Tensor:
        """[B] or [B, d]: the target's token after the last accepted node."""
        return take(self.values, self.accepted)

    @property
    def decided(self) -> Tensor:
        """[B] number of tokens that are decided: the nodes that have a place in the output from now on."""
        return self.accepted + self.filled

    @property
    def last(self) -> Tensor:
        """[B] the last accepted node, after which the next token stands."""
        return take(self.path, self.accepted)

    @classmethod
    def choose(cls, which: Tensor, one: Verdict, other: Verdict) -> Verdict:
        """Take one verdict where `which` [B] is true, and the other elsewhere; neither of an exact rule."""
        decided = [each.name for each in fields(cls) if each.name not in ("tv", "drift")]
        pairs = ((getattr(one, name), getattr(other, name)) for name in decided)
        return cls(*(torch.where(which.view(-1, *[1] * (a.dim() - 1)), a, b) for a, b in pairs))

    @classmethod
    def root(cls, draft: Draft, next_token: Tensor) -> Verdict:
        """Build the verdict that accepts nothing but the root."""
        return cls.at(draft, torch.zeros_like(draft.parents[:, 0]), next_token)

    @classmethod
    def at(cls, draft: Draft, node: Tensor, next_token: Tensor, tv: Tensor | None = None) -> Verdict:
        """Build the verdict whose path ends in `node` [B]."""
        path, accepted, values = path_to(draft.tokens, *draft.paths, node, next_token, draft.max_depth)
        return cls(path, accepted, values, torch.ones_like(node, dtype=torch.bool), tv)
