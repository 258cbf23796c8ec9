"""Sample-and-match rules: draw the target's own token at every node, and follow the child with that token.

The drawn tokens are those of plain decoding, so that the choice of candidates cannot bias the output.
"""

from __future__ import annotations

from torch import Tensor

from mmspec.core.distributions import Distribution, Scores
from mmspec.core.draft import DraftKind, Tree
from mmspec.core.interfaces import AcceptanceRule
from mmspec.core.random_stream import RandomStream
from mmspec.core.verdict import Path
from mmspec.kernels import match_path


def follow(draft: Tree, choice: Tensor) -> Path:
    """Follow the children that equal the target's choice from the root. choice: shaped as the tokens."""
    if not draft.max_depth:  # the root alone
        return Path.root(draft, choice[:, 0])
    tree = draft.parents, draft.valid, *draft.paths, draft.max_depth
    return Path.along(*match_path(draft.tokens, choice, *tree))


class Greedy(AcceptanceRule):
    """Greedy acceptance: accept tokens that equal the target's arg-max. Exact at temperature 0 only."""

    sound_for = frozenset(DraftKind)
    greedy_only = True

    def verify(self, draft: Tree, scores: Scores, random: RandomStream, emitted: Tensor) -> Path:
        return follow(draft, scores.logits.argmax(-1))


class SampleAndMatch(AcceptanceRule):
    """Sample-and-match: draw y ~ p at every node; move to the child that equals y, otherwise emit y.

    The acceptance probability is the total probability of the children under p. The noise is keyed by output
    index, so that the output is that of plain sampling with the same seed (Gumbel-exact), for every drafter
    and every tree: *bitwise* where forward passes of other shapes give equal logits, but for near-ties
    otherwise (docs/explanation/exactness.md).
    """

    sound_for = frozenset(DraftKind)
    distribution = Distribution
    is_plain_draw = True

    def verify(self, draft: Tree, scores: Distribution, random: RandomStream, emitted: Tensor) -> Path:
        return follow(draft, scores.choose(draft, random, emitted))
