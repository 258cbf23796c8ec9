"""The three roles of the speculative loop: target, drafter, acceptance rule."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor

from mmspec.decoding.draft import Draft, DraftKind
from mmspec.decoding.image_grid import ImageGrid
from mmspec.decoding.random_stream import RandomStream
from mmspec.decoding.sampling import Sampler, Scores, is_integer
from mmspec.decoding.verdict import Verdict
from mmspec.errors import InputError

MAX_DRAFT_TOKENS = 512


@dataclass(frozen=True)
class Request:
    """One row to decode.

    Attributes:
        inputs: the target's keyword arguments for the prompt, with `input_ids` [1, L]; batch size 1,
            no padding.
        draft_inputs: the same for a draft model that reads the prompt in its own way; None if it
            reads `inputs`.
        negative_inputs: the unconditional prompt, needed when the guidance scale is not 1.
        grid: the layout of the image that the output is, for image tokens.
    """

    inputs: Mapping[str, Tensor]
    draft_inputs: Mapping[str, Tensor] | None = None
    negative_inputs: Mapping[str, Tensor] | None = None
    grid: ImageGrid | None = None

    @property
    def prompt_tokens(self) -> list[int]:
        return self.inputs["input_ids"][0].tolist()


def list_prompts(requests: Sequence[Request], sampler: Sampler) -> list[Mapping[str, Tensor]]:
    """What a target reads: B prompts, under guidance followed by as many unconditional ones."""
    prompts = [request.inputs for request in requests]
    if sampler.guidance_scale != 1.0:
        prompts += [request.negative_inputs for request in requests if request.negative_inputs is not None]
    return prompts


@dataclass(frozen=True)
class TargetOutput:
    """One forward of the target.

    Attributes:
        logits: [B, n, V] as the model gave them; [2B, n, V] under guidance.
        taps: layer index -> [B, n, d] hidden state that enters that layer; -1 is the final, normed one.
    """

    logits: Tensor
    taps: dict[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class PromptOutput:
    """What reading the prompts gave.

    Attributes:
        logits: [B, 1, V] after each prompt; [2B, 1, V] under guidance.
        taps: layer index -> B hidden states [1, L_b, d], of prompts of their own length.
        cached_tokens: how many tokens of all prompts were known from earlier ones, and not read.
    """

    logits: Tensor
    taps: dict[int, list[Tensor]] = field(default_factory=dict)
    cached_tokens: int = 0


class TargetState(Protocol):
    """What a target keeps of a batch between rounds."""

    def tighten(self, emitted: Sequence[int]) -> None:
        """Tell the state how many tokens each request has emitted, once the host has read it."""

    def nbytes(self) -> int:
        """Bytes of cached state."""


State = TypeVar("State", bound=TargetState)


class Target(Protocol[State]):
    """A model whose distribution is promised. Holds no request: that is the state's job."""

    vocabulary: int
    device: torch.device

    def prefill(
        self, prompts: Sequence[Mapping[str, Tensor]], capacity: int, taps: Sequence[int] = ()
    ) -> tuple[State, PromptOutput]:
        """Read the prompts. Returns the state and the logits [B, 1, V] after each prompt."""
        ...

    def score(self, state: State, draft: Draft, taps: Sequence[int] = ()) -> TargetOutput:
        """Score every node of the draft in one forward; caches nothing for good."""
        ...

    def commit(self, state: State, draft: Draft, verdict: Verdict, active: Tensor) -> None:
        """Keep the accepted nodes of the rows that are active [B]."""
        ...


class DraftSession(ABC):
    """A drafter at work on one batch.

    Attributes:
        passes: forwards of a model of its own so far, those over the prompts not counted.
    """

    passes: int = 0

    def resize(self, size: Any) -> None:
        """Draft as much as that from now on.

        Args:
            size: one of the drafter's `sizes`.
        """
        raise NotImplementedError(f"drafts of {type(self).__name__} have one size")

    @abstractmethod
    def propose(self, root: Tensor, emitted: Tensor, history: Sequence[Sequence[int]]) -> Draft:
        """Propose candidates.

        Args:
            root: [B] newest emitted token of each row.
            emitted: [B] tokens emitted so far, root included.
            history: B lists of committed token ids, prompt and root included.
        """

    def observe(self, draft: Draft, output: TargetOutput, scores: Scores, verdict: Verdict) -> None:
        """Learn what the target said and what was accepted, of drafts that are not its own too. Optional."""
        return None


class Drafter(ABC):
    """Who proposes. Holds no request: `start` gives a session.

    Attributes:
        kind: the kind of its drafts, which the acceptance rule must be sound for.
        max_nodes: the largest draft it makes, root included.
        taps: hidden states of the target that it wants to see.
        branches: True if its drafts have siblings; rules that judge one candidate per place refuse those.
    """

    kind: DraftKind
    max_nodes: int
    taps: tuple[int, ...] = ()
    branches: bool = False

    @abstractmethod
    def start(
        self, requests: Sequence[Request], prefill: PromptOutput, sampler: Sampler, random: RandomStream
    ) -> DraftSession:
        """Begin to draft for a batch whose prompts the target has just read."""

    @property
    def sizes(self) -> tuple[Any, ...]:
        """What its sessions can be resized to between rounds, the usual size first; none if it is fixed."""
        return ()

    def stopping_below(self, probability: float) -> Drafter:
        """This drafter, going no deeper where by its own account every path is less likely than that.

        It decides before it draws, so that no acceptance rule is biased.

        Raises:
            InputError: it gives no account of that.
        """
        raise InputError("length", "confidence", f"'fixed': {type(self).__name__} is sure of nothing")

    def check(self, target: Target[Any]) -> None:
        """Raise an InputError if this drafter does not fit the target. The default fits any."""
        return None

    def fit(self, target: Target[Any]) -> Drafter:
        """This drafter for that target; drafters that use the target's own weights take them here.

        Raises:
            InputError: it does not fit the target.
        """
        self.check(target)
        return self


def check_draft_tokens(value: int) -> int:
    """Raise InputError unless `value` is an integer from 1 to 512."""
    if not is_integer(value) or not 1 <= value <= MAX_DRAFT_TOKENS:
        raise InputError("num_draft_tokens", value, f"an integer from 1 to {MAX_DRAFT_TOKENS}")
    return value


class AcceptanceRule(ABC):
    """Decides how much of a draft is committed.

    Attributes:
        sound_for: the kinds of draft for which the claim in `exactness` holds.
        exactness: "exact" if the output distribution is the target's, "bounded" if its distance to it is; or
            "lossy".
        bound: for other rules, the stated bound on the total variation per token, in words.
        greedy_only: True if the claim holds at temperature 0 alone.
        chains_only: True if the rule judges one candidate per place.
    """

    sound_for: ClassVar[frozenset[DraftKind]]
    exactness: ClassVar[str] = "exact"
    bound: ClassVar[str | None] = None
    greedy_only: ClassVar[bool] = False
    chains_only: ClassVar[bool] = False

    @property
    def promise(self) -> str:
        """What this rule with these arguments promises: "exact", "tv<=x" (per token) or "lossy"."""
        return self.exactness

    def fit(self, target: Target[Any]) -> AcceptanceRule:
        """This rule for that target; rules that look at the target's codebook take it here.

        Raises:
            InputError: the target lacks what the rule needs.
        """
        return self

    @abstractmethod
    def verify(self, draft: Draft, scores: Scores, random: RandomStream, emitted: Tensor) -> Verdict:
        """Decide.

        Args:
            draft: the candidates.
            scores: the target's warped scores of every node.
            random: the rows' random numbers.
            emitted: [B] tokens emitted so far, root included: the output index that depth 1 competes for.
        """
