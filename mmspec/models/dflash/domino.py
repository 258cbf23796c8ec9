"""Domino's head: a recurrent network reads the tokens of a block so far, and corrects what comes next."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["DominoHead"]


class DominoHead(nn.Module):
    """Correction of a slot's logits by all tokens of its block before it, and by the slot's own state.

    A gated recurrent unit reads the target's embeddings of them, s = GRU(e(x_1), ..., e(x_i)), and what is
    added to slot i + 1 is W2 silu(W1 [hidden, s]).

    Args:
        width: d, of embeddings and states.
        memory: width of the unit's state.
        rank: rows of W1.
        vocabulary: tokens that are corrected.
    """

    def __init__(self, width: int, memory: int, rank: int, vocabulary: int) -> None:
        super().__init__()
        self.prefix_gru = nn.GRUCell(width, memory, bias=False)
        self.embed_proj = nn.Sequential(
            nn.Linear(width + memory, rank, bias=False), nn.SiLU(), nn.Linear(rank, vocabulary, bias=False)
        )

    def forward(self, embeddings: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """Correct the slots after tokens.

        Args:
            embeddings: [..., d] of the tokens.
            hidden: [..., d] states of those slots.
            state: [..., memory] after the tokens before; None at the first.

        Returns:
            [..., V] the correction, and the state after these tokens.
        """
        before = None if state is None else state.flatten(0, -2)
        after = self.prefix_gru(embeddings.flatten(0, -2).to(hidden.dtype), before)
        after = after.unflatten(0, embeddings.shape[:-1])
        return self.embed_proj(torch.cat([hidden, after], -1)), after
