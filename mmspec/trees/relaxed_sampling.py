"""Common form of relaxed acceptance rules: an accepted mass a(x) <= q(x), and a residual distribution r.

A candidate x ~ q is accepted with probability a(x) / q(x), and the token is drawn from r otherwise. The
output distribution of a place is then a + (1 - sum a) r, so that its total variation to the target's is known
in closed form for *every* rule, and is reported. The exact rule is a = min(p, q). A relaxed rule accepts
more, by at most its total variation: a is at most q and at most the output, so that sum a <= 1 - TV(q,
output) <= 1 - TV(p, q) + TV(output, p). Tokens that the target excludes are never accepted: top-k, top-p and
grammars still hold.
"""

from __future__ import annotations

from abc import abstractmethod

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
from mmspec.kernels.chain import normalise, residual
from mmspec.trees.verification import end_at, place_uniforms, sampled_distribution, walk
from mmspec.validation import is_integer


class RelaxedSampling(AcceptanceRule):
    """Base of relaxed rules in the common form, for chains and trees.

    Siblings are tried in the order of their draws, each against the residual that earlier rejections left of
    p. Their total variations are added, each weighted with the probability that the earlier siblings are
    rejected. The sum, at most 1, is reported. For several siblings it is a bound; for sampled siblings its
    mean is one. A deterministic candidate has a one-hot q.

    Attributes:
        measures_one_place: True if computing all of a is expensive. Chains of sampled tokens are then
            verified by `mass_at`, and their total variation is measured at one verified place per round.
    """

    sound_for = frozenset({DraftKind.POINT, DraftKind.IID, DraftKind.WITHOUT_REPLACEMENT})
    exactness = Level.LOSSY
    measures_one_place: bool = False

    @abstractmethod
    def mass(self, p: Tensor, q: Tensor, allowance: Tensor, only: Tensor | None = None) -> Tensor:
        """Accepted mass a, [..., V], 0 <= a <= q.

        Args:
            p, q: [..., V] distributions of target and draft.
            allowance: [..., 1] relaxation that is allowed at this place.
            only: [..., 1] the only token that is read, where q is one-hot; a is arbitrary elsewhere.
        """

    def mass_at(self, p: Tensor, q: Tensor, x: Tensor, allowance: Tensor) -> Tensor:
        """Accepted mass a(x) of tokens x [..., 1], [..., 1]: the values of `mass` at a lower cost."""
        return self.mass(p, q, allowance).gather(-1, x)

    def allowance(self, depth: Tensor) -> Tensor:
        """Allowance of `mass` at depths [...] of the draft, counted from 0, for the first sibling."""
        return torch.zeros_like(depth)

    def remaining(self, allowance: Tensor, tv: Tensor) -> Tensor:
        """[B, 1] allowance of the next sibling if this one, with total variation [B], is rejected."""
        return allowance

    def residual(self, p: Tensor, q: Tensor | None, x: Tensor) -> Tensor:
        """Residual distribution norm((p - q)+) if x [..., 1] is rejected; q is None where one-hot at x."""
        return normalise(p.scatter(-1, x, 0.0), otherwise=p) if q is None else residual(p, q)

    def judge(self, p: Tensor, q: Tensor | None, x: Tensor, allowance: Tensor) -> tuple[Tensor, Tensor]:
        """Accepted mass of candidates. p, q: [..., V]; x, allowance: [..., 1]; q is None if one-hot at x.

        Returns:
            [...] a(x), and the total variation between the output distribution a + (1 - sum a) r and p.
        """
        dense_q = torch.zeros_like(p).scatter(-1, x, 1.0) if q is None else q
        a = self.mass(p, dense_q, allowance, only=x if q is None else None)
        refused = (1 - a.sum(-1, keepdim=True)).clamp_min(0.0)
        output = a + refused * self.residual(p, q, x)
        return a.gather(-1, x)[..., 0], total_variation(output, p)

    def verify(self, draft: Tree, scores: Scores, random: RandomStream, emitted: Tensor) -> Path:
        return self.measure(draft, scores, random, emitted)[0]

    def measure(
        self, draft: Tree, scores: Scores, random: RandomStream, emitted: Tensor
    ) -> tuple[Path, Tensor]:
        verify = self.verify_chain if draft.is_chain else self.verify_tree
        return verify(draft, scores, random, emitted)

    def verify_chain(
        self, draft: Tree, scores: Scores, random: RandomStream, emitted: Tensor
    ) -> tuple[Path, Tensor]:
        """Verify one candidate per place, all places at once."""
        p, x = scores.p, draft.tokens[:, 1:, None]
        q = None if draft.kind is DraftKind.POINT else sampled_distribution(draft).p.to(p.dtype)
        depth = torch.arange(draft.max_depth, device=emitted.device, dtype=p.dtype)
        allowance = self.allowance(depth)[:, None].expand(*x.shape)
        if measures_all := q is None or not self.measures_one_place:
            mass, tv = self.judge(p[:, :-1], q, x, allowance)
        else:
            mass = self.mass_at(p[:, :-1], q, x, allowance)[..., 0]
            tv = torch.full_like(mass, float("nan"))
        u = place_uniforms(draft, random, emitted, 1, p.dtype)[..., 0]  # [B, K]
        q_x = torch.ones_like(u) if q is None else q.gather(-1, x)[..., 0]
        drawn = draft.valid[:, 1:] & (q_x > 0)
        accept = drawn & (u * q_x <= mass) & (mass > 0)
        node = accept.long().cumprod(-1).sum(-1)  # [B] depth of the last accepted node
        p_node, after = take(p, node), (node + 1).clamp_max(draft.max_depth)
        q_node = take(q, after - 1) if q is not None and draft.max_depth else None
        x_node = take(draft.tokens, after)[:, None]
        refused = torch.nn.functional.pad(drawn, (0, 1)).gather(1, node[:, None])  # past the end: False
        final = torch.where(refused, self.residual(p_node, q_node, x_node), p_node)
        if q is not None and not measures_all and draft.max_depth:
            place = emitted % (node + 1).clamp_max(draft.max_depth)  # one of the verified places
            _, one = self.judge(take(p, place), take(q, place), take(x, place), take(allowance, place))
            tv = tv.scatter(1, place[:, None], one[:, None])
        return end_at(draft, node, final, random, emitted), tv.where(drawn, float("nan"))

    def verify_tree(
        self, draft: Tree, scores: Scores, random: RandomStream, emitted: Tensor
    ) -> tuple[Path, Tensor]:
        """Verify siblings one by one, from the root down."""
        p = scores.p
        draft_q = None if draft.kind is DraftKind.POINT else sampled_distribution(draft).p.to(p.dtype)
        variations: list[Tensor] = []

        def judge(p: Tensor, children: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
            q = None if draft_q is None else take(draft_q, (children[:, 0] - 1).clamp_min(0))
            depth = torch.full((len(p), 1), len(variations), dtype=p.dtype, device=p.device)
            allowance = self.allowance(depth)
            chosen = torch.full_like(children[:, 0], -1)
            reach, variation = torch.ones_like(p[:, 0]), torch.zeros_like(p[:, 0])
            for sibling in range(draft.max_children):
                child = children[:, sibling]
                x = take(draft.tokens, child.clamp_min(0))[:, None]
                mass, tv = self.judge(p, q, x, allowance)
                q_x = torch.ones_like(reach) if q is None else q.gather(-1, x)[:, 0]
                tried = (child >= 0) & (q_x > 0)
                accept = tried & (chosen < 0) & (u[:, sibling] * q_x <= mass)
                chosen = torch.where(accept & (mass > 0), child, chosen)
                # the next lines assume a rejection; their results are not read otherwise
                variation = torch.where(tried, variation + reach * tv, variation)
                reach = torch.where(tried, reach * (1 - mass / q_x), reach)
                allowance = torch.where(tried[:, None], self.remaining(allowance, tv), allowance)
                p = torch.where(tried[:, None], self.residual(p, q, x), p)
                if q is not None and draft.kind is DraftKind.WITHOUT_REPLACEMENT:
                    left = q.scatter(-1, x, 0.0)
                    q = torch.where(tried[:, None], normalise(left, otherwise=left), q)
            variations.append(variation.clamp_max(1.0).where((children >= 0).any(-1), float("nan")))
            return chosen, p

        path = walk(draft, p, random, emitted, judge)
        return path, torch.stack(variations, 1)


def total_variation(output: Tensor, p: Tensor) -> Tensor:
    """Total variation distance of two distributions, [..., V] -> [...]: half their absolute difference."""
    return (output - p).abs().sum(-1) / 2


def check_group_size(group_size: int) -> None:
    """Raise InputError unless `group_size` is a positive integer."""
    if not is_integer(group_size) or group_size < 1:
        raise InputError("group_size", group_size, "must be an integer of at least 1; 1 is the exact rule")
