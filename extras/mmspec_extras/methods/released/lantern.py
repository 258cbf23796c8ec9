"""LANTERN's rule as in the code released for LlamaGen. Lossy by design."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from mmspec.core.distributions import Scores
from mmspec.core.draft import Tree
from mmspec.core.indexing import take
from mmspec.core.random_stream import RandomStream
from mmspec.core.verdict import Path
from mmspec.kernels import nearby_mass, nearby_prefix
from mmspec.kernels.chain import normalise
from mmspec.methods.lantern.rule import Lantern
from mmspec.targets import AnyTarget
from mmspec.trees.neighbours import fitted, neighbour_table
from mmspec.trees.relaxed_sampling import total_variation


@dataclass
class ReleasedLantern(Lantern):
    """Accepts as the released code of LANTERN (2410.03355) or, with `lam`, LANTERN++ (2502.06352) does.

    If any neighbour was added and the candidate is rejected, all k + 1 nearest codes are removed: from p for
    a deterministic candidate, and from q for a sampled one, so that they keep their mass in p. A distribution
    with nothing left becomes uniform over the codes. A token of probability zero may be accepted. At
    temperature 0, x is accepted if p(x) + c(x) is at least the largest probability.

    Args: see `Lantern`.
    """

    keeps_greedy = False

    def fit(self, target: AnyTarget) -> ReleasedLantern:
        rule = copy.copy(self)
        rule.table = neighbour_table(target, self.neighbours + 1, self.metric)
        return rule

    @property
    def nearest(self) -> Tensor:
        return self.leaving_codes[:, : self.neighbours]

    @property
    def leaving_codes(self) -> Tensor:
        """[K, k + 1] the neighbours of each code that are removed with it."""
        return fitted(self.table)

    def raised(self, p: Tensor, near: Tensor) -> Tensor:
        return p + near

    def residual(self, p: Tensor, q: Tensor | None, x: Tensor) -> Tensor:
        ids, leaving = self.leaving(p, x)
        if q is None:
            left = p.scatter(-1, x, 0.0)
            left = left.scatter(-1, ids, left.gather(-1, ids).masked_fill(leaving, 0.0))
        else:
            left = (p - q.scatter(-1, ids, q.gather(-1, ids).masked_fill(leaving, 0.0))).clamp_min(0.0)
        return normalise(left, otherwise=self.uniform(p))

    def leaving(self, p: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return ids [..., k + 1] of the neighbours of x [..., 1], and whether all or none are removed."""
        codes = self.leaving_codes
        ids = codes[x.clamp_max(len(codes) - 1)].long()
        _, count = nearby_prefix(p, codes, x, self.limit(p.gather(-1, x)))
        leaving = (count > 0)[..., None].expand(*count.shape, ids.shape[-1])
        return ids.flatten(-2), leaving.flatten(-2)

    def uniform(self, p: Tensor) -> Tensor:
        """[..., V] the uniform distribution over the codes."""
        uniform = torch.zeros_like(p)
        uniform[..., : len(self.nearest)] = 1 / len(self.nearest)
        return uniform

    def judge(self, p: Tensor, q: Tensor | None, x: Tensor, allowance: Tensor) -> tuple[Tensor, Tensor]:
        mass, tv = super().judge(p, q, x, allowance)
        return mass, tv if q is None else total_variation(self.released_output(p, q), p)

    def released_output(self, p: Tensor, q: Tensor) -> Tensor:
        """Return the output distribution [..., V] of the released rule for one sampled candidate x.

        The residual distribution depends on x. With N the neighbours of x, b = (p - q)+ and m = min(p, q), it
        is norm(b + 1_N m) if a neighbour was added to x, and norm(b) otherwise. The sum over x therefore has
        k + 1 terms per token.
        """
        table, size = self.leaving_codes, len(self.leaving_codes)
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
        if scores.greedy is False:
            return super().measure(draft, scores, random, emitted)
        greedy, tv = self.verify_greedy(draft, scores)
        if scores.greedy is True:
            return greedy, tv
        sampled, _ = super().measure(draft, scores, random, emitted)
        return Path.choose(scores.greedy[:, 0, 0], greedy, sampled), tv[:, :0]

    def verify_greedy(self, draft: Tree, scores: Scores) -> tuple[Path, Tensor]:
        """Verify at temperature 0 as released: follow the deepest path of tokens that become likeliest."""
        p = scores.logits.softmax(-1)
        above = p.gather(1, draft.parents[:, :, None].expand_as(p))
        x = draft.tokens[:, :, None]
        p_x = above.gather(-1, x)
        near, _ = nearby_prefix(above, self.nearest, x, self.limit(p_x))
        node = draft.deepest(draft.valid & ((p_x + near)[..., 0] >= above.amax(-1)))
        likeliest = scores.logits.argmax(-1)
        path = Path.at(draft, node, take(likeliest, node))
        depth = torch.arange(draft.max_depth, device=node.device)
        differs = path.values[:, :-1] != likeliest.gather(1, path.nodes)[:, :-1]
        differs = differs & (depth < path.accepted[:, None])
        return path, differs.to(p.dtype)
