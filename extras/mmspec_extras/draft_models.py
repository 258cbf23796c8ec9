"""Bases of drafters with a draft model of text, whose rounds the host lays out."""

from __future__ import annotations

from abc import abstractmethod
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


class RestingSession(DraftModelSession):
    """Session that drafts nothing for some rows of a round."""

    @abstractmethod
    def resting(self) -> Tensor:
        """[B] whether nothing is drafted for a row in this round."""

    def propose(self, canvas: Canvas) -> Draft:
        rows = zip(self.resting().tolist(), canvas.finish_reasons, strict=True)
        rests = [row for row, (rest, ended) in enumerate(rows) if rest or ended is not None]
        if len(rests) == len(canvas.finish_reasons):
            return Tree.chain(canvas.root[:, None], self.drafter.kind)
        draft = super().propose(canvas)
        return draft.roots_alone(rests) if rests else draft


class RereadSession(DraftModelSession):
    """Session that keeps no keys of its drafts, which are read after other tokens than the target accepts."""

    def propose(self, canvas: Canvas) -> Draft:
        draft = super().propose(canvas)
        self.proposed = None  # all its depths count as unread
        return draft


class TextModelDrafter(DraftModelDrafter):
    """Base of drafters with a draft model of text, which `sample_and_match` verifies at any temperature.

    Args:
        model: the draft model, or the class of its target before it is loaded.
        num_draft_tokens, sampling: see `DraftModelDrafter`.

    Raises:
        InputError: a value is out of range, or the model predicts no next token.
    """

    runs_ahead = False  # the host lays out the drafts
    sizes = ()

    def __init__(self, model: Any, num_draft_tokens: int, sampling: str = "greedy") -> None:
        reader = adapt(model) if isinstance(model, PreTrainedModel) else model
        if reader.fills_masks or issubclass(reader.distribution, Continuous):
            rule = "must be a model that predicts the next token of a text"
            raise InputError("drafter", type(model).__name__, rule)
        super().__init__(reader, num_draft_tokens, sampling)

    def stopping_below(self, probability: float) -> Drafter:  # type: ignore[override]
        return Drafter.stopping_below(self, probability)  # refuses


class RereadDrafter(TextModelDrafter):
    """Base of drafters of deterministic trees.

    Args:
        model: see `TextModelDrafter`.
        depth, nodes: largest depth, and number of candidates, of a tree.
        counts: further options that must be positive integers.

    Raises:
        InputError: see `TextModelDrafter`.
    """

    branches = True

    def __init__(self, model: Any, depth: int, nodes: int, **counts: int) -> None:
        for name, value in counts.items():
            if not is_integer(value) or value < 1:
                raise InputError(name, value, "must be a positive integer")
        super().__init__(model, depth)
        self.max_nodes = check_draft_tokens(nodes) + 1


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
