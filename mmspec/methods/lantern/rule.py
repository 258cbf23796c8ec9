"""LANTERN and LANTERN++: a candidate borrows the mass of its neighbours in the codebook. Lossy by design."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any, Unpack

import torch
from torch import Tensor

from mmspec.accelerator import Accelerator
from mmspec.core.distributions import Scores
from mmspec.core.draft import Tree
from mmspec.core.indexing import take
from mmspec.core.interfaces import Target
from mmspec.core.random_stream import RandomStream
from mmspec.core.verdict import Path
from mmspec.kernels import nearby_mass, nearby_prefix
from mmspec.kernels.chain import normalise
from mmspec.trees.budget import Budget
from mmspec.trees.jacobi import JacobiDrafter, WindowOptions
from mmspec.trees.neighbours import check_neighbours, fitted, neighbour_table
from mmspec.trees.relaxed_sampling import RelaxedSampling, total_variation
from mmspec.validation import require_number


@dataclass
class Lantern(RelaxedSampling):
    """Accept x with probability min(1, (p(x) + c(x)) / q(x)), c(x) the mass of its nearest neighbours.

    LANTERN (2410.03355), LANTERN++ (2502.06352). Neighbours are
    added nearest first, as long as c(x) <= delta, or c(x) <= (lam - 1) p(x). If a deterministic candidate is
    refused, x and the neighbours that were added leave p, so that one candidate costs a total variation of
    c(x) <= delta; several siblings cost up to that each. If a sampled one is refused, norm((p - q)+) is drawn
    from, the best there is, and the total variation may be as large as that of p and q; for a bound use
    `budget`. In chains of sampled tokens it is measured at one judged place a round.

    Args:
        delta: the additive limit, 0 (exact) to 1.
        lam: the multiplicative limit of LANTERN++, above 1; it takes the place of delta.
        neighbours: largest number of neighbours added; a smaller codebook gives all it has.
        metric: "l2" or "cosine".
        reference: behave as the code released for LlamaGen: if any neighbour was added, all
            k + 1 nearest leave p when a deterministic candidate is refused, and leave q when a sampled one
            is, so that they keep their mass in p; a distribution with nothing left becomes uniform over the
            codes; a token of probability zero may be accepted; at temperature 0, x is accepted if p(x) + c(x)
            is the largest of all.

    Raises:
        InputError: a value outside its range.
    """

    delta: float = 0.1
    lam: float | None = None
    neighbours: int = 100
    metric: str = "l2"
    reference: bool = False
    table: Tensor | None = field(default=None, init=False, repr=False)

    measures_one_place = True

    def __post_init__(self) -> None:
        require_number("delta", self.delta, 0.0, 1.0, "0 (exact) to 1")
        if self.lam is not None:
            require_number("lam", self.lam, 1.0, 1e6, "above 1, at most 1,000,000", open_below=True)
        check_neighbours(self.neighbours, self.metric)
        self.keeps_greedy = not self.reference

    def fit(self, target: Target[Any]) -> Lantern:
        rule = copy.copy(self)
        rule.table = neighbour_table(target, self.neighbours + self.reference, self.metric)
        return rule

    @property
    def nearest(self) -> Tensor:
        """[K, k + 1 in reference mode, else k] the neighbours of each code."""
        return fitted(self.table)

    def limit(self, p_x: Tensor) -> Tensor:
        """Largest mass that neighbours may add to tokens of probability p_x [...]."""
        return torch.full_like(p_x, self.delta) if self.lam is None else (self.lam - 1) * p_x

    def mass(self, p: Tensor, q: Tensor, allowance: Tensor, only: Tensor | None = None) -> Tensor:
        if only is not None:
            return torch.zeros_like(p).scatter(-1, only, self.mass_at(p, q, only, allowance))
        limit = self.limit(p[..., :1] if self.lam is None else p)
        near = nearby_mass(p, self.nearest[:, : self.neighbours], limit)
        return torch.minimum(q, self.raised(p, near))

    def mass_at(self, p: Tensor, q: Tensor, x: Tensor, allowance: Tensor) -> Tensor:
        p_x = p.gather(-1, x)
        near, _ = nearby_prefix(p, self.nearest[:, : self.neighbours], x, self.limit(p_x))
        return torch.minimum(q.gather(-1, x), self.raised(p_x, near))

    def raised(self, p: Tensor, near: Tensor) -> Tensor:
        """Add the neighbours' mass: p + c; tokens that the target excludes stay excluded, but as released."""
        return p + (near if self.reference else near.where(p > 0, 0.0))

    def residual(self, p: Tensor, q: Tensor | None, x: Tensor) -> Tensor:
        if q is not None and not self.reference:
            return super().residual(p, q, x)
        ids, leaving = self.leaving(p, x)
        if q is None:
            left = p.scatter(-1, x, 0.0)
            left = left.scatter(-1, ids, left.gather(-1, ids).masked_fill(leaving, 0.0))
        else:
            left = (p - q.scatter(-1, ids, q.gather(-1, ids).masked_fill(leaving, 0.0))).clamp_min(0.0)
        return normalise(left, otherwise=self.uniform(p) if self.reference else p)

    def leaving(self, p: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """[..., k or k + 1] ids of the neighbours of x [..., 1], and which of them leave with it."""
        ids = self.nearest[x.clamp_max(len(self.nearest) - 1)].long()
        _, count = nearby_prefix(p, self.nearest, x, self.limit(p.gather(-1, x)))
        if self.reference:
            count = torch.where(count > 0, ids.shape[-1], 0)
        leaving = torch.arange(ids.shape[-1], device=ids.device) < count[..., None]
        return ids.flatten(-2), leaving.flatten(-2)

    def uniform(self, p: Tensor) -> Tensor:
        """[..., V] the uniform distribution over the codes."""
        uniform = torch.zeros_like(p)
        uniform[..., : len(self.nearest)] = 1 / len(self.nearest)
        return uniform

    def judge(self, p: Tensor, q: Tensor | None, x: Tensor, allowance: Tensor) -> tuple[Tensor, Tensor]:
        mass, tv = super().judge(p, q, x, allowance)
        if q is not None and self.reference:
            tv = total_variation(self.reference_output(p, q), p)
        return mass, tv

    def reference_output(self, p: Tensor, q: Tensor) -> Tensor:
        """[..., V] output distribution of the released rule for one sampled candidate x.

        Its residual depends on x: with N the neighbours of x, it is norm(b + 1_N m) for b = (p - q)+ and
        m = min(p, q), if a neighbour was added to x, and norm(b) if none was; so the sum over x costs k + 1
        terms a token.
        """
        table, size = self.nearest, len(self.nearest)
        a = self.mass(p, q, p[..., :1])
        first = p[..., table[:, 0].long()] if table.shape[1] else p[..., :0]
        grows = torch.zeros_like(p, dtype=torch.bool)
        grows[..., : first.shape[-1]] = first <= self.limit(p[..., : first.shape[-1]])
        base, common = (p - q).clamp_min(0.0), torch.minimum(p, q)
        total = base.sum(-1, keepdim=True) + nearby_mass(common, table).where(grows, 0.0)
        refused = (q - a).clamp_min(0.0)
        share = refused.where(total > 0, 0.0) / total.clamp_min(torch.finfo(p.dtype).tiny)
        lent = share.where(grows, 0.0)[..., :size].repeat_interleave(table.shape[1], -1)
        spread = torch.zeros_like(p).index_add_(-1, table.reshape(-1).long(), lent)
        nothing = refused.where(total <= 0, 0.0).sum(-1, keepdim=True)
        return a + base * share.sum(-1, keepdim=True) + common * spread + nothing * self.uniform(p)

    def measure(
        self, draft: Tree, scores: Scores, random: RandomStream, emitted: Tensor
    ) -> tuple[Path, Tensor]:
        if not self.reference or scores.greedy is False:
            return super().measure(draft, scores, random, emitted)
        greedy, tv = self.verify_greedy(draft, scores)
        if scores.greedy is True:
            return greedy, tv
        sampled, _ = super().measure(draft, scores, random, emitted)
        return Path.choose(scores.greedy[:, 0, 0], greedy, sampled), tv[:, :0]

    def verify_greedy(self, draft: Tree, scores: Scores) -> tuple[Path, Tensor]:
        """Verify at temperature 0 as released: the deepest path whose tokens all become the likeliest."""
        p = scores.logits.softmax(-1)
        above = p.gather(1, draft.parents[:, :, None].expand_as(p))
        x = draft.tokens[:, :, None]
        p_x = above.gather(-1, x)
        near, _ = nearby_prefix(above, self.nearest[:, : self.neighbours], x, self.limit(p_x))
        node = draft.deepest(draft.valid & ((p_x + near)[..., 0] >= above.amax(-1)))
        likeliest = scores.logits.argmax(-1)
        path = Path.at(draft, node, take(likeliest, node))
        depth = torch.arange(draft.max_depth, device=node.device)
        differs = path.values[:, :-1] != likeliest.gather(1, path.nodes)[:, :-1]
        differs = differs & (depth < path.accepted[:, None])
        return path, differs.to(p.dtype)


@dataclass
class LanternPlusPlus(Lantern):
    """LANTERN with the limit of LANTERN++: c(x) <= (lam - 1) p(x), among few neighbours."""

    lam: float | None = 5.0
    neighbours: int = 10


def lantern(
    delta: float = 0.1, neighbours: int = 100, metric: str = "l2", **window: Unpack[WindowOptions]
) -> Accelerator:
    """The delta-budget rule over neighbours in the codebook, after LANTERN (2410.03355)."""
    rule = Budget(delta, "neighbours", neighbours, metric)
    return Accelerator("lantern", JacobiDrafter(**window), rule)
