"""Drafters for tests: always right, always wrong, with random shapes, or sampled from a stated q.

Together they cover every kind of draft (point, coupled,
i.i.d., without replacement) and every shape (chain, tree, another tree in each row, padding).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmspec.core.canvas import Canvas
from mmspec.core.distributions import Categorical, Distribution, PointMass
from mmspec.core.draft import Draft, DraftKind, Tree, check_tree
from mmspec.core.indexing import take
from mmspec.core.interfaces import Drafter, DraftSession, Request, TargetOutput
from mmspec.core.random_stream import Purpose, RandomStream
from mmspec.core.sampling import Sampler
from mmspec.core.verdict import Path

__all__ = [
    *("AdversarialDrafter", "OracleDrafter", "RandomTreeDrafter", "SampledTreeDrafter"),
    *("mass", "next_token", "ragged_tree", "tree_of"),
]

Continuations = Mapping[tuple[int, ...], Sequence[int]]
Proposal = Callable[[Tensor, Tensor, Sequence[Sequence[int]]], Draft]


class SimpleDrafter(Drafter):
    """A drafter whose session is one function from root, emitted tokens and ids to a draft."""

    def start(
        self, requests: Sequence[Request], prefill: TargetOutput, sampler: Sampler, random: RandomStream
    ) -> DraftSession:
        return SimpleSession(self.session(requests, random))

    def session(self, requests: Sequence[Request], random: RandomStream) -> Proposal:
        raise NotImplementedError


class SimpleSession(DraftSession):
    def __init__(self, proposal: Proposal) -> None:
        self.proposal = proposal

    def propose(self, canvas: Canvas) -> Draft:
        return self.proposal(canvas.root, canvas.emitted, canvas.ids)


class OracleDrafter(SimpleDrafter):
    """Drafts the target's output, as a chain or with wrong siblings at every depth.

    Args:
        continuations: prompt ids -> the output that the target will give.
        depth: number of tokens to look ahead.
        vocabulary: number of token ids.
        corruption: share of the proposed tokens that are replaced by a wrong one.
        siblings: wrong tokens beside each right one; they come first, so that an index is never a depth.
        kind: COUPLED where the continuations were drawn with the target's noise.
    """

    def __init__(
        self,
        continuations: Continuations,
        depth: int,
        vocabulary: int,
        corruption: float = 0.0,
        siblings: int = 0,
        kind: DraftKind = DraftKind.COUPLED,
    ) -> None:
        self.continuations = continuations
        self.depth, self.vocabulary, self.corruption, self.siblings = depth, vocabulary, corruption, siblings
        self.kind = kind
        self.branches = siblings > 0
        self.max_nodes = 1 + depth * (siblings + 1)

    def session(self, requests: Sequence[Request], random: RandomStream) -> Proposal:
        futures = [self.continuations[tuple(request.prompt_tokens)] for request in requests]

        def propose(root: Tensor, emitted: Tensor, history: Sequence[Sequence[int]]) -> Draft:
            done = [
                len(row) - len(request.prompt_tokens) for row, request in zip(history, requests, strict=True)
            ]
            rows = [self.row(future, at) for future, at in zip(futures, done, strict=True)]
            tokens = torch.cat([root[:, None], torch.tensor(rows).view(len(rows), -1)], 1)
            return self.shape(tokens)

        return propose

    def row(self, future: Sequence[int], at: int) -> list[int]:
        """Return the nodes after the root: at each depth the wrong siblings, then the correct token."""
        nodes = []
        for index in range(at, at + self.depth):
            right = future[index] if index < len(future) else 0
            junk = [(right + 1 + i) % self.vocabulary for i in range(self.siblings)]
            wrong = (index * 2654435761 % 1000) / 1000 < self.corruption
            nodes += [*junk, (right + self.vocabulary // 2) % self.vocabulary if wrong else right]
        return nodes

    def shape(self, tokens: Tensor) -> Draft:
        if not self.siblings:
            return Tree.chain(tokens, self.kind)
        width = self.siblings + 1
        parents = [0] + [depth * width for depth in range(self.depth) for _ in range(width)]
        return tree_of(tokens, parents, self.kind)


class AdversarialDrafter(OracleDrafter):
    """Drafts wrong tokens only; no token is ever accepted."""

    def __init__(self, continuations: Continuations, depth: int, vocabulary: int, siblings: int = 0) -> None:
        super().__init__(continuations, depth, vocabulary, corruption=1.0, siblings=siblings)


def mass(distribution: Categorical, x: Tensor) -> Tensor:
    """Probability of one token [T, n] at each node."""
    return distribution.p.gather(-1, x[..., None])[..., 0]


def next_token(path: Path) -> Tensor:
    """[B] the target's token after the last accepted node."""
    return take(path.values, path.accepted)


def tree_of(tokens: Tensor, parents: Sequence[int], kind: DraftKind, q: Distribution | None = None) -> Tree:
    """A draft whose tree is the same in every row: tokens [B, n], and n parents, each before its children."""
    depths, (rows, nodes) = check_tree(parents), tokens.shape
    children = [sum(1 for i, p in enumerate(parents) if i and p == node) for node in range(nodes)]
    q = PointMass(tokens[:, 1:]) if q is None else q
    valid, faulty = torch.ones(rows, nodes, dtype=torch.bool), torch.zeros(rows, dtype=torch.bool)
    above = torch.tensor(parents).expand(rows, nodes)
    valid, faulty, above = (each.to(tokens.device) for each in (valid, faulty, above))
    return Tree(tokens, valid, kind, q, faulty, above, max(depths), max(children))


def ragged_tree(tokens: Tensor, parents: Tensor, valid: Tensor, kind: DraftKind) -> Draft:
    """A draft whose rows have trees of their own. tokens, parents, valid: [B, n]."""
    rows, nodes = tokens.shape
    depths, children = torch.zeros_like(parents), torch.zeros_like(parents)
    for node in range(1, nodes):
        parent = parents[:, node : node + 1]
        depths[:, node] = depths.gather(1, parent)[:, 0] + 1
        children.scatter_add_(1, parent, torch.ones_like(parent))
    faulty = torch.zeros(rows, dtype=torch.bool)
    q = PointMass(tokens[:, 1:])
    return Tree(tokens, valid, kind, q, faulty, parents, int(depths.max()), int(children.max()))


class RandomTreeDrafter(SimpleDrafter):
    """Drafts random tokens on random trees with padding, whose shapes change from round to round.

    Args:
        nodes: largest draft, root included.
        vocabulary: tokens are drawn from the first `vocabulary` ids.
        hints: prompt ids -> output; half of the nodes take its tokens, so that deep paths are accepted.
    """

    kind = DraftKind.COUPLED
    branches = True

    def __init__(
        self, nodes: int, vocabulary: int, hints: Continuations | None = None, seed: int = 0
    ) -> None:
        self.max_nodes, self.vocabulary, self.hints, self.seed = nodes, vocabulary, hints, seed

    def session(self, requests: Sequence[Request], random: RandomStream) -> Proposal:
        generator = torch.Generator().manual_seed(self.seed)

        def propose(root: Tensor, emitted: Tensor, history: Sequence[Sequence[int]]) -> Draft:
            shape = (len(root), int(torch.randint(1, self.max_nodes + 1, (), generator=generator)))
            tokens = torch.randint(self.vocabulary, shape, generator=generator)
            tokens[:, 0] = root
            order = torch.arange(shape[1])
            parents = (torch.rand(shape, generator=generator) * order).long()
            recent = torch.rand(shape, generator=generator) < 0.5  # long paths are as likely as wide trees
            parents = torch.where(recent, order - 1, parents).clamp_min(0)
            valid = torch.rand(shape, generator=generator) < 0.9
            valid[:, 0] = True
            draft = ragged_tree(tokens, parents, valid, self.kind)
            return draft if self.hints is None else self.hint(draft, requests, history)

        return propose

    def hint(self, draft: Draft, requests: Sequence[Request], history: Sequence[Sequence[int]]) -> Draft:
        tokens = draft.tokens.clone()
        for row, request in enumerate(requests):
            future = self.hints[tuple(request.prompt_tokens)] if self.hints else []
            at = len(history[row]) - len(request.prompt_tokens) - 1
            for node in range(1, tokens.shape[1]):
                index = at + int(draft.depth[row, node])
                if node % 2 and index < len(future):
                    tokens[row, node] = future[index]
        return replace(draft, tokens=tokens, q=PointMass(tokens[:, 1:]))


class SampledTreeDrafter(SimpleDrafter):
    """Siblings drawn honestly from a fixed distribution of the token before.

    Args:
        distribution: [V, V] row-stochastic; row x is q after token x.
        widths: children of each node at depth 0, 1, ...; (1, 1, 1) is a chain.
        kind: IID, or WITHOUT_REPLACEMENT by the Gumbel top-k trick (Kool et al., 1903.06059).
    """

    draws_anew = True

    def __init__(self, distribution: Tensor, widths: Sequence[int], kind: DraftKind) -> None:
        self.distribution, self.widths, self.kind = distribution, widths, kind
        self.branches = max(widths) > 1
        self.parents = [0]
        level = [0]
        for width in widths:
            start = len(self.parents)
            self.parents += [parent for parent in level for _ in range(width)]
            level = list(range(start, len(self.parents)))
        self.max_nodes = len(self.parents)

    def session(self, requests: Sequence[Request], random: RandomStream) -> Proposal:
        def propose(root: Tensor, emitted: Tensor, history: Sequence[Sequence[int]]) -> Draft:
            tokens, distributions = [root[:, None]], list[Tensor]()
            for depth, width in enumerate(self.widths):
                distribution = self.distribution[tokens[-1]]  # [B, nodes of this level, V]
                anew = random.at(emitted[:, None])
                tokens.append(self.siblings(distribution, width, anew, emitted + depth))
                distributions.append(distribution.repeat_interleave(width, 1))
            q, flat = torch.cat(distributions, 1), torch.cat(tokens, 1)
            draft = tree_of(flat, self.parents, self.kind, Categorical(q))
            drawable = q.gather(-1, flat[:, 1:, None])[..., 0] > 0  # fewer tokens may be left than siblings
            return replace(draft, valid=self.keep(draft, pad(drawable, (1, 0), value=True)))

        return propose

    def keep(self, draft: Draft, drawable: Tensor) -> Tensor:
        """[B, n] which nodes stand; a hook for planted bugs."""
        return drawable

    def perturb(self, distribution: Tensor, noise: Tensor) -> Tensor:
        """Log-distribution plus noise, whose arg-max is a draw; a hook for planted bugs."""
        return distribution.log() + noise

    def siblings(self, distribution: Tensor, width: int, random: RandomStream, index: Tensor) -> Tensor:
        """[B, m, V] distributions -> [B, m * width] children in the order of their draws."""
        rows, nodes, vocabulary = distribution.shape
        copies = width if self.kind is DraftKind.IID else 1
        noise = random.gumbel(index[:, None], Purpose.DRAFT, nodes * copies * vocabulary, distribution.dtype)
        noise = noise.view(rows, nodes, copies, vocabulary)
        noisy = self.perturb(distribution[:, :, None].expand_as(noise), noise)
        if self.kind is DraftKind.IID:
            return noisy.argmax(-1).flatten(1)
        return noisy[:, :, 0].topk(width, dim=-1).indices.flatten(1)
