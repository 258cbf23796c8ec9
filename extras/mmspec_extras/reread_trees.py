"""Base of drafters whose trees the host lays out, with a draft model that keeps no keys of its drafts.

The draft model computes those keys after other tokens than the target accepts, and reads the accepted ones
again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from mmspec.core.canvas import Canvas
from mmspec.core.distributions import Continuous, PointMass
from mmspec.core.draft import Draft, DraftKind, Tree
from mmspec.core.interfaces import Drafter
from mmspec.errors import InputError
from mmspec.methods.draft_model.drafter import DraftModelDrafter, DraftModelSession
from mmspec.targets import adapt
from mmspec.validation import check_draft_tokens, is_integer

__all__ = ["RereadDrafter", "RereadSession", "lay_out"]


def lay_out(root: Tensor, rows: Sequence[Sequence[tuple[int, int]]], depth: int, faulty: Tensor) -> Tree:
    """Build the draft of rows of candidates, shorter rows padded.

    Args:
        root: [B] the newest tokens.
        rows: the token and the parent of each candidate, parents first; the root is node 0.
        depth: largest depth of a candidate.
        faulty: [B] rows whose candidates are invalid.
    """
    most = max(map(len, rows))
    table = [[(0, 0, 1), *((*each, 1) for each in row), *[(0, 0, 0)] * (most - len(row))] for row in rows]
    tokens, parents, valid = torch.tensor(table, device=root.device).unbind(-1)
    tokens, valid = tokens.clone(), valid.bool() & ~faulty[:, None]
    tokens[:, 0], valid[:, 0] = root, True
    point = PointMass(tokens[:, 1:])
    return Tree(tokens, valid, DraftKind.POINT, point, faulty, parents, min(depth, most), most)


class RereadSession(DraftModelSession):
    """Session that keeps no keys of its drafts."""

    def propose(self, canvas: Canvas) -> Draft:
        draft = super().propose(canvas)
        self.proposed = None  # all its depths count as unread
        return draft


class RereadDrafter(DraftModelDrafter):
    """Base of drafters of deterministic trees, which `sample_and_match` verifies at any temperature.

    Args:
        model: the draft model, or the class of its target before it is loaded.
        depth, nodes: largest depth, and number of candidates, of a tree.
        counts: further options that must be positive integers.

    Raises:
        InputError: a value is out of range, or the model predicts no next token.
    """

    runs_ahead = False  # the host lays out the trees
    sizes = ()
    branches = True

    def __init__(self, model: Any, depth: int, nodes: int, **counts: int) -> None:
        reader = adapt(model) if isinstance(model, PreTrainedModel) else model
        if reader.fills_masks or issubclass(reader.distribution, Continuous):
            raise InputError(
                "drafter", type(model).__name__, "must be a model that predicts the next token of a text"
            )
        for name, value in counts.items():
            if not is_integer(value) or value < 1:
                raise InputError(name, value, "must be a positive integer")
        super().__init__(reader, depth, "greedy")
        self.max_nodes = check_draft_tokens(nodes) + 1

    def stopping_below(self, probability: float) -> Drafter:  # type: ignore[override]
        return Drafter.stopping_below(self, probability)  # refuses
