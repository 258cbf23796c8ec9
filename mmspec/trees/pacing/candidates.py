"""Candidates of a draft, and the calibrated probability that each is correct."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mmspec.core.draft import Tree
from mmspec.trees.pacing.config import DEFAULT_PACING, PacingConfig


@dataclass(frozen=True)
class Candidate:
    """Candidate of a draft.

    Attributes:
        node: index in the draft.
        parent: index of its parent.
        token: token id.
        share: the drafter's probability that it is correct if its parent is.
        path: calibrated probability that its whole path is correct.
    """

    node: int
    parent: int
    token: int
    share: float
    path: float


class Calibration:
    """Calibration of a drafter's probabilities: the measured accuracy of candidates of similar probability.

    Args:
        config: constants of pacing.
    """

    def __init__(self, config: PacingConfig = DEFAULT_PACING) -> None:
        self.config = config
        self._seen, self._right = ([0.0] * (len(config.bin_edges) + 1) for _ in range(2))

    def __call__(self, share: float) -> float:
        """Return the measured accuracy of candidates to which the drafter assigns this probability."""
        at, prior = self._bin(share), self.config.prior
        return (self._right[at] + prior * share) / (self._seen[at] + prior)

    def learn(self, candidates: Sequence[Candidate], tokens: Sequence[int]) -> None:
        """Update the calibration with the tokens of a round.

        Candidates of a place are only counted if the path before them was correct.

        Args:
            candidates: of the round's draft.
            tokens: of the round, for the same row.
        """
        parent: int | None = 0
        for token in tokens:
            siblings = [each for each in candidates if each.parent == parent]
            parent = None
            for each in siblings:
                at, is_right = self._bin(each.share), each.token == token
                self._seen[at] = self.config.fade * self._seen[at] + 1
                self._right[at] = self.config.fade * self._right[at] + is_right
                parent = each.node if is_right else parent
            if parent is None:
                return

    def rate(self, draft: Tree, likelihoods: Tensor) -> list[list[Candidate]]:
        """List the candidates of each row, the most likely first and parents before their children.

        Args:
            draft: of B rows and n nodes.
            likelihoods: [B, n] log-probability of the path to each node; see `DraftSession`.
        """
        rows = []
        packed = draft.tokens.double(), draft.parents.double(), likelihoods.double()
        for tokens, parents, scores in torch.stack(packed, 1).tolist():  # one read of the device
            paths, row = [1.0], []
            for node in range(1, len(tokens)):
                parent = int(parents[node])
                share = math.exp(scores[node] - scores[parent]) if scores[node] > -math.inf else 0.0
                paths.append(paths[parent] * min(1.0, self(share)) if share else 0.0)
                row.append(Candidate(node, parent, int(tokens[node]), share, paths[node]))
            rows.append(sorted((each for each in row if each.path), key=lambda each: -each.path))
        return rows

    def _bin(self, share: float) -> int:
        """Index of the bin of a probability."""
        return bisect_left(self.config.bin_edges, share)
