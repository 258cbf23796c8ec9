"""The three roles of the speculative loop: target, drafter, acceptance rule."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Self, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from mmspec.core.cache import RaggedCache
from mmspec.core.canvas import Canvas, Emission, Stopping
from mmspec.core.distributions import AnyDistribution, Categorical, Distribution
from mmspec.core.draft import Draft, DraftKind, Tree
from mmspec.core.image_grid import ImageGrid, Layout
from mmspec.core.once import once
from mmspec.core.promise import Level, Promise
from mmspec.core.random_stream import RandomStream
from mmspec.core.rows import Rows
from mmspec.core.sampling import AnySampler, RowSettings
from mmspec.core.verdict import Measured, Path, Verdict
from mmspec.errors import InputError

SPACING = 8  # tokens of a prompt that tell how what follows is spaced: more than any character takes


@dataclass(frozen=True)
class Request:
    """One row to decode.

    Attributes:
        inputs: the target's keyword arguments for the prompt, with `input_ids` [1, L]; batch size 1,
            no padding.
        draft_inputs: the same for a draft model that reads the prompt in its own way; None if it
            reads `inputs`.
        negative_inputs: the unconditional prompt, needed when the guidance scale of any row is not 1.
        layout: of the output, for image tokens.
        continues: whether the output goes on with the text at the end of the prompt.
    """

    inputs: Mapping[str, Tensor]
    draft_inputs: Mapping[str, Tensor] | None = None
    negative_inputs: Mapping[str, Tensor] | None = None
    layout: Layout | None = None
    continues: bool = False

    @once
    def prompt_tokens(self) -> list[int]:
        """Token ids of the prompt on the host, read from the tensor once."""
        tokens: list[int] = self.inputs["input_ids"][0].tolist()
        return tokens

    @property
    def text_before(self) -> list[int]:
        """Last tokens of a prompt that the output goes on with, which space its first word; else none."""
        return self.prompt_tokens[-SPACING:] if self.continues else []


def list_prompts(requests: Sequence[Request], sampler: RowSettings) -> list[Mapping[str, Tensor]]:
    """Prompts of a batch for the target: B, under guidance of any row followed by B unconditional ones."""
    prompts = [request.inputs for request in requests]
    if sampler.is_guided:
        prompts += [request.negative_inputs for request in requests if request.negative_inputs is not None]
    return prompts


@dataclass(frozen=True)
class TargetOutput:
    """Result of a scoring forward.

    Attributes:
        logits: [B, n, V] as the model gave them; [2B, n, V] under guidance.
        taps: layer index -> [B, n, d] hidden state that enters that layer; -1 is the final, normed one.
        queried: [B, P, V] logits at the query nodes of a `ProbedTree`; none of other drafts.
    """

    logits: Tensor
    taps: dict[int, Tensor] = field(default_factory=dict)
    queried: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.float32, device="cpu"))


@dataclass(frozen=True)
class PromptOutput:
    """Result of a prefill.

    Attributes:
        logits: [B, 1, V] after each prompt; [2B, 1, V] under guidance; [.., 0, V] of a model that predicts
            nothing from a prompt alone.
        taps: layer index -> B hidden states [1, L_b, d], of prompts of their own length.
        cached_tokens: tokens of all prompts that were found in a prefix cache, and not read.
        cache: the target's, for drafters that read its keys and values; None if it keeps none.
        forwards: forwards that each row took; 0 where the prompts are read with every draft instead.
    """

    logits: Tensor
    taps: dict[int, list[Tensor]] = field(default_factory=dict)
    cached_tokens: int = 0
    forwards: int = 1
    cache: RaggedCache | None = None


class TargetState(Rows):
    """State that a target keeps of a batch between rounds: its KV cache and more; nothing by default."""

    def tighten(self, emitted: Sequence[int]) -> None:
        """Tell the state how many tokens each of the B requests has emitted at most, as the host knows it."""
        return None

    def nbytes(self) -> int:
        """Bytes of cached state."""
        return 0

    def close(self) -> None:
        """Leave the model as it was before the prefill."""
        return None


State = TypeVar("State", bound=TargetState)
D = TypeVar("D", bound=Draft)
#: The kind of draft that target, drafter and rule share, which a decoder checks when it is built.
AnyDraft: TypeAlias = Any
#: The kind of verdict that the rule gives on such drafts.
AnyVerdict: TypeAlias = Any


class Target(ABC, Generic[State]):
    """Model whose distribution is promised. Holds no state of a request; `prefill` returns it.

    Attributes:
        vocabulary: V.
        device: of its inputs.
        grid: the image that it draws when nothing else is asked for; None if it draws none.
        codebook: [K, d] code vectors of the image's cells; None if it has none.
        distribution: the kind of distribution that it gives.
        vector_size: d of its tokens, if they are vectors; 0 if they are ids.
        any_order: whether each forward predicts any places of the output, given any others.
        by_blocks: whether it has no next token: places of a block are decided where they stand.
        config: of the model, where heads can read its hidden states, embeddings and output matrix; or None.
    """

    vocabulary: int
    device: torch.device
    grid: ImageGrid | None = None
    codebook: Tensor | None = None
    config: Any = None
    distribution: type[Distribution] = Categorical
    vector_size: int = 0
    any_order: bool = False
    by_blocks: bool = False

    def unconditional(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        """The prompt that guidance leads away from where the caller names none; None for an empty text."""
        return None

    def layout_of(self, grid: ImageGrid) -> Layout:
        """Layout of the output that an image of that grid is drawn by: the grid alone, or more before it."""
        return grid

    def plain_decoding(self) -> tuple[Drafter, AnyRule | None] | None:
        """Return what decodes plainly where the model has no next token; None where it has one.

        Returns:
            The drafter, fitted, and the rule that decides what it proposes; None for any rule.
        """
        return None

    def treats_alike(self, prompt: Mapping[str, Tensor]) -> bool:
        """Whether several tokens of a forward get the logits that they get one after another.

        Args:
            prompt: one of those to decode, to try it on.
        """
        return True

    def computing(self, *modules: nn.Module) -> Callable[[], AbstractContextManager[None]]:
        """Begin a call, whose forwards run inside of what is returned, entered for a while again and again.

        Args:
            modules: those of the drafter, which run as the target's does.
        """
        return nullcontext

    @abstractmethod
    def prefill(
        self, prompts: Sequence[Mapping[str, Tensor]], capacity: int, taps: Sequence[int] = ()
    ) -> tuple[State, PromptOutput]:
        """Prefill the prompts.

        Args:
            prompts: keyword arguments of the model, one row each; see `list_prompts`.
            capacity: tokens per row to make room for.
            taps: layers whose hidden states are wanted, now and of every draft until the state is closed.

        Returns:
            The state, and the logits and taps after each prompt.
        """

    @abstractmethod
    def score(self, state: State, draft: AnyDraft) -> TargetOutput:
        """Score every node of the draft in one forward; nothing is committed to the cache."""

    @abstractmethod
    def commit(self, state: State, draft: AnyDraft, verdict: AnyVerdict, active: Tensor) -> None:
        """Keep what was decided in the rows that are active [B], and drop the others' keys."""


#: A target whose kind of state does not matter.
AnyTarget: TypeAlias = Target[Any]


class Rule(ABC, Generic[D]):
    """Decides what a round commits: an `AcceptanceRule` of trees, or a policy of places.

    Attributes:
        exactness: level of the promise, whatever the arguments.
        bound: for levels other than exact, what the rule keeps to, in words: mostly a total variation (TV)
            per token.
        greedy_only: True if the promise holds at temperature 0 alone.
        keeps_greedy: whether the output at temperature 0 is greedy decoding's, whatever is drafted.
        is_plain_draw: whether what it draws is what plain decoding draws with the same noise.
        distribution: base of the distributions that it reads.
        taps: layers of the target whose hidden states `decide` reads.
    """

    exactness: ClassVar[Level] = Level.EXACT
    bound: ClassVar[str | None] = None
    greedy_only: ClassVar[bool] = False
    keeps_greedy: bool = True
    is_plain_draw: ClassVar[bool] = False
    distribution: ClassVar[type[Distribution]] = Categorical
    taps: tuple[int, ...] = ()

    @property
    def promise(self) -> Promise:
        """Promise with these arguments."""
        return Promise(self.exactness)

    def fit(self, target: AnyTarget) -> Self:
        """Return this rule fitted to a target; rules that use the target's codebook take it here.

        Raises:
            InputError: the target lacks what the rule needs.
        """
        return self

    @abstractmethod
    def decide(
        self, draft: D, output: TargetOutput, scores: AnyDistribution, random: RandomStream, first: Tensor
    ) -> tuple[Verdict, Measured]:
        """Decide what a round commits.

        Args:
            draft: what was proposed.
            output: of the target: logits, and hidden states at the taps.
            scores: the target's distribution after every node of every lane.
            random: random numbers of the T lanes.
            first: [T] output index that depth 1 of each lane competes for.
        """


#: A rule whose kind of draft does not matter.
AnyRule: TypeAlias = Rule[Any]


class AcceptanceRule(Rule[Draft]):
    """Decides which candidates of a tree are accepted; of a block, of each of its lanes.

    Attributes:
        sound_for: the kinds of draft for which the promise holds.
        chains_only: True if the rule judges one candidate per place.
        judges_whole: True if what is refused beyond an accepted path decided about it: then neither noise nor
            candidates may come again, as of `Drafter.draws_anew`.
        measures: what `measure` gives: "tv" or "drift".
    """

    sound_for: ClassVar[frozenset[DraftKind]]
    chains_only: ClassVar[bool] = False
    judges_whole: ClassVar[bool] = False
    measures: ClassVar[str] = "tv"

    def decide(
        self, draft: Draft, output: TargetOutput, scores: AnyDistribution, random: RandomStream, first: Tensor
    ) -> tuple[Verdict, Measured]:
        path, values = self.measure(draft.lanes, scores, random, first)
        measured = Measured.along(path, values, self.measures, len(draft.valid))
        return draft.verdict(path, scores.is_finite()), measured

    def verify(self, draft: Tree, scores: AnyDistribution, random: RandomStream, emitted: Tensor) -> Path:
        """Verify a tree: decide which nodes are accepted, and choose the token after them.

        Rules that read more of a round than this have a `decide` of their own, and no `verify`.

        Args:
            draft: the candidates.
            scores, random: as of `decide`.
            emitted: [B] tokens emitted so far, root included: the output index that depth 1 competes for.
        """
        raise NotImplementedError(f"{type(self).__name__} decides by the output of the target")

    def measure(
        self, draft: Tree, scores: AnyDistribution, random: RandomStream, emitted: Tensor
    ) -> tuple[Path, Tensor]:
        """Verify a tree, and measure what that changes.

        Returns:
            The path, and [B, max_depth] at the place of each depth the total variation between output and
            target, or the root mean square of candidate minus value; NaN where it was not measured. [B, 0]
            for exact rules.
        """
        path = self.verify(draft, scores, random, emitted)
        return path, path.accepted.new_empty(len(path.accepted), 0)


class DraftSession(Rows, ABC):
    """State of a drafter for one batch. Rows enter and leave it after a round, if at all.

    Attributes:
        passes: forwards so far of a model of the drafter's own, its prefill not counted.
        likelihoods: [B, n] log-probability that the path to each node of the last draft is right, as far as
            the drafter knows; -inf where it is not valid. Of drafters that have it (`rates_paths`).
    """

    passes: int = 0
    likelihoods: Tensor

    def part(self, rows: Sequence[int], count: int | None = None) -> Self:
        self.prepare()
        return super().part(rows, count)

    def joined(self, other: Self, counts: tuple[int, int]) -> Self:
        self.prepare()
        other.prepare()
        return super().joined(other, counts)

    def attach(self, state: Any) -> None:
        """Give the session the target's state, before the first round and after rows moved. Optional."""
        return None

    def resize(self, choice: int) -> None:
        """Set the size of the next drafts, by its place in the drafter's `sizes`."""
        raise InputError("choice", choice, f"none: drafts of {type(self).__name__} have one size")

    def prepare(self) -> None:
        """Read the prompts, if that was put off until the first draft, which may never come. Optional."""
        return None

    def limit(self, nodes: int, least: Callable[[int], Sequence[float]]) -> None:
        """Set how much is worth drafting in the next round. Optional: a hint, to save time.

        Args:
            nodes: the most candidates.
            least: probabilities of the likeliest path to each level but the last, for a draft of that depth,
                below which no other level is drafted.
        """
        return None

    def open(self, canvas: Canvas) -> Draft:
        """Prepare a canvas for its first token; return the draft that the prompts' own logits are of."""
        return Tree.chain(canvas.root[:, None], DraftKind.POINT)

    @abstractmethod
    def propose(self, canvas: Canvas) -> Draft:
        """Propose the candidates of one round, given the output so far."""

    def observe(self, draft: Any, output: TargetOutput, scores: AnyDistribution, verdict: Any) -> None:
        """Update the session after verification, also of drafts that are not its own. Optional."""
        return None


class Drafter(ABC):
    """Proposes candidate tokens. Holds no state of a request; `start` returns it.

    Attributes:
        kind: kind of its drafts, which the acceptance rule must be sound for.
        max_nodes: nodes of its largest draft, root included.
        taps: layers of the target whose hidden states it reads.
        branches: True if its drafts have siblings; rules that judge one candidate per place refuse those.
        exactness: LOSSY or APPROXIMATE if nodes see less than the model would, so that no rule can be exact.
        keeps: the distribution that exact rules keep, in words, where models of the kind have more than one;
            "" for the next token's.
        judged_by: base of the rules that can decide about its drafts.
        distribution: base of the distributions that its candidates compete for: of ids unless it is said.
        decides_places: whether it drafts blocks of places for targets that decide them together.
        runs_ahead: whether sessions propose from what is on the device, so that the host may read each round
            when the next is on its way, and one more than it needs.
        rates_paths: whether sessions say how likely each candidate is (`likelihoods`), so that a draft, of
            which nothing was drawn, can be pruned.
        shares_tree: whether candidates of another drafter may stand beside those of its sessions.
        rows_move: whether rows may enter and leave its sessions between rounds (`Rows`).
        draws_anew: whether candidates are drawn by noise of their round alone, and none outlives it.
        is_plain: whether it proposes nothing, so that the target's plain decoding may take its place.
    """

    kind: DraftKind
    max_nodes: int
    taps: tuple[int, ...] = ()
    branches: bool = False
    exactness: Level = Level.EXACT
    keeps: str = ""
    judged_by: ClassVar[type] = AcceptanceRule
    distribution: ClassVar[type[Distribution]] = Categorical
    decides_places: ClassVar[bool] = False
    runs_ahead: bool = False
    rates_paths: bool = False
    shares_tree: ClassVar[bool] = False
    rows_move: bool = False
    draws_anew: bool = False
    is_plain: bool = False

    def admit(self, requests: Sequence[Request], sampler: AnySampler, stopping: Stopping) -> None:
        """Raise InputError for a batch that this drafter cannot decode, before anything of it is read."""
        return None

    @abstractmethod
    def start(
        self, requests: Sequence[Request], prefill: PromptOutput, sampler: AnySampler, random: RandomStream
    ) -> DraftSession:
        """Start a session for a batch that the target has just prefilled."""

    @property
    def modules(self) -> Sequence[nn.Module]:
        """The modules of its own that it runs; see `Target.computing`."""
        return ()

    @property
    def reader(self) -> Any | None:
        """The target behind which a draft model stands that reads prompts by itself; None if none does."""
        return None

    def to(self, *args: object, **kwargs: object) -> None:
        """Move the drafter's own model, as `torch.nn.Module.to` does; most have none."""
        return None

    def compile(self) -> None:
        """Compile forwards of the drafter's own model, each when it is first met; most have none."""
        return None

    @property
    def sizes(self) -> tuple[int, ...]:
        """Depths of the drafts that sessions can be set to between rounds, the largest first; () if fixed."""
        return ()

    def probes_of(self, candidates: int) -> int:
        """Probes that a draft of so many candidates carries, which make the next one; most have none."""
        return 0

    def stopping_below(self, probability: float) -> Drafter:
        """Return this drafter with an early stop, where it gives every path less than that probability.

        It decides before it draws, so that no acceptance rule is biased.

        Raises:
            InputError: the drafter has no such probability.
        """
        raise InputError("length", "confidence", f"'fixed': {type(self).__name__} has no confidence")

    def check(self, target: AnyTarget) -> None:
        """Raise InputError if this drafter does not fit the target. The default fits any."""
        return None

    def fit(self, target: AnyTarget) -> Drafter:
        """Return this drafter fitted to a target; drafters that use the target's weights take them here.

        Raises:
            InputError: it does not fit the target.
        """
        self.check(target)
        return self


@dataclass(frozen=True)
class Round:
    """One round, as `speculate` yields it: tensors on the device, valid until the next round begins.

    Attributes:
        draft: what was proposed; the root alone for the prefill.
        first: [T] output index that depth 1 of each lane competed for.
        scores: the target's distribution after each node.
        verdict: what was decided.
        emission: the tokens that were completed, on the host.
    """

    draft: Draft
    first: Tensor
    scores: AnyDistribution
    verdict: Verdict
    emission: Emission
