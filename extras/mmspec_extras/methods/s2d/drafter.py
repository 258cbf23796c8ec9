"""Drafter of S2D (2407.01955): a token leaves the draft at the first exit that is sure of it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Self

import torch
from torch import Tensor

from mmspec.core.canvas import Canvas
from mmspec.core.draft import Draft
from mmspec.core.interfaces import AnyTarget
from mmspec.heads.drafter import TrainedDrafter
from mmspec.models.replaced import Replacement
from mmspec.open_types import AnyFunction
from mmspec.validation import require_number
from mmspec_extras.methods.early_exit.drafter import EarlyExitDrafter, EarlyExitSession
from mmspec_extras.methods.early_exit.exits import first_layers, stack_of
from mmspec_extras.methods.s2d.head import SortedExits


class SortedExitsSession(EarlyExitSession):
    """Drafts of a batch.

    Attributes:
        left: by exit, the states [R, m, d] in which the first m tokens of the chain left its layers.
    """

    drafter: SortedExitsDrafter
    left: dict[int, Tensor]

    def propose(self, canvas: Canvas) -> Draft:
        self.left = {}
        return super().propose(canvas)

    def read(self, tokens: Tensor) -> Tensor:
        first, *deeper = self.drafter.exits
        chosen = self.leave(first, tokens)
        for exit in deeper:
            # decided before a token is drawn, and row by row, so that no row depends on its batch
            is_sure = chosen.softmax(-1).amax(-1, keepdim=True) >= self.drafter.threshold
            if is_sure.all():
                break
            chosen = torch.where(is_sure, chosen, self.leave(exit, tokens))
        return chosen

    def leave(self, exit: int, tokens: Tensor) -> Tensor:
        """Return the logits of an exit, whose layers first read the tokens that left before it."""
        return self.score(exit, tokens, tokens.shape[1] - self.has_read(exit))

    def has_read(self, exit: int) -> int:
        """Number of tokens of the chain that the layers of an exit have read."""
        return self.left[exit].shape[1] if exit in self.left else 0

    def layers(self, exit: int) -> AbstractContextManager[None]:
        model, exits = self.drafter.uncompiled.model, self.drafter.exits
        layers, before = stack_of(model)[1][:exit], exits[exits.index(exit) - 1]

        def keep(own: AnyFunction) -> AnyFunction:
            def forward(*args: Any, **kwargs: Any) -> Tensor:
                states: Tensor = own(*args, **kwargs)
                self.left[exit] = torch.cat([self.left[exit], states], 1) if self.has_read(exit) else states
                return states

            return forward

        more = [*self.drafter.model.beside(layers), Replacement(layers[-1], keep)]
        if exit != exits[0]:  # the layers of the exit before have run, and return what they returned
            entering = self.left[before][:, self.has_read(exit) :]
            more += [
                Replacement(layer, lambda own: lambda *args, **kwargs: entering) for layer in layers[:before]
            ]
        return first_layers(model, exit, more)


class SortedExitsDrafter(EarlyExitDrafter, TrainedDrafter):
    """Drafts a chain with nested exits of the target, each token with the first exit that is sure of it.

    Tokens are drawn with the target's own noise, so that the output is bitwise that of plain sampling.

    Args:
        model: the trained exits.
        num_draft_tokens: length of the chain.
        threshold: probability of the likeliest token from which an exit is sure, from 0 (the first exit
            drafts all tokens) to 1.

    Raises:
        InputError: a value is out of range.
    """

    session = SortedExitsSession
    runs_ahead = False  # the host reads which exits are sure
    model: SortedExits

    def __init__(self, model: SortedExits, num_draft_tokens: int = 6, threshold: float = 0.5) -> None:
        super().__init__(model.config.exits[-1], num_draft_tokens)
        self.model, self.runs_ahead = model, False
        require_number("threshold", threshold, 0.0, 1.0, "must be a probability, from 0 to 1")
        self.threshold = threshold

    def exits_of(self, most: int) -> tuple[int, ...]:
        return tuple(self.model.config.exits)

    def fit(self, target: AnyTarget) -> Self:
        self.check(target)
        return super().fit(target)
