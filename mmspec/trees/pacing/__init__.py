"""Pacing: how much each round drafts, chosen from the measured time and tokens of earlier rounds.

A *plain round* drafts nothing and gives one token. Its time is the unit of all costs here. Two policies
choose: `SizePolicy` sets the size before the drafter runs, and `PruningPolicy` prunes a draft that is there.
Both pause drafting where it does not pay, and `PacingConfig` has all their constants. `PacedDrafter` wraps a
drafter with one policy for each batch size.

No acceptance rule is biased. A size is chosen before anything of the round is drawn, and only drafts whose
candidates were not drawn are pruned. To drop a drawn token because its q is low would bias the output.
"""

from mmspec.trees.pacing.candidates import Calibration, Candidate
from mmspec.trees.pacing.config import DEFAULT_PACING, PacingConfig
from mmspec.trees.pacing.pruning import PruningPolicy
from mmspec.trees.pacing.session import PacedDrafter, PacingPolicy
from mmspec.trees.pacing.sizes import SizePolicy, half_lengths

__all__ = [
    "DEFAULT_PACING",
    "Calibration",
    "Candidate",
    "PacedDrafter",
    "PacingConfig",
    "PacingPolicy",
    "PruningPolicy",
    "SizePolicy",
    "half_lengths",
]
