"""What a target says of the places of a batch, computed once for each, and the cross-entropy with it.

Vocabularies are large, and most of a training's time is spent on them. Here rows of logits are gone through
in pieces that stay in a processor's cache, and nothing of their size is kept but themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mmspec.targets import CausalTarget
from mmspec.training.data.states import Summary

__all__ = ["Goals", "agrees", "index_among", "soft_cross_entropy"]

PIECE = 2**20  # numbers that elementwise steps go through at once
PRODUCT = 2**24  # numbers of a product with an output matrix, which pays less for its beginning


@dataclass(frozen=True)
class Goals:
    """Distributions of a target's next tokens at P places, and which of them is whose goal.

    Attributes:
        table: [P, V'] probabilities of the tokens that a head knows.
        likeliest: [P] index of the likeliest of these.
        known: [P] whether it is the likeliest of all tokens.
        at: [..] row of the table that is the goal there; any where nothing is learnt.
    """

    table: Tensor
    likeliest: Tensor
    known: Tensor
    at: Tensor

    @classmethod
    @torch.no_grad()
    def of(
        cls,
        target: CausalTarget,
        states: Tensor,
        place: tuple[Tensor, Tensor],
        counted: Tensor,
        tokens: Tensor | None = None,
        *,
        conditional: bool = False,
        summary: Summary | None = None,
        read_out: Callable[[Tensor], Tensor] | None = None,
    ) -> Goals:
        """The goals at places of a batch.

        Args:
            target: whose output matrix is asked once for each place that counts, unless there is a summary.
            states: [B, L, d] its final hidden states.
            place: rows and places in the batch, which broadcast to [..].
            counted: [..] where something is learnt.
            tokens: [V'] that the head knows, ascending; None for all.
            conditional: whether probabilities are those of these tokens alone, so that they sum to 1.
            summary: [B, L] of all tokens' logits there, where the head knows some of them.
            read_out: with a summary, states [.., d] -> logits [.., V'] of those tokens.
        """
        row, ahead = place
        flat = row * states.shape[1] + ahead
        used = torch.zeros(states.shape[:2], dtype=torch.bool, device=states.device).flatten()
        used[flat[counted]] = True
        hidden = states.flatten(0, 1)[used]
        whose = (used.cumsum(0) - 1)[flat].clamp_min(0)
        size = target.vocabulary if tokens is None else len(tokens)
        table = torch.empty(len(hidden), size, device=states.device)
        if summary is not None and read_out is not None:
            best, total = (each.flatten()[used] for each in summary)
            for rows in pieces(len(hidden), size, PRODUCT):
                logits = read_out(hidden[rows]).float()
                # no number of the whole vocabulary's size is computed again
                table[rows] = logits.softmax(-1) if conditional else (logits - total[rows, None]).exp()
            return cls(table, *index_among(tokens, best), whose)
        best = torch.empty(len(hidden), dtype=torch.long, device=states.device)
        for rows in pieces(len(hidden), target.vocabulary, PRODUCT):
            logits = target.head(hidden[rows]).float()
            best[rows] = logits.max(-1).indices
            if tokens is None:
                table[rows] = logits.softmax(-1)
            elif conditional:
                table[rows] = logits[:, tokens].softmax(-1)
            else:
                table[rows] = logits.softmax(-1)[:, tokens]
        return cls(table, *index_among(tokens, best), whose)

    def meant(self) -> Tensor:
        """[..] the likeliest tokens that a head knows, by their index."""
        return self.likeliest[self.at]

    def common(self, logits: Tensor) -> Tensor:
        """[..] how much of each goal's distribution is also in that of logits [.., V']."""
        flat, at, found = logits.flatten(0, -2), self.at.flatten(), torch.empty(self.at.numel())
        found = found.to(self.table)
        for rows in pieces(*flat.shape):
            said = flat[rows].float().softmax(-1)
            found[rows] = torch.minimum(self.table[at[rows]], said).sum(-1)
        return found.view_as(self.at)


def index_among(tokens: Tensor | None, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Index [..] of wanted tokens among some, ascending, or None for all; and [..] whether they are there."""
    if tokens is None:
        return wanted, torch.ones_like(wanted, dtype=torch.bool)
    index = torch.searchsorted(tokens, wanted).clamp_max(len(tokens) - 1)
    return index, tokens[index] == wanted


def agrees(logits: Tensor, meant: Tensor) -> Tensor:
    """[..] whether no token is likelier than those meant [..], by logits [.., V]."""
    found = logits.detach()
    # several times faster than argmax
    return found.gather(-1, meant[..., None])[..., 0] == found.amax(-1)


def soft_cross_entropy(logits: Tensor, table: Tensor, at: Tensor | None = None) -> Tensor:
    """[N] nats of the distributions in rows `at` [N] of a table [P, V] under logits [N, V].

    A row of a table may sum to less than 1: what is missing has no cost. No gradient goes to the table.
    """
    index = torch.arange(len(logits), device=logits.device) if at is None else at
    nats: Tensor = SoftCrossEntropy.apply(logits, table, index)
    return nats


class SoftCrossEntropy(torch.autograd.Function):
    """Function of `soft_cross_entropy`: of logits, table, and rows of the table."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, table: Tensor, at: Tensor) -> Tensor:
        mass = table.float().sum(-1)[at]
        total, nats = torch.empty_like(mass), torch.empty_like(mass)
        for rows in pieces(*logits.shape):
            values = logits[rows].float()
            total[rows] = values.logsumexp(-1)
            nats[rows] = mass[rows] * total[rows] - (table[at[rows]] * values).sum(-1)
        ctx.save_for_backward(logits, table, at, mass, total)
        return nats

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, weight: Tensor) -> tuple[Tensor, None, None]:
        logits, table, at, mass, total = ctx.saved_tensors
        gradient = torch.empty_like(logits)
        for rows in pieces(*logits.shape):
            said = (logits[rows].float() - total[rows, None]).exp_().mul_(mass[rows, None])
            gradient[rows] = said.sub_(table[at[rows]]).mul_(weight[rows, None])
        return gradient, None, None


def pieces(rows: int, width: int, numbers: int = PIECE) -> Iterator[slice]:
    """Slices of so many rows of that width that each holds about so many numbers."""
    count = max(1, numbers // max(1, width))
    for start in range(0, rows, count):
        yield slice(start, start + count)
