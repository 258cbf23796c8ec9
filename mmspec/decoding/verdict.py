"""Verdict: the decision of an acceptance rule, still on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmspec.decoding.draft import Draft


@dataclass(frozen=True)
class Verdict:
    """Decision of an acceptance rule for every row.

    Attributes:
        path: [B, max_depth + 1] accepted nodes from the root down; entries past `accepted` are padding.
        accepted: [B] number of accepted draft tokens, the root not counted.
        next_token: [B] the target's token after the last accepted node (bonus or residual).
        tv: [B, max_depth] total variation between the output distribution and the target's, at
            the place of each depth, for rules that are not exact; NaN at places that were not measured. None
            for exact rules.
    """

    path: Tensor
    accepted: Tensor
    next_token: Tensor
    tv: Tensor | None = None

    @classmethod
    def at(cls, draft: Draft, node: Tensor, next_token: Tensor, tv: Tensor | None = None) -> Verdict:
        """Build the verdict whose path ends in `node` [B]."""
        rows, nodes = draft.tokens.shape
        index = torch.arange(nodes, device=node.device)
        accepted = take(draft.depth, node)
        if draft.is_chain:
            return cls(index.expand(rows, nodes), accepted, next_token, tv)
        on_path = take(draft.ancestors, node)
        # Nodes off the path are sent to a column that is cut off again: static shapes, no loop.
        column = torch.where(on_path, draft.depth, draft.max_depth + 1)
        path = node.new_zeros(rows, draft.max_depth + 2).scatter(1, column, index.expand(rows, nodes))
        return cls(path[:, :-1], accepted, next_token, tv)


def take(values: Tensor, node: Tensor) -> Tensor:
    """Take the value at one node of each row: values [B, n, ...], node [B] -> [B, ...]."""
    index = node.view(-1, 1, *[1] * (values.dim() - 2)).expand(-1, 1, *values.shape[2:])
    return values.gather(1, index)[:, 0]
