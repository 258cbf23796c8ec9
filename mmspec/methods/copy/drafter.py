"""Prompt look-up: drafts the continuations of the longest suffixes that occurred before in the text.

Prompt look-up decoding (Saxena, 2023), with several continuations as a tree of the likeliest, optionally with
those of a corpus (ADED, 2407.12021, grown best first instead of by its search). It needs no second model.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import torch

from mmspec.core.canvas import Canvas
from mmspec.core.distributions import PointMass
from mmspec.core.draft import DraftKind, Tree
from mmspec.core.graphs import can_capture
from mmspec.core.interfaces import AnyTarget, DraftSession
from mmspec.core.rows import named
from mmspec.core.session import PromptBatch, SessionDrafter
from mmspec.errors import InputError
from mmspec.methods.copy.trigrams import Trigrams
from mmspec.trees.pacing import half_lengths
from mmspec.validation import check_draft_tokens, is_integer

ORDERS = (8, 4, 2, 1)  # lengths of the indexed n-grams
LATEST = 8  # number of occurrences of an n-gram that are compared
LONGEST = 16  # longer matches count as matches of this length

#: Odds that the continuation of a match of 1, 2, ... tokens is right: SmolLM2 on Spec-Bench, greedy. They are
#: the evidence of an occurrence, beside a weight of 1 for tokens without an occurrence.
ODDS = (0.11, 1.0, 1.5, 2.0, 2.6, 3.3, 4.0, 9.0)
OF_CORPUS = 0.5  # the corpus's share of that weight
OF_HEAD = 4.0  # the weight instead of 1 where a head has predictions, the corpus's share included

Guesses = Mapping[int, Mapping[int, tuple[int, float]]]
"""Children of each node of a head's tree by their tokens: their nodes, and their probabilities."""

Occurrence = tuple[int, int]
"""Length of a match, and the index after it."""


class SuffixIndex:
    """Index of the n-grams of a growing sequence, which finds earlier occurrences of its suffixes.

    A token costs a constant number of steps, however long the sequence is.

    Attributes:
        tokens: the sequence so far.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._ends: dict[tuple[int, ...], list[int]] = {}

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens at the end."""
        for token in tokens:
            self.tokens.append(token)
            end = len(self.tokens)
            for order in ORDERS:
                if order <= end:
                    self._ends.setdefault(tuple(self.tokens[end - order :]), []).append(end)

    def matches(self, shortest: int = 1) -> list[Occurrence]:
        """Return occurrences of suffixes of at least that length, longest first, then latest first.

        The latest eight of every indexed n-gram are compared. The longest is among them, unless more than
        eight later ones share its last eight tokens (for a shorter match, its longest indexed n-gram).
        """
        found: dict[int, int] = {}
        size = len(self.tokens)
        for order in ORDERS:
            if order <= size:
                for end in self._ends[tuple(self.tokens[size - order :])][-LATEST - 1 : -1]:
                    found.setdefault(end, self._common(end, order))
        matches = [(length, end) for end, length in found.items() if length >= shortest]
        return sorted(matches, reverse=True)

    def _common(self, end: int, known: int) -> int:
        """Return the length of the match that ends at `end`, of which `known` tokens are known."""
        tokens, size, length = self.tokens, len(self.tokens), known
        while length < min(end, LONGEST) and tokens[end - 1 - length] == tokens[size - 1 - length]:
            length += 1
        return length


class Continuation(NamedTuple):
    """Node of a tree of continuations.

    Attributes:
        token: its id.
        parent: index of its parent; 0 is the root, and the first candidate is node 1.
        depth: 1 or more.
        probability: estimate that its whole path is right.
    """

    token: int
    parent: int
    depth: int
    probability: float


def grow(
    index: SuffixIndex,
    corpus: Trigrams | None,
    nodes: int,
    top_k: int,
    shortest: int,
    guesses: Guesses = MappingProxyType({}),
) -> list[Continuation]:
    """Grow a tree of the likeliest continuations, the likeliest candidate first and parents before children.

    A token's probability is the evidence of the occurrences that it follows, plus half of the corpus's
    probability, over all evidence plus 1: an interpolation of n-grams of all orders. Where a head has
    predictions, 4 replaces the 1, and the head's probabilities and the corpus's share it.

    Args:
        index: of the text so far.
        corpus: table of a corpus; None if there is none.
        nodes: most candidates.
        top_k: most children of a node.
        shortest: shortest match that is continued.
        guesses: predictions of a head, whose root is node 0; none by default.
    """
    tree: list[Continuation] = []
    of_corpus = 0.0 if corpus is None else OF_CORPUS
    waiting: list[tuple[float, int, Continuation, list[Occurrence], list[int], int]] = []

    def add_children(
        parent: int, depth: int, above: float, found: list[Occurrence], text: list[int], guess: int
    ) -> None:
        evidence = {} if corpus is None else {token: of_corpus * p for token, p in corpus(text).items()}
        following: dict[int, list[Occurrence]] = {}
        guessed = guesses.get(guess, {})
        total = OF_HEAD if guessed else 1.0
        for token, (_, share) in guessed.items():
            evidence[token] = evidence.get(token, 0.0) + (OF_HEAD - of_corpus) * share
        for length, end in found:
            if end < len(index.tokens):
                token, odds = index.tokens[end], ODDS[min(length, len(ODDS)) - 1]
                following.setdefault(token, []).append((length + 1, end + 1))
                evidence[token] = evidence.get(token, 0.0) + odds
                total += odds
        best = heapq.nlargest(top_k, evidence, key=evidence.__getitem__)  # of ties the first, a later match
        for rank, token in enumerate(best):
            child = Continuation(token, parent, depth, above * evidence[token] / total)
            place = len(tree) * top_k + rank
            onwards, node = following.get(token, []), guessed.get(token, (-1,))[0]
            heapq.heappush(waiting, (-child.probability, place, child, onwards, [text[-1], token], node))

    add_children(0, 1, 1.0, index.matches(shortest), index.tokens[-2:], 0)
    while waiting and len(tree) < nodes:
        *_, best, onwards, text, node = heapq.heappop(waiting)
        tree.append(best)
        add_children(len(tree), best.depth + 1, best.probability, onwards, text, node)
    return tree


class CopySession(DraftSession):
    """Indexes of the texts of one batch, one per row, and their trees of continuations.

    Attributes:
        most: largest number of candidates of the next draft.
    """

    row_fields = named("indexes", "trees", "guesses")

    def __init__(self, drafter: CopyDrafter, batch: PromptBatch) -> None:
        self.drafter, self.sizes = drafter, half_lengths(drafter.num_draft_tokens)
        self.most = drafter.num_draft_tokens
        self.indexes = [SuffixIndex() for _ in batch.requests]
        self.trees: list[list[Continuation]] = [[] for _ in batch.requests]
        self.guesses: list[Guesses] = [{} for _ in batch.requests]

    def propose(self, canvas: Canvas) -> Tree:
        self._read(canvas)
        trees = [tree[: self.most] for tree in self.trees]  # the likeliest candidates, with their parents
        nodes = 1 + max(map(len, trees))
        if can_capture(canvas.device):  # few sizes, since a graph is captured for each
            nodes = 1 + min(size for size in (0, *self.sizes) if size >= nodes - 1)
        padding = [[(0, 0, -math.inf)] * (nodes - 1 - len(tree)) for tree in trees]
        table = [
            [(0, 0, 0.0), *((each.token, each.parent, math.log(each.probability)) for each in tree), *rest]
            for tree, rest in zip(trees, padding, strict=True)
        ]
        # one copy to the device in a round
        nodes_of = torch.tensor(table, dtype=torch.float64, device=canvas.device)
        tokens, parents, self.likelihoods = nodes_of[..., 0].long(), nodes_of[..., 1].long(), nodes_of[..., 2]
        valid = self.likelihoods > -math.inf
        tokens[:, 0] = canvas.root
        kind, rows = self.drafter.kind, len(trees)
        if not self.drafter.branches:
            return Tree.chain(tokens, kind, valid=valid)
        deepest = max((each.depth for tree in trees for each in tree), default=0)
        children = min(nodes - 1, self.drafter.top_k)
        faulty = torch.zeros(rows, dtype=torch.bool, device=canvas.device)
        return Tree(tokens, valid, kind, PointMass(tokens[:, 1:]), faulty, parents, deepest, children)

    def resize(self, choice: int) -> None:
        self.most = self.drafter.candidates_of_sizes[choice]

    def _read(self, canvas: Canvas) -> None:
        """Index the new tokens, and grow the trees after them."""
        for row, tokens in enumerate(canvas.ids):
            index, drafter = self.indexes[row], self.drafter
            if new := tokens[len(index.tokens) :]:
                index.extend(new)
                size = drafter.num_draft_tokens, drafter.top_k, drafter.min_match
                self.trees[row] = grow(index, drafter.corpus, *size, self.guesses[row])


class CopyDrafter(SessionDrafter):
    """Drafts the continuations of the longest suffixes that occurred before, in prompt or output.

    Args:
        num_draft_tokens: most tokens of a draft, 1 to 512.
        min_match: number of equal tokens before a place from which is copied, 1 or more.
        top_k: most continuations of a place, 1 or more; 1 drafts a chain.
        corpus: file of n-grams, whose likely successors are drafted beside repeated text; no file if None.

    Raises:
        InputError: a value is out of range, or the file is not such a table.
    """

    kind = DraftKind.POINT
    rates_paths = True
    shares_tree = True
    rows_move = True
    session: Callable[..., CopySession] = CopySession

    def __init__(
        self,
        num_draft_tokens: int = 16,
        min_match: int = 1,
        top_k: int = 8,
        corpus: str | Path | None = None,
    ) -> None:
        self.num_draft_tokens = check_draft_tokens(num_draft_tokens)
        for name, value in (("min_match", min_match), ("top_k", top_k)):
            if not is_integer(value) or value < 1:
                raise InputError(name, value, "must be an integer of at least 1")
        self.min_match, self.top_k = min_match, top_k
        self.max_nodes, self.branches = num_draft_tokens + 1, top_k > 1
        self.corpus = None if corpus is None else Trigrams.load(corpus)

    @property
    def sizes(self) -> tuple[int, ...]:
        return half_lengths(self.num_draft_tokens)

    def check(self, target: AnyTarget) -> None:
        if self.corpus is not None and self.corpus.vocabulary > target.vocabulary:
            rule = f"must have token ids below {target.vocabulary}, this model's vocabulary"
            raise InputError("corpus", f"ids up to {self.corpus.vocabulary - 1}", rule)
