"""Top-beta acceptance of Aggressive Decoding: accepts near misses of greedy decoding. Lossy by design."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmspec.core.distributions import Scores
from mmspec.core.draft import DraftKind, Tree
from mmspec.core.indexing import take
from mmspec.core.interfaces import AcceptanceRule
from mmspec.core.promise import Level
from mmspec.core.random_stream import RandomStream
from mmspec.core.verdict import Path
from mmspec.errors import InputError
from mmspec.validation import is_integer, require_number


@dataclass(frozen=True)
class TopBeta(AcceptanceRule):
    """Accepts one of the beta likeliest tokens, if log p(x) >= max log p - tau (GAD++, 2205.10350).

    For temperature 0. The candidate with the deepest accepted path wins, and the likeliest token follows it.
    The gap of every output token is bounded: given the output before it, its log-probability is at most tau
    below that of the likeliest token. There is no bound on the distance to the greedy output, or on the gap
    between the log-probabilities of the whole output and of the best one. tau = 0 is greedy decoding, except
    for ties.

    Args:
        beta: rank that a candidate must reach, 1 or more.
        tau: largest gap to the likeliest token's log-probability in nats, 0 (greedy) to 1000.

    The defaults are those of the released script.

    Raises:
        InputError: a value is out of range.
    """

    beta: int = 5
    tau: float = 3.0

    sound_for = frozenset(DraftKind)
    exactness = Level.LOSSY
    bound = "log-probability at most tau below the likeliest token's, per token"
    greedy_only = True
    keeps_greedy = False

    def __post_init__(self) -> None:
        if not is_integer(self.beta) or self.beta < 1:
            raise InputError("beta", self.beta, "must be an integer of at least 1")
        require_number("tau", self.tau, 0.0, 1e3, "must be between 0 (greedy) and 1000 nats")

    def verify(self, draft: Tree, scores: Scores, random: RandomStream, emitted: Tensor) -> Path:
        logits = scores.logits
        top = logits.topk(min(self.beta, logits.shape[-1]), dim=-1).values
        least = torch.maximum(top[..., -1], top[..., 0] - self.tau)
        of_token = logits.gather(1, draft.parents[:, :, None].expand_as(logits))
        of_token = of_token.gather(-1, draft.tokens[:, :, None])[..., 0]
        node = draft.deepest(draft.valid & (of_token >= least.gather(1, draft.parents)))
        return Path.at(draft, node, take(logits.argmax(-1), node))
