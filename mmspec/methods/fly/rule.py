"""Deferred rejection of FLy (2511.22972): a rejected token is accepted if the tokens after it are. Lossy."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmspec.core.distributions import Scores
from mmspec.core.draft import DraftKind, Tree
from mmspec.core.indexing import take
from mmspec.core.interfaces import AcceptanceRule
from mmspec.core.promise import Level
from mmspec.core.random_stream import RandomStream
from mmspec.core.verdict import Path
from mmspec.errors import InputError
from mmspec.kernels.chain import normalise, residual
from mmspec.trees.verification import end_at, place_uniforms, sampled_distribution
from mmspec.validation import is_integer, require_number

WINDOW = 6


@dataclass(frozen=True)
class FLy(AcceptanceRule):
    """Accepts a rejected token where the target is uncertain, if the next tokens are accepted (2511.22972).

    The target is uncertain where -sum p log p over its `entropy_top_k` likeliest tokens is at least
    `entropy_threshold`. The exact rule judges the `window` tokens after it, as vLLM does; tokens that the
    target excludes stay rejected. At temperature 0 the exact rule accepts the likeliest token, and p is the
    softmax of the target's logits.

    There is no bound on the distance to the target's distribution. At a place where a rejection would be
    deferred, the output differs from that of the exact rule as often as that rule rejects, which is reported.

    Args:
        window: number of tokens after a rejected one that must be accepted, at least 1; 6, and less than the
            tokens of the draft, if None.
        entropy_threshold: least entropy in nats, 0 to 100.
        entropy_top_k: number of tokens in the entropy, 1 or more.

    Raises:
        InputError: a value is out of range.
    """

    window: int | None = None
    entropy_threshold: float = 0.3
    entropy_top_k: int = 3

    sound_for = frozenset({DraftKind.POINT, DraftKind.IID, DraftKind.WITHOUT_REPLACEMENT})
    exactness = Level.LOSSY
    chains_only = True
    keeps_greedy = False

    def __post_init__(self) -> None:
        for name in ("window", "entropy_top_k"):
            value = getattr(self, name)
            if value is not None and (not is_integer(value) or value < 1):
                raise InputError(name, value, "must be an integer of at least 1")
        require_number(
            "entropy_threshold", self.entropy_threshold, 0.0, 100.0, "must be between 0 and 100 nats"
        )

    def verify(self, draft: Tree, scores: Scores, random: RandomStream, emitted: Tensor) -> Path:
        return self.measure(draft, scores, random, emitted)[0]

    def measure(
        self, draft: Tree, scores: Scores, random: RandomStream, emitted: Tensor
    ) -> tuple[Path, Tensor]:
        p, x = scores.p, draft.tokens[:, 1:, None]
        q = None if draft.kind is DraftKind.POINT else sampled_distribution(draft).p.to(p.dtype)
        p_x = p[:, :-1].gather(-1, x)[..., 0]
        q_x = torch.ones_like(p_x) if q is None else q.gather(-1, x)[..., 0]
        drawn = draft.valid[:, 1:] & (q_x > 0)
        u = place_uniforms(draft, random, emitted, 1, p.dtype)[..., 0]  # [B, K]
        accepted = drawn & (u * q_x <= p_x) & (p_x > 0)
        deferred = drawn & self.defers(scores, x, accepted)
        node = (accepted | deferred).long().cumprod(-1).sum(-1)
        p_node, after = take(p, node), (node + 1).clamp_max(draft.max_depth)
        x_node = take(draft.tokens, after)[:, None]
        refused = pad(drawn, (0, 1)).gather(1, node[:, None])  # past the end: False
        if q is None or not draft.max_depth:
            left = normalise(p_node.scatter(-1, x_node, 0.0), otherwise=p_node)
        else:
            left = residual(p_node, take(q, after - 1))
        rejects = 1 - (p_x / q_x.clamp_min(torch.finfo(p.dtype).tiny)).clamp_max(1.0)
        changed = torch.where(deferred, rejects, 0.0).where(drawn, float("nan"))
        return end_at(draft, node, torch.where(refused, left, p_node), random, emitted), changed

    def defers(self, scores: Scores, x: Tensor, accepted: Tensor) -> Tensor:
        """[B, K] whether a rejection of tokens x [B, K, 1] would be deferred, given which are accepted."""
        count = x.shape[1]
        window = min(WINDOW, count - 1) if self.window is None else self.window
        if not 1 <= window < count:
            return torch.zeros_like(accepted)
        following = pad(accepted, (0, window)).unfold(1, window, 1)[:, 1:].all(-1)
        logits = scores.logits[:, :-1]
        log_p = logits.log_softmax(-1)
        best = log_p.topk(min(self.entropy_top_k, log_p.shape[-1]), -1).values
        entropy = torch.special.entr(best.exp()).sum(-1)
        possible = logits.gather(-1, x)[..., 0] > -torch.inf
        deferred: Tensor = following & possible & (entropy >= self.entropy_threshold)
        return deferred
