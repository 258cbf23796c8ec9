"""Judge rule: a head on the target's hidden states accepts harmless draft tokens (2501.19309)."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mmspec.core.distributions import Scores
from mmspec.core.draft import Draft, DraftKind, Tree
from mmspec.core.indexing import take
from mmspec.core.interfaces import AcceptanceRule, Target, TargetOutput
from mmspec.core.promise import Level
from mmspec.core.random_stream import RandomStream
from mmspec.core.verdict import Measured, Path, Verdict
from mmspec.errors import InputError
from mmspec.validation import require_number
from mmspec_extras.methods.judge.head import JudgeHead
from mmspec_extras.trained import copied_to, read_trained

FINAL = -1  # the tap of the last hidden states


@dataclass(frozen=True)
class Judge(AcceptanceRule):
    """Accepts the target's own choice, or a candidate that a trained judge rates as harmless (2501.19309).

    The judge reads the target's last hidden state at the candidate. Among siblings, the target's choice is
    followed, or else the candidate with the highest rating. The output is lossy, without a bound. A threshold
    of 1 is `sample_and_match`, token for token; 0 accepts every draft. Tokens that the request excludes are
    never accepted. `mmspec-extras train-judge` trains a judge.

    Args:
        judge: folder of a `JudgeHead`, or a loaded one.
        threshold: a candidate is accepted if the judge's probability that it is harmless is above this.

    Raises:
        InputError: `threshold` is out of range; in `fit`, if there is no judge, or the judge is for other
            hidden states.
        CheckpointError: the judge cannot be read.
    """

    judge: Any = None
    threshold: float = 0.5
    head: JudgeHead | None = field(default=None, init=False, compare=False, repr=False)

    sound_for = frozenset(DraftKind)
    exactness = Level.LOSSY
    keeps_greedy = False
    taps = (FINAL,)

    def __post_init__(self) -> None:
        require_number("threshold", self.threshold, 0.0, 1.0, "must be a probability")
        if self.judge is not None:  # an unreadable folder should fail before the target is loaded
            object.__setattr__(self, "head", read_trained(JudgeHead, self.judge, "judge", "judge"))

    def fit(self, target: Target[Any]) -> Judge:
        head = copied_to(target.device, self.head, "judge", "judge")
        if target.config is None:
            rule = "cannot be judge: the hidden states of this model cannot be read"
            raise InputError("acceptance", "judge", rule)
        width = target.config.get_text_config(decoder=True).hidden_size
        if head.config.hidden_size != width:
            rule = f"must fit hidden states of {width} numbers, the width of this model"
            raise InputError("judge", f"{head.config.hidden_size} weights", rule)
        fitted = copy.copy(self)
        object.__setattr__(fitted, "head", head)
        return fitted

    @property
    def least(self) -> float:
        """Log-odds of the threshold; -inf for 0, inf for 1."""
        t = self.threshold
        return math.log(t / (1 - t)) if 0 < t < 1 else math.copysign(math.inf, t - 0.5)

    def decide(
        self, draft: Draft, output: TargetOutput, scores: Scores, random: RandomStream, first: Tensor
    ) -> tuple[Verdict, Measured]:
        if self.head is None:
            raise TypeError("the rule must be fitted to a target first")
        lanes = draft.lanes
        rows, nodes = lanes.valid.shape
        batch = len(draft.valid)  # with guidance, unconditional rows follow; queries follow the nodes
        hidden = output.taps[FINAL][:batch, : rows * nodes // batch].reshape(rows, nodes, -1)
        path = self.walk(lanes, self.head(hidden), scores, random, first)
        return draft.verdict(path, scores.is_finite()), Measured.nothing(draft.faulty)

    def walk(self, draft: Tree, odds: Tensor, scores: Scores, random: RandomStream, emitted: Tensor) -> Path:
        """Verify a tree, given the log-odds [B, n] that its candidates are harmless."""
        choice = scores.choose(draft, random, emitted)
        above, logits = draft.parents, scores.logits
        of_token = logits.gather(1, above[:, :, None].expand_as(logits))
        of_token = of_token.gather(-1, draft.tokens[:, :, None])[..., 0]
        is_candidate = draft.valid & (of_token > -math.inf)
        is_candidate[:, 0] = False  # the root is its own parent, and no sibling of its children
        matches = is_candidate & (draft.tokens == choice.gather(1, above))

        def best_of_siblings(values: Tensor) -> Tensor:
            return torch.zeros_like(values).scatter_reduce(1, above, values, "amax", include_self=False)

        is_decided = best_of_siblings(matches.long()).bool().gather(1, above)
        trusted = is_candidate & (odds > self.least) & ~is_decided
        rank = odds.where(trusted, -math.inf)
        trusted &= rank == best_of_siblings(rank).gather(1, above)
        node = draft.deepest(matches | trusted)
        return Path.at(draft, node, take(choice, node))
