"""`Accelerator`: a drafter with an acceptance rule, a name and a draft length; `Call` decodes a batch."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from time import perf_counter

from mmspec.core.canvas import Canvas, Stopping, VectorCanvas
from mmspec.core.decoder import Decoder, is_sound, rule_name
from mmspec.core.interfaces import AnyRule, AnyTarget, Drafter, Request, Round
from mmspec.core.loop import speculate
from mmspec.core.plain import NoDrafter
from mmspec.core.random_stream import RandomStream
from mmspec.core.sampling import AnySampler, RowSettings, check_rows
from mmspec.core.statistics import DecodingStats
from mmspec.errors import InputError
from mmspec.plugins import RULES
from mmspec.registry import did_you_mean
from mmspec.trees.pacing import PacedDrafter, PacingPolicy
from mmspec.validation import require_number

__all__ = ["DEFAULT_RULES", "Accelerator", "Call", "default_rule", "pair"]

LENGTHS = ("auto", "fixed", "confidence", "cost")
DEFAULT_STOP = 0.3
#: The default rule is the first of these that is sound for the kind of drafts.
DEFAULT_RULES = ("speculative_sampling", "recursive_rejection", "sample_and_match")


@dataclass(frozen=True)
class Accelerator:
    """A drafter with an acceptance rule that is sound for its kind of drafts.

    Attributes:
        length: how long drafts are: "auto", "fixed" or "cost"; see `with_length`.
        costs: pacing policies by number of rows, with the measured time and accepted tokens of each draft
            size. Filled while batches are decoded.

    Raises:
        InputError: the rule is not sound for the drafter's kind of drafts, or `length` is "cost" and the
            drafter has a single draft size.
    """

    name: str
    drafter: Drafter
    rule: AnyRule
    length: str = "auto"
    costs: dict[int, PacingPolicy] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        if self.length == "cost" and not self._has_sizes:
            rule = f"must be 'auto' or 'fixed' for {self.name!r}, whose drafts have one size"
            raise InputError("length", "cost", rule)
        _ = self.decoder  # checks the pair

    @property
    def decoder(self) -> Decoder:
        """The drafter and the rule, as `speculate` takes them."""
        return Decoder(self.drafter, self.rule)

    @property
    def exactness(self) -> str:
        """The promise about the output distribution: "exact", "tv<=x", "approximate" or "lossy"."""
        return str(self.decoder.promise)

    @property
    def keeps(self) -> str:
        """The reference distribution in words; "" for that of the next token, and for methods not exact."""
        return self.decoder.promise.relative_to

    def with_rule(self, rule: AnyRule) -> Accelerator:
        """Return this accelerator with another acceptance rule.

        Raises:
            InputError: the rule is not sound for the drafter's kind of drafts.
        """
        return replace(self, rule=rule)

    def with_length(self, length: str, stop_below: float | None = None) -> Accelerator:
        """Return this accelerator with drafts of another length.

        Args:
            length: "fixed" keeps the full size. "confidence" stops at a level where the drafter rates
                every path unlikely. "cost" chooses among a few sizes by measured round times and accepted
                tokens, for the number of rows, and pauses drafting where no size is faster than plain
                decoding. "auto" is "cost" if the output does not depend on the draft size (temperature 0, and
                `sample_and_match`), else "fixed".
            stop_below: least probability of a path for "confidence"; 0.3 if None.

        Raises:
            InputError: there is no such length, or the drafter does not support it.
        """
        if length not in LENGTHS:
            raise InputError("length", length, did_you_mean(length, LENGTHS))
        if length == "confidence":
            least = DEFAULT_STOP if stop_below is None else stop_below
            require_number("stop_below", least, 0.0, 1.0, "must be above 0 and at most 1", open_below=True)
            return replace(self, drafter=self.drafter.stopping_below(least), length="fixed")
        if stop_below is not None:
            raise InputError("stop_below", stop_below, "must be None unless length='confidence'")
        return replace(self, length=length, costs={})

    def is_paced(self, sampler: RowSettings) -> bool:
        """Return whether the draft size is chosen by cost, for these sampling settings."""
        if self.length != "auto":
            return self.length == "cost"
        any_size = sampler.greedy and self.rule.keeps_greedy or self.rule.is_plain_draw
        return self._has_sizes and any_size

    @property
    def decoder_of_any(self) -> Decoder:
        """The decoder of a batch that requests enter and leave.

        Draft sizes are chosen by cost, for the number of rows, while `is_paced` holds for all its rows.
        """
        may_pace = self.length in ("auto", "cost") and self._has_sizes
        return self._paced if may_pace else self.decoder

    @cached_property
    def _paced(self) -> Decoder:
        """The decoder with chosen sizes; one for all batches, because graphs know its drafter by identity."""
        return replace(self.decoder, drafter=PacedDrafter(self.drafter, self.costs, may_vary=self.is_paced))

    @property
    def _has_sizes(self) -> bool:
        return self.drafter.rates_paths or bool(self.drafter.sizes)

    def fit(self, target: AnyTarget) -> Accelerator:
        """Return this accelerator fitted to a target.

        Raises:
            InputError: the drafter or the rule does not fit the target.
        """
        if self.drafter.is_plain and (plain := target.plain_decoding()) is not None:
            drafter, rule = plain
            drafter.is_plain = True  # so that `fit` works again for another target
            return replace(self, drafter=drafter, rule=rule or self.rule, costs={})
        for part in (self.drafter, self.rule):
            if not issubclass(target.distribution, part.distribution):
                own = "continuous" if target.vector_size else "discrete"
                required = f"must be one for {own} tokens, as this model's are (see `mmspec accelerators`)"
                raise InputError("accelerator", self.name, required)
        if target.by_blocks and not self.drafter.decides_places:
            required = (
                "must be one for models that decide places together, such as 'none' (see `mmspec "
                "accelerators`): this model has no next token to draft"
            )
            raise InputError("accelerator", self.name, required)
        drafter, rule = self.drafter.fit(target), self.rule.fit(target)
        return replace(self, drafter=drafter, rule=rule, costs={})

    def call(
        self,
        target: AnyTarget,
        sampler: RowSettings,
        requests: Sequence[Request],
        stopping: Stopping,
        random: RandomStream,
        prompts: Sequence[list[int]] | None = None,
    ) -> Call:
        """Set up the decoding of a batch.

        Args:
            target, sampler, requests, random: see `speculate`.
            stopping: where rows end.
            prompts: B lists of token ids that stopping criteria and logits processors see before the output;
                None for those of the requests.

        Rows in lockstep, which get one token a round, and models without `Target.treats_alike` are decoded
        plainly.

        Raises:
            InputError: the rule's promise does not hold for these sampling settings, or settings of rows do
                not match this batch.
        """
        self.check(sampler)
        check_rows(sampler, len(requests))
        tried = [request.inputs for request in requests[: self.drafter.max_nodes > 1]]
        if tried and (stopping.lockstep is not None or not target.treats_alike(*tried)):
            return self._in_step(target).call(target, sampler, requests, stopping, random, prompts)
        stats = DecodingStats(self.name, self.exactness, self.keeps)
        ids = [request.prompt_tokens for request in requests] if prompts is None else prompts
        where = ids, stopping, stats, target.device
        canvas = VectorCanvas(*where, target.vector_size) if target.vector_size else Canvas(*where)
        return Call(self, target, sampler, requests, canvas, random)

    def _in_step(self, target: AnyTarget) -> Accelerator:
        """Return plain decoding, for rows that get one token a round.

        Raises:
            InputError: the target decides its places in another order.
        """
        if target.any_order or target.by_blocks:
            rule = "cannot be used with this model, which does not decode token by token"
            name = type(getattr(target, "model", target)).__name__
            raise InputError("logits_processor, stopping_criteria", name, rule)
        return pair("none", NoDrafter()).fit(target)

    def check(self, sampler: RowSettings) -> None:
        """Raise InputError if the rule's promise does not hold for these sampling settings."""
        if self.rule.greedy_only and not sampler.greedy:
            name = rule_name(self.rule)
            required = f"must be 0 with acceptance={name!r}; use sample_and_match at other temperatures"
            raise InputError("temperature", sampler.temperature, required)


@dataclass(frozen=True)
class Call:
    """One decoding call: the requests of a batch, and the output so far."""

    accelerator: Accelerator
    target: AnyTarget
    sampler: AnySampler
    requests: Sequence[Request]
    canvas: Canvas
    random: RandomStream

    @property
    def stats(self) -> DecodingStats:
        return self.canvas.stats

    def raise_errors(self, output: object = None) -> None:
        """Raise the NumericalError of the first row that has one; its `output` is that of all rows."""
        for error in self.canvas.errors:
            if error is not None:
                error.output = output
                raise error

    def rounds(self, is_watched: bool = False) -> Generator[Round, None, None]:
        """Decode, yielding every round; `stats.seconds` excludes the time between rounds.

        Args:
            is_watched: whether the caller reads the tensors of the rounds; see `speculate`.
        """
        accelerator = self.accelerator
        decoder = accelerator._paced if accelerator.is_paced(self.sampler) else accelerator.decoder
        batch = self.sampler, self.requests, self.canvas, self.random
        clock = perf_counter()
        for round in speculate(self.target, decoder, *batch, is_watched=is_watched):
            self.stats.seconds += perf_counter() - clock
            yield round
            clock = perf_counter()


def default_rule(drafter: Drafter) -> AnyRule:
    """Choose the exact rule that is sound for the drafter's kind of drafts."""
    sound: type[AnyRule] = next(RULES[name] for name in DEFAULT_RULES if is_sound(RULES[name], drafter))
    return sound()


def pair(name: str, drafter: Drafter) -> Accelerator:
    """Pair a drafter with the default rule for its kind of drafts."""
    return Accelerator(name, drafter, default_rule(drafter))
