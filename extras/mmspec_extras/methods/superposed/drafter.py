"""Superposed decoding (2405.18400) as a drafter: each forward pass of a draft model continues k drafts.

The model reads one node per level, the mean of the embeddings of all drafts' newest tokens, weighted by their
probabilities. An n-gram model of the text so far tells the drafts apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from mmspec.core.canvas import Canvas
from mmspec.core.draft import Draft, DraftKind, Tree
from mmspec.core.rows import named
from mmspec.core.session import PromptBatch
from mmspec.methods.draft_model.drafter import DraftModelDrafter, fit_vocabulary
from mmspec.methods.draft_model.masked import NgramModel
from mmspec.targets import CausalTarget
from mmspec.validation import require_number
from mmspec_extras.draft_models import RereadDrafter, RereadSession, lay_out


class Chain(NamedTuple):
    """A draft: its score, its tokens, and the node of the newest one in the tree, with that node's parent."""

    score: float
    tokens: tuple[int, ...]
    node: int
    parent: int


LIKELIEST = 9  # next tokens that every chain is paired with, as published
ROOT = Chain(0.0, (), 0, 0)


def continue_chains(
    chains: Sequence[Chain], likely: Sequence[Sequence[float]], ngrams: NgramModel, weight: float, count: int
) -> list[Chain]:
    """Pair chains of one length with the tokens of one distribution, and keep the best `count` pairs.

    Args:
        chains: the root alone, or chains whose nodes are the last ones of the tree.
        likely: ids and log-probabilities of the likeliest tokens.
        ngrams: of the text before; first tokens are chosen without it.
        weight: of the n-grams; the draft model has 1 - weight.
    """
    pairs = []
    for chain in chains:
        before, share = [*ngrams.words[-2:], *chain.tokens], weight if chain.tokens else 0.0
        for token, log_p in likely:
            own = (1 - share) * log_p + share * ngrams.log_score(before, int(token))
            pairs.append((chain.score + own, chain, int(token)))
    best, new = sorted(pairs, key=lambda pair: -pair[0])[:count], chains[-1].node + 1
    return [
        Chain(score, (*chain.tokens, token), new + rank, chain.node)
        for rank, (score, chain, token) in enumerate(best)
    ]


class SuperposedSession(RereadSession):
    """Draft model of one batch, and the n-gram model of each row's text."""

    row_fields = named("ngrams")

    drafter: SuperposedDrafter

    def __init__(self, drafter: DraftModelDrafter, batch: PromptBatch) -> None:
        super().__init__(drafter, batch)
        self.ngrams = [NgramModel() for _ in batch.requests]

    def propose(self, canvas: Canvas) -> Draft:
        for ngrams, ids in zip(self.ngrams, canvas.ids, strict=True):
            ngrams.extend(ids[len(ngrams.words) :])
        return super().propose(canvas)

    def _draft(self, canvas: Canvas, step: Tensor, counts: Tensor | None) -> Draft:
        how, logits = self.drafter, self._read(step, counts)
        live, faulty = [[ROOT] for _ in self.ngrams], torch.zeros_like(canvas.root, dtype=torch.bool)
        trees: list[list[tuple[int, int]]] = [[] for _ in live]
        for level in range(how.num_draft_tokens):
            if level:
                logits = self._read_superposed(live, level)
            log_p, tokens = logits[:, 0].log_softmax(-1).topk(max(LIKELIEST, how.drafts))
            faulty = faulty | log_p.isnan().any(-1)
            rows = torch.stack([tokens.double(), log_p.double()], -1).tolist()  # one read of the device
            for row, (chains, likely) in enumerate(zip(live, rows, strict=True)):
                live[row] = continue_chains(chains, likely, self.ngrams[row], how.ngram_weight, how.drafts)
                trees[row] += [(chain.tokens[-1], chain.parent) for chain in live[row]]
        return lay_out(canvas.root, trees, how.num_draft_tokens, faulty)

    def _read_superposed(self, live: Sequence[Sequence[Chain]], level: int) -> Tensor:
        """Feed the newest tokens of each row's chains as one node of a level; return its logits [B, 1, V]."""
        self.passes += 1
        model = self.drafter.model
        newest = torch.tensor([[chain.tokens[-1] for chain in row] for row in live], device=model.device)
        scores = torch.tensor([[chain.score for chain in row] for row in live], device=model.device)
        embedded = model.embed(newest)  # [B, k, d]
        own = model.vocabulary + torch.arange(len(live), device=model.device)[:, None]  # a query for each row
        nodes = Tree.chain(own.expand(-1, level), DraftKind.POINT).nodes
        node = replace(nodes, tokens=own, slots=nodes.slots[:, -1:], visible=nodes.visible[:, -1:])
        self.state.queries = (scores.softmax(-1)[..., None] * embedded).sum(1).to(embedded.dtype)
        try:
            logits = model.score_nodes(self.state, node).logits
        finally:
            self.state.queries = self.state.queries[:0]
        return fit_vocabulary(logits, self.vocabulary)


class SuperposedDrafter(RereadDrafter):
    """Drafts several chains at once with a model that reads the weighted mean of their newest tokens.

    Args:
        model: the draft model.
        num_draft_tokens: length of a chain.
        drafts: number of chains k.
        ngram_weight: weight of the n-grams in the choice of chains, 0 to 1.

    Raises:
        InputError: a value is out of range.
    """

    session = SuperposedSession

    def __init__(
        self, model: CausalTarget, num_draft_tokens: int = 5, drafts: int = 3, ngram_weight: float = 0.54
    ) -> None:
        require_number("ngram_weight", ngram_weight, 0.0, 1.0, "must be a weight from 0 to 1")
        super().__init__(model, num_draft_tokens, num_draft_tokens * drafts, drafts=drafts)
        self.drafts, self.ngram_weight = drafts, ngram_weight
