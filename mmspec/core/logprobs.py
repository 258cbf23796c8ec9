"""Log-probabilities of output tokens, as the model gives them: before processors, temperature, truncation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["TokenLogprob", "pack", "unpack"]


class TokenLogprob(NamedTuple):
    """Log-probability of an output token.

    Attributes:
        token: the token id.
        logprob: natural logarithm of its probability under the model.
        top: the most likely tokens at its place with theirs, the most likely first.
    """

    token: int
    logprob: float
    top: list[tuple[int, float]]


def pack(logits: Tensor, nodes: Tensor, values: Tensor, count: int) -> Tensor:
    """Compute the log-probabilities along a path, as integer columns for the report of a round.

    Args:
        logits: [B, n, V] of the nodes of a draft, with guidance.
        nodes: [B, m] the nodes of the path.
        values: [B, m] the token after each.
        count: number k of most likely tokens.

    Returns:
        [B, m (1 + 2 k)]: the bits of the log-probability of each value, then ids and bits of the k tokens.
    """
    along = logits.gather(1, nodes[..., None].expand(-1, -1, logits.shape[2])).float().log_softmax(-1)
    own = along.gather(2, values[..., None])
    top, ids = along.topk(min(count, along.shape[2]), dim=2)
    return torch.cat([bits_of(own), ids, bits_of(top)], 2).flatten(1)


def unpack(columns: Sequence[int], tokens: Sequence[int], width: int, count: int) -> list[TokenLogprob]:
    """Read the log-probabilities of the first tokens of a row from its columns.

    Args:
        columns: of `pack`.
        tokens: the output tokens that the path decided, as many as were kept.
        width: number of columns for each value, 1 + 2 k.
        count: number of most likely tokens to return, at most k.
    """
    numbers = torch.tensor(columns, device="cpu").reshape(-1, width)[: len(tokens)]
    most = width // 2
    ids = numbers[:, 1 : 1 + most].tolist()
    own, top = (part.int().view(torch.float32).tolist() for part in (numbers[:, 0], numbers[:, 1 + most :]))
    return [
        TokenLogprob(token, logprob, list(zip(*likely, strict=True))[:count])
        for token, logprob, likely in zip(tokens, own, zip(ids, top, strict=True), strict=True)
    ]


def bits_of(numbers: Tensor) -> Tensor:
    """Return the bits of float32 numbers as integers, so that they fit a report."""
    return numbers.contiguous().view(torch.int32).long()
