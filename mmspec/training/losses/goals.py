"""Target distributions at the positions of a batch, each computed once, and the cross-entropy with them.

Most of a training's time goes into operations over the vocabulary. The functions here process rows of logits
in pieces that fit into the processor's cache, and keep no further tensor of the logits' size.
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

PIECE = 2**20  # elements per piece of elementwise operations
PRODUCT = 2**24  # elements per piece of a product with an output matrix


@dataclass(frozen=True)
class Goals:
    """A target's next-token distributions at P positions, and their assignment to predictions of a head.

    Attributes:
        table: [P, V'] probabilities of the tokens that a head drafts.
        likeliest: [P] index of the likeliest of these.
        known: [P] whether it is the likeliest of all tokens.
        at: [..] row of the table that each prediction learns; arbitrary where nothing is learnt.
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
        """Compute the goals at positions of a batch.

        Args:
            target: its output matrix is applied once per counted position, unless a summary is given.
            states: [B, L, d] final hidden states of the target.
            place: rows and positions in the batch, which broadcast to [..].
            counted: [..] True where something is learnt.
            tokens: [V'] tokens that the head drafts, ascending; None for all.
            conditional: whether to renormalize the probabilities over these tokens.
            summary: [B, L] summary of the logits of all tokens, for heads that draft some tokens.
            read_out: with a summary, function: states [.., d] -> logits [.., V'] of the drafted tokens.
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
                # the summary replaces the logits of the whole vocabulary
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
        """[..] index of the target's likeliest token among those that the head drafts."""
        return self.likeliest[self.at]

    def common(self, logits: Tensor) -> Tensor:
        """[..] overlap of each goal's distribution with that of logits [.., V']: the sum of their minimum."""
        flat, at, found = logits.flatten(0, -2), self.at.flatten(), torch.empty(self.at.numel())
        found = found.to(self.table)
        for rows in pieces(*flat.shape):
            said = flat[rows].float().softmax(-1)
            found[rows] = torch.minimum(self.table[at[rows]], said).sum(-1)
        return found.view_as(self.at)


def index_among(tokens: Tensor | None, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Index [..] of wanted tokens in an ascending list (None: all tokens), and [..] whether it has them."""
    if tokens is None:
        return wanted, torch.ones_like(wanted, dtype=torch.bool)
    index = torch.searchsorted(tokens, wanted).clamp_max(len(tokens) - 1)
    return index, tokens[index] == wanted


def agrees(logits: Tensor, meant: Tensor) -> Tensor:
    """[..] whether the meant tokens [..] have the largest of the logits [.., V]."""
    found = logits.detach()
    # several times faster than argmax
    return found.gather(-1, meant[..., None])[..., 0] == found.amax(-1)


def soft_cross_entropy(logits: Tensor, table: Tensor, at: Tensor | None = None) -> Tensor:
    """Cross-entropy [N], in nats, of the distributions in rows `at` [N] of a table [P, V] and logits [N, V].

    A row of the table may sum to less than 1; the missing mass adds no loss. The table gets no gradient.
    """
    index = torch.arange(len(logits), device=logits.device) if at is None else at
    nats: Tensor = SoftCrossEntropy.apply(logits, table, index)
    return nats


class SoftCrossEntropy(torch.autograd.Function):
    """Autograd function of `soft_cross_entropy`."""

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
    """Split rows of a given width into slices of about `numbers` elements each."""
    count = max(1, numbers // max(1, width))
    for start in range(0, rows, count):
        yield slice(start, start + count)
