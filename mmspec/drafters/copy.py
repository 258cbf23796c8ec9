"""Prompt look-up: draft the continuations of the longest suffixes that occurred before.

Prompt look-up decoding (Saxena, 2023), with several continuations as a tree, and of a size that the matched
lengths are worth. Needs no training and no second model.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from mmspec.decoding.canvas import Canvas
from mmspec.decoding.distribution import PointMass
from mmspec.decoding.draft import Draft, DraftKind, Tree
from mmspec.decoding.graphs import can_capture
from mmspec.decoding.interfaces import DraftSession
from mmspec.decoding.rows import named
from mmspec.drafters.length import half_lengths
from mmspec.drafters.session import PromptBatch, SessionDrafter
from mmspec.errors import InputError
from mmspec.validation import check_draft_tokens, is_integer

ORDERS = (8, 4, 2, 1)  # lengths of the n-grams whose occurrences are known
LATEST = 8  # occurrences of an n-gram that are looked at
LONGEST = 16  # matches are not told apart beyond this length

KEEP, DOUBT = 0.995, 4.0  # decay of what was counted, and the count that a first guess is worth
#: How often a continuation is right by the length of its match, from 1 on: SmolLM2 on Spec-Bench, greedy.
GUESSES = (0.1, 0.5, 0.6, 0.67, 0.72, 0.77, 0.8, 0.9)
GUESSES_OF_OTHERS = (0.15, 0.05)  # the same of the second continuation, and of later ones

Occurrence = tuple[int, int]
"""Length of a match, and the index after it."""


class SuffixIndex:
    """Index of the n-grams of a growing sequence, by which its suffixes are found where they occurred before.

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
        """Occurrences of suffixes of at least that length, the longest first and then the latest.

        For every n-gram that is known the latest eight; so the longest is among them, unless more than eight
        later ones share its last eight tokens, or what it has more of them than the known n-grams.
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
        """Length of the match that ends there, of which so much is known."""
        tokens, size, length = self.tokens, len(self.tokens), known
        while length < min(end, LONGEST) and tokens[end - 1 - length] == tokens[size - 1 - length]:
            length += 1
        return length


class ContinuationRates:
    """Rates at which continuations are right, by length of the match and rank; learnt as texts go on."""

    def __init__(self) -> None:
        ranks = range(1 + len(GUESSES_OF_OTHERS))
        self._seen = [[0.0 for _ in ranks] for _ in GUESSES]
        self._right = [[0.0 for _ in ranks] for _ in GUESSES]

    def __call__(self, length: int, rank: int) -> float:
        """Estimate how often the continuation of that rank is right behind a match of that length."""
        at, rank = min(length, len(GUESSES)) - 1, min(rank, len(GUESSES_OF_OTHERS))
        guess = GUESSES_OF_OTHERS[rank - 1] if rank else GUESSES[at]
        return (self._right[at][rank] + DOUBT * guess) / (self._seen[at][rank] + DOUBT)

    def learn(self, length: int, rank: int, is_right: bool) -> None:
        """Count a continuation whose place has been decided."""
        at, rank = min(length, len(GUESSES)) - 1, min(rank, len(GUESSES_OF_OTHERS))
        self._seen[at][rank] = KEEP * self._seen[at][rank] + 1
        self._right[at][rank] = KEEP * self._right[at][rank] + is_right


@dataclass(frozen=True)
class Continuation:
    """Node of a tree of continuations.

    Attributes:
        token: its id.
        parent: index of its parent; 0 is the root, and the first candidate is node 1.
        depth: from 1 on.
        length, rank: of the match that it continues, and among its siblings.
        probability: estimate that its whole path is right.
    """

    token: int
    parent: int
    depth: int
    length: int
    rank: int
    probability: float


def grow(
    index: SuffixIndex, rates: ContinuationRates, nodes: int, top_k: int, shortest: int
) -> list[Continuation]:
    """Grow a tree of the likeliest continuations, the likeliest candidate first and parents before children.

    Args:
        index: of the text so far.
        rates: by which candidates are likely.
        nodes: most candidates.
        top_k: most children of a node: the longest matches' first, then the latest ones'.
        shortest: match that is continued.
    """
    tree: list[Continuation] = []
    waiting: list[tuple[float, int, Continuation, list[Occurrence]]] = []

    def add_children(parent: int, depth: int, above: float, occurrences: list[Occurrence]) -> None:
        following: dict[int, list[Occurrence]] = {}
        for length, end in occurrences:
            if end < len(index.tokens):
                following.setdefault(index.tokens[end], []).append((length + 1, end + 1))
        for rank, (token, onwards) in enumerate(list(following.items())[:top_k]):
            length = onwards[0][0] - 1
            child = Continuation(token, parent, depth, length, rank, above * rates(length, rank))
            heapq.heappush(waiting, (-child.probability, len(tree) * top_k + rank, child, onwards))

    add_children(0, 1, 1.0, index.matches(shortest))
    while waiting and len(tree) < nodes:
        *_, best, onwards = heapq.heappop(waiting)
        tree.append(best)
        add_children(len(tree), best.depth + 1, best.probability, onwards)
    return tree


def judged(tree: Sequence[Continuation], tokens: Sequence[int]) -> Iterator[tuple[Continuation, bool]]:
    """Continuations of a tree whose places are decided by the tokens that came, and whether each is right."""
    parent = 0
    for token in tokens:
        right = None
        for node, each in enumerate(tree, start=1):
            if each.parent == parent:
                yield each, each.token == token
                right = node if each.token == token else right
        if right is None:
            return
        parent = right


class CopySession(DraftSession):
    """Indexes of the texts of one batch, one per row, and their trees of continuations."""

    row_fields = named("indexes", "trees")

    def __init__(self, drafter: CopyDrafter, batch: PromptBatch) -> None:
        self.drafter, self.sizes = drafter, half_lengths(drafter.num_draft_tokens)
        self.indexes = [SuffixIndex() for _ in batch.requests]
        self.trees: list[list[Continuation]] = [[] for _ in batch.requests]

    def propose(self, canvas: Canvas) -> Draft:
        self._read(canvas)
        trees = self.trees
        nodes = 1 + max(map(len, trees))
        if can_capture(canvas.device):  # few sizes, since a forward is captured for each
            nodes = 1 + min(size for size in (0, *self.sizes) if size >= nodes - 1)
        padding = [[(0, 0, -math.inf)] * (nodes - 1 - len(tree)) for tree in trees]
        told = [
            [(0, 0, 0.0), *((each.token, each.parent, math.log(each.probability)) for each in tree), *rest]
            for tree, rest in zip(trees, padding, strict=True)
        ]
        # the one copy to the device in a round
        table = torch.tensor(told, dtype=torch.float64, device=canvas.device)
        tokens, parents, self.likelihoods = table[..., 0].long(), table[..., 1].long(), table[..., 2]
        valid = self.likelihoods > -math.inf
        tokens[:, 0] = canvas.root
        kind, rows = self.drafter.kind, len(trees)
        if not self.drafter.branches:
            return Tree.chain(tokens, kind, valid=valid)
        deepest = max((each.depth for tree in trees for each in tree), default=0)
        children = min(nodes - 1, self.drafter.top_k)
        faulty = torch.zeros(rows, dtype=torch.bool, device=canvas.device)
        return Tree(tokens, valid, kind, PointMass(tokens[:, 1:]), faulty, parents, deepest, children)

    def _read(self, canvas: Canvas) -> None:
        """Take in what came since the last time, and grow the trees behind it."""
        for row, tokens in enumerate(canvas.ids):
            index, drafter = self.indexes[row], self.drafter
            new = tokens[len(index.tokens) :]
            if not new:
                continue
            for candidate, is_right in judged(self.trees[row], new):
                drafter.rates.learn(candidate.length, candidate.rank, is_right)
            index.extend(new)
            size = drafter.num_draft_tokens, drafter.top_k, drafter.min_match
            self.trees[row] = grow(index, drafter.rates, *size)


class CopyDrafter(SessionDrafter):
    """Proposes the continuations of the longest suffixes seen before, in prompt and output alike.

    Args:
        num_draft_tokens: most candidates to propose.
        min_match: shortest suffix worth copying from.
        top_k: most continuations of a place; 1 proposes a chain.

    Attributes:
        rates: at which continuations were right; of all texts, whatever the batch.

    Raises:
        InputError: a value outside its range.
    """

    kind = DraftKind.POINT
    rates_paths = True
    rows_move = True
    session = CopySession

    def __init__(self, num_draft_tokens: int = 16, min_match: int = 1, top_k: int = 4) -> None:
        self.num_draft_tokens = check_draft_tokens(num_draft_tokens)
        for name, value in (("min_match", min_match), ("top_k", top_k)):
            if not is_integer(value) or value < 1:
                raise InputError(name, value, "an integer of at least 1")
        self.min_match, self.top_k = min_match, top_k
        self.max_nodes, self.branches = num_draft_tokens + 1, top_k > 1
        self.rates = ContinuationRates()
