"""Pacing: choose the draft length from the measured times and tokens of earlier rounds.

A *plain round* has no draft and yields one token. Its time is the unit of all costs here. There are two
policies: `SizePolicy` sets the size before the drafter runs, and `PruningPolicy` prunes a finished draft, on
CPUs only. Both pause drafting where it does not pay off, and `PacingConfig` has all their constants.
`PacedDrafter` wraps a drafter, with one policy for each batch size.

Pacing does not bias any acceptance rule. A size is chosen before the round's draws, and only deterministic
drafts are pruned. Dropping a drawn token because its q is low would bias the output.
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
