"""Decoder: a drafter paired with an acceptance rule that is sound for its drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from mmspec.core.canvas import Stopping
from mmspec.core.distributions import AnyDistribution
from mmspec.core.draft import Draft, DraftKind
from mmspec.core.interfaces import (
    AcceptanceRule,
    AnyRule,
    Drafter,
    DraftSession,
    PromptOutput,
    Request,
    TargetOutput,
)
from mmspec.core.promise import Level, Promise
from mmspec.core.random_stream import RandomStream
from mmspec.core.sampling import RowSettings
from mmspec.core.verdict import Measured, Verdict
from mmspec.errors import InputError
from mmspec.plugins import RULES

__all__ = ["Decoder", "is_sound", "rule_name"]

#: How the candidates of each kind of draft are chosen, for error texts.
CHOSEN = {
    DraftKind.POINT: "chosen without sampling",
    DraftKind.COUPLED: "drawn with the target's noise",
    DraftKind.IID: "sampled independently",
    DraftKind.WITHOUT_REPLACEMENT: "sampled without replacement",
}


@dataclass(frozen=True)
class Decoder:
    """A drafter and an acceptance rule that is sound for its drafts.

    Attributes:
        drafter: proposes the drafts.
        rule: decides which draft tokens are committed.

    Raises:
        InputError: the rule is not sound for the drafts.
    """

    drafter: Drafter
    rule: AnyRule

    def __post_init__(self) -> None:
        if is_sound(type(self.rule), self.drafter):
            return
        sound = sorted(
            name for name in RULES if is_sound(RULES[name], self.drafter) and reads(RULES[name], self.drafter)
        )
        reason = "this one is for another kind of draft"
        of_kind = isinstance(self.rule, self.drafter.judged_by) and reads(type(self.rule), self.drafter)
        if of_kind and isinstance(self.rule, AcceptanceRule):
            shape = "trees" if self.drafter.branches else "chains"
            shape += f" of candidates {CHOSEN[self.drafter.kind]}"
            if self.rule.judges_whole and not self.drafter.draws_anew:
                shape += " and kept across rounds"
            reason = f"its drafts are {shape}, for which this one would bias the output"
        rule = f"must be one of {', '.join(sound)} for this drafter with these options: {reason}"
        raise InputError("acceptance", rule_name(self.rule), rule)

    @property
    def promise(self) -> Promise:
        """Promise of the rule, or that of the drafter where the drafter is not exact."""
        own = self.drafter.exactness
        promise = self.rule.promise if own == Level.EXACT else Promise(Level(own))
        return replace(promise, relative_to=self.drafter.keeps) if promise.is_exact else promise

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers of the target whose hidden states the drafter or the rule reads."""
        return tuple(dict.fromkeys((*self.drafter.taps, *self.rule.taps)))

    @property
    def modules(self) -> Sequence[nn.Module]:
        """The drafter's modules that run beside the target; see `Target.computing`."""
        return self.drafter.modules

    @property
    def max_nodes(self) -> int:
        """Number of nodes of the largest draft, root included."""
        return self.drafter.max_nodes

    @property
    def runs_ahead(self) -> bool:
        """Whether a round can start before the host has read the last one; see `Drafter.runs_ahead`."""
        return self.drafter.runs_ahead

    @property
    def takes_candidates(self) -> bool:
        """Whether candidates of others can be added to a draft; see `Drafter.shares_tree`."""
        return self.drafter.shares_tree

    def admit(self, requests: Sequence[Request], sampler: RowSettings, stopping: Stopping) -> None:
        """Raise InputError for a batch that cannot be decoded, before its prefill."""
        self.drafter.admit(requests, sampler, stopping)

    def start(
        self,
        requests: Sequence[Request],
        prefill: PromptOutput,
        sampler: RowSettings,
        random: RandomStream,
    ) -> DraftSession:
        """Start a drafter's session for a batch that the target has just prefilled."""
        return self.drafter.start(requests, prefill, sampler, random)

    def decide(
        self, draft: Draft, output: TargetOutput, scores: AnyDistribution, random: RandomStream, first: Tensor
    ) -> tuple[Verdict, Measured]:
        """Decide which draft tokens a round commits. The arguments are those of `Rule.decide`."""
        return self.rule.decide(draft, output, scores, random, first)


def rule_name(rule: AnyRule) -> str:
    """Return the name that `acceptance=` accepts for a rule, or its class name if it has none."""
    return next((name for name in RULES if RULES[name] is type(rule)), type(rule).__name__)


def reads(rule: type[AnyRule], drafter: Drafter) -> bool:
    """Return whether a rule and a drafter are for the same kind of tokens, discrete or continuous."""
    pair = rule.distribution, drafter.distribution
    return issubclass(*pair) or issubclass(*reversed(pair))


def is_sound(rule: type[AnyRule], drafter: Drafter) -> bool:
    """Return whether the rule's promise holds for the drafter's drafts."""
    if not issubclass(rule, drafter.judged_by):
        return False
    if not issubclass(rule, AcceptanceRule):
        return True
    if rule.chains_only and drafter.branches or rule.judges_whole and not drafter.draws_anew:
        return False
    return drafter.kind in rule.sound_for
