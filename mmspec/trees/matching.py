"""Rules that draw the target's own token at every node and follow the child that carries it.

The drawn tokens are what plain decoding would have emitted, so any candidates will do: nothing
about how they were found can bias the output.
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
    """Walk from the root along the children that equal the target's choice. choice: as the tokens."""
    if not draft.max_depth:  # nothing was proposed
        return Path.root(draft, choice[:, 0])
    tree = draft.parents, draft.valid, *draft.paths, draft.max_depth
    return Path.along(*match_path(draft.tokens, choice, *tree))


class Greedy(AcceptanceRule):
    """Accept what equals the target's arg-max. Exact at temperature 0 only."""

    sound_for = frozenset(DraftKind)
    greedy_only = True

    def verify(self, draft: Tree, scores: Scores, random: RandomStream, emitted: Tensor) -> Path:
        return follow(draft, scores.logits.argmax(-1))


class SampleAndMatch(AcceptanceRule):
    """Draw y ~ p at every node; move to the child that equals y, else emit y.

    Accepts with the probability that p gives to the children together. The noise is keyed by output
    index, so the output is *bitwise* that of plain sampling with the same seed (Gumbel-exact), for
    every drafter and every tree.
    """

    sound_for = frozenset(DraftKind)
    distribution = Distribution
    is_plain_draw = True

    def verify(self, draft: Tree, scores: Distribution, random: RandomStream, emitted: Tensor) -> Path:
        return follow(draft, scores.choose(draft, random, emitted))
