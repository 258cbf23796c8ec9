"""The interfaces of the speculative loop: target, drafter and acceptance rule."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Self, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from mmspec.core.cache import RaggedCache
from mmspec.core.canvas import Canvas, Emission, Stopping
from mmspec.core.chunked_prefill import ChunkedPrefill, finish
from mmspec.core.distributions import AnyDistribution, Categorical, Distribution
from mmspec.core.draft import Draft, DraftKind, Tree
from mmspec.core.image_grid import ImageGrid, Layout
from mmspec.core.once import once
from mmspec.core.promise import Level, Promise
from mmspec.core.random_stream import RandomStream
from mmspec.core.round_graphs import RoundGraphs
from mmspec.core.rows import Rows, named
from mmspec.core.sampling import AnySampler, RowSettings
from mmspec.core.verdict import Measured, Path, Verdict
from mmspec.errors import InputError
from mmspec.open_types import Keywords

SPACING = 8  # prompt tokens that decide the spacing of the continuation: more than any character takes


@dataclass(frozen=True)
class Request:
    """One row to decode.

    Attributes:
        inputs: the target's keyword arguments for the prompt, with `input_ids` [1, L]; batch size 1, no
            padding.
        draft_inputs: the same for a draft model with its own prompt format; None if it reads `inputs`.
        negative_inputs: the unconditional prompt, needed when the guidance scale of any row is not 1.
        layout: of the output, for image tokens.
        continues: whether the output continues the text at the end of the prompt.
    """

    inputs: Mapping[str, Tensor]
    draft_inputs: Mapping[str, Tensor] | None = None
    negative_inputs: Mapping[str, Tensor] | None = None
    layout: Layout | None = None
    continues: bool = False

    @once
    def prompt_tokens(self) -> list[int]:
        """Token ids of the prompt on the host, copied once."""
        tokens: list[int] = self.inputs["input_ids"][0].tolist()
        return tokens

    @property
    def text_before(self) -> list[int]:
        """Last tokens of a prompt that the output continues, which decide the spacing of its first word."""
        return self.prompt_tokens[-SPACING:] if self.continues else []


def list_prompts(requests: Sequence[Request], sampler: RowSettings) -> list[Mapping[str, Tensor]]:
    """Prompts of a batch for the target: B, followed by B unconditional ones under guidance."""
    prompts = [request.inputs for request in requests]
    if sampler.is_guided:
        prompts += [request.negative_inputs for request in requests if request.negative_inputs is not None]
    return prompts


@dataclass(frozen=True)
class TargetOutput:
    """Result of a scoring forward pass.

    Attributes:
        logits: [B, n, V] of the model, unchanged; [2B, n, V] under guidance.
        taps: layer index -> [B, n, d] hidden state that enters that layer; -1 is the final, normalised one.
        queried: [B, P, V] logits at the query nodes of the draft; empty without any.
    """

    logits: Tensor
    taps: dict[int, Tensor] = field(default_factory=dict)
    queried: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.float32, device="cpu"))


@dataclass(frozen=True)
class PromptOutput(Rows):
    """Result of a prefill.

    Attributes:
        logits: [B, 1, V] after each prompt; [2B, 1, V] under guidance; [.., 0, V] for a model that predicts
            nothing from a prompt alone.
        taps: layer index -> B hidden states [1, L_b, d], one per prompt.
        cached: number of tokens of each prompt that the prefix cache supplied; empty if none has any.
        forwards: forward passes of each row, the chunks of a prompt counted as one; 0 if the prompts are
            processed with every draft instead.
        cache: the target's KV cache, for drafters that read it; None if the target has none, or after rows
            have moved.
    """

    row_fields = named("logits", "taps", "cached")

    logits: Tensor
    taps: dict[int, list[Tensor]] = field(default_factory=dict)
    cached: Sequence[int] = ()
    forwards: int = 1
    cache: RaggedCache | None = None

    @property
    def cached_tokens(self) -> int:
        """Number of tokens of all prompts that the prefix cache supplied."""
        return sum(self.cached)

    def _with_rows(self, changed: Keywords) -> Self:
        return super()._with_rows({**changed, "cache": None})


class TargetState(Rows):
    """State of a target for a batch between rounds: its KV cache, for example."""

    def tighten(self, emitted: Sequence[int]) -> None:
        """Set an upper bound, known to the host, of the tokens that each of the B requests has emitted."""
        return None

    def nbytes(self) -> int:
        """Size of the cached state in bytes."""
        return 0

    def close(self) -> None:
        """Restore the model to its state before the prefill."""
        return None


State = TypeVar("State", bound=TargetState)
D = TypeVar("D", bound=Draft)
#: The kind of draft that target, drafter and rule share; a decoder checks it when it is built.
AnyDraft: TypeAlias = Any
#: The kind of verdict of the rule for such drafts.
AnyVerdict: TypeAlias = Any


class Target(ABC, Generic[State]):
    """Model that scores drafts and defines the output distribution. `prefill` returns the state of requests.

    Attributes:
        vocabulary: V.
        device: device of the inputs.
        grid: default grid of the images that it generates; None if it generates none.
        codebook: [K, d] code vectors of image tokens; None if there is none.
        distribution: class of its output distributions.
        vector_size: d of its tokens, if they are vectors; 0 if they are ids.
        any_order: whether each forward pass can predict any places of the output, given any others.
        by_blocks: whether it has no next-token prediction and decides the places of a block in place.
        config: the model's config, if heads can read its hidden states, embeddings and output matrix; or
            None.
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
        """Default unconditional prompt for guidance; None for an empty text."""
        return None

    def layout_of(self, grid: ImageGrid) -> Layout:
        """Layout of the output for an image of that grid: the grid alone, or with tokens before it."""
        return grid

    def plain_decoding(self) -> tuple[Drafter, AnyRule | None] | None:
        """Return the plain decoding of a model without next-token prediction; None for other models.

        Returns:
            The fitted drafter, and the rule that decides its drafts; None for any rule.
        """
        return None

    def treats_alike(self, prompt: Mapping[str, Tensor]) -> bool:
        """Whether scoring several tokens in one forward pass gives the same logits as one token at a time.

        Args:
            prompt: one of the prompts to decode, for the test.
        """
        return True

    def computing(self, *modules: nn.Module) -> Callable[[], AbstractContextManager[None]]:
        """Begin a call; return a factory of the contexts, entered one after another, in which its models run.

        Args:
            modules: the drafter's modules, which run in the same mode as the target.
        """
        return nullcontext

    @abstractmethod
    def prefill(
        self, prompts: Sequence[Mapping[str, Tensor]], capacity: int, taps: Sequence[int] = ()
    ) -> tuple[State, PromptOutput]:
        """Prefill the prompts.

        Args:
            prompts: keyword arguments of the model, one row each; see `list_prompts`.
            capacity: number of tokens per row to allocate.
            taps: layers whose hidden states to return, for the prompts and for every draft until the state is
                closed.

        Returns:
            The state, and the logits and taps after each prompt.
        """

    def chunked_prefill(
        self,
        prompts: Sequence[Mapping[str, Tensor]],
        capacity: int,
        taps: Sequence[int] = (),
        is_copied: bool = False,
    ) -> ChunkedPrefill[tuple[State, PromptOutput]]:
        """Prefill prompts, with a pause before each forward pass, in which other batches can be decoded.

        The other arguments and the result are those of `prefill`. By default there is one pause, for all
        prompts.

        Args:
            is_copied: whether the rows are copied to another batch, so that no graph reads their cache.
        """
        yield sum(prompt["input_ids"].shape[1] for prompt in prompts)
        return self.prefill(prompts, capacity, taps)

    @abstractmethod
    def score(self, state: State, draft: AnyDraft) -> TargetOutput:
        """Score every node of the draft in one forward pass, without committing anything to the cache."""

    @property
    def graphs(self) -> RoundGraphs | None:
        """CUDA graphs of whole rounds; None to launch each operation."""
        return None

    def encode_ahead(self, prompt: Mapping[str, Tensor]) -> None:
        """Encode the images of a prompt that is prefilled later, in any thread. Optional."""
        return None

    @property
    def reads_together(self) -> bool:
        """Whether `chunked_prefill` reads several short prompts in one forward pass."""
        return False

    @property
    def has_fixed_rows(self) -> bool:
        """Whether batches keep their number of rows, because its forward passes are compiled for it."""
        return False

    @abstractmethod
    def commit(self, state: State, draft: AnyDraft, verdict: AnyVerdict, active: Tensor) -> None:
        """Keep the keys and values of decided tokens in the active rows [B], and drop the others."""

    def remember(self, state: State, outputs: Sequence[Any], rows: Sequence[int]) -> None:
        """Keep data of complete rows for later prompts that continue them. Optional.

        Args:
            state: of a batch, between rounds.
            outputs: B lists of output tokens.
            rows: of the batch, whose outputs are complete.
        """
        return None


#: A target with any kind of state.
AnyTarget: TypeAlias = Target[Any]


class Rule(ABC, Generic[D]):
    """Decides which tokens a round commits: an `AcceptanceRule` for trees, or a policy for places.

    Attributes:
        exactness: level of the promise for any arguments.
        bound: for levels other than exact, the guarantee in words, mostly a total variation (TV) per token.
        greedy_only: True if the promise holds at temperature 0 alone.
        keeps_greedy: whether the output at temperature 0 equals greedy decoding's for any draft.
        is_plain_draw: whether it draws the same tokens as plain decoding with the same noise.
        distribution: base class of the distributions that it reads.
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
        """Return this rule fitted to a target. Rules that use the target's codebook get it here.

        Raises:
            InputError: the target does not fit the rule.
        """
        return self

    @abstractmethod
    def decide(
        self, draft: D, output: TargetOutput, scores: AnyDistribution, random: RandomStream, first: Tensor
    ) -> tuple[Verdict, Measured]:
        """Decide which tokens a round commits.

        Args:
            draft: the draft of the round.
            output: of the target: logits, and hidden states at the taps.
            scores: the target's distribution after every node of every lane.
            random: random numbers of the T lanes.
            first: [T] output index of depth 1 of each lane.
        """


#: A rule for any kind of draft.
AnyRule: TypeAlias = Rule[Any]


class AcceptanceRule(Rule[Draft]):
    """Decides which candidates are accepted, in a tree or in each lane of a block.

    Attributes:
        sound_for: the kinds of draft for which the promise holds.
        chains_only: True if the rule can verify only one candidate per place.
        judges_whole: True if the decision about a path depends on rejected candidates beyond it. Neither
            noise nor candidates may then be used again; see `Drafter.draws_anew`.
        measures: quantity that `measure` returns: "tv" or "drift".
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

        Rules that need more than these arguments override `decide` instead.

        Args:
            draft: the candidates.
            scores, random: see `decide`.
            emitted: [B] tokens emitted so far, root included: the output index of depth 1.
        """
        raise NotImplementedError(f"{type(self).__name__} overrides decide() and has no verify()")

    def measure(
        self, draft: Tree, scores: AnyDistribution, random: RandomStream, emitted: Tensor
    ) -> tuple[Path, Tensor]:
        """Verify a tree, and measure the change of the output that the rule causes.

        Returns:
            The path, and [B, max_depth] for each depth the total variation between output and target, or the
            root mean square of candidate minus value; NaN where it was not measured. [B, 0] for exact rules.
        """
        path = self.verify(draft, scores, random, emitted)
        return path, path.accepted.new_empty(len(path.accepted), 0)


class DraftSession(Rows, ABC):
    """State of a drafter for one batch. Rows can enter and leave it between rounds if `Drafter.rows_move`.

    Attributes:
        passes: number of forward passes of the drafter's own model, without its prefill.
        likelihoods: [B, n] the drafter's log-probability that the path to each node of the last draft will be
            accepted; -inf for invalid nodes. Only for drafters with `rates_paths`.
        room: most committed tokens that it keeps until it reads them, in tensors of fixed shapes; 0 for any
            number of them, or if it reads none.
    """

    counters = frozenset({"passes"})
    scratch = frozenset({"likelihoods"})

    passes: int = 0
    room: int = 0
    likelihoods: Tensor

    def part(self, rows: Sequence[int], count: int | None = None) -> Self:
        self.prepare()
        return super().part(rows, count)

    def joined(self, other: Self, counts: tuple[int, int]) -> Self:
        self.prepare()
        other.prepare()
        return super().joined(other, counts)

    def overwritten(self, slots: Sequence[int], other: Self, counts: tuple[int, int]) -> Self:
        self.prepare()
        other.prepare()
        return super().overwritten(slots, other, counts)

    def attach(self, state: Any) -> None:
        """Set the target's state, before the first round and after rows moved. Optional."""
        return None

    def tighten(self, emitted: Sequence[int]) -> None:
        """Set upper bounds of the emitted tokens; see `TargetState.tighten`. For sessions with a cache."""
        return None

    def resize(self, choice: int) -> None:
        """Set the size of the next drafts, as an index into the drafter's `sizes`."""
        raise InputError("choice", choice, f"is not supported: drafts of {type(self).__name__} have one size")

    def begin_round(self, canvas: Canvas) -> None:
        """Decide on the host what the next round depends on, before it is computed or replayed. Optional."""
        return None

    def end_round(self, draft: Any, is_usual: bool) -> None:
        """Note a submitted round, before its report is sent to the host. Optional.

        Args:
            draft: of the round.
            is_usual: False if the round took longer than later ones of its kind, because of a capture.
        """
        return None

    def learn(self, canvas: Canvas, emission: Emission) -> None:
        """Learn from the oldest round that the host had not read, before rows change. Optional."""
        return None

    def prepare(self) -> None:
        """Run a prefill that was deferred until the first draft."""
        finish(self.deferred_prefill())

    def deferred_prefill(self) -> ChunkedPrefill[None]:
        """The prefill that `prepare` runs, with a pause before each forward pass. Optional."""
        yield from ()

    def use_few_sizes(self, room: int = 0) -> None:
        """Prepare the state for graphs, in which tensors keep their shapes from round to round.

        Args:
            room: sets the attribute, for sessions that are to read only some of their rounds; 0 if they read
                all of them.
        """
        self.prepare()

    def limit(self, nodes: int, least: Callable[[int], Sequence[float]]) -> None:
        """Limit the size of the next draft. Optional: a hint that saves time.

        Args:
            nodes: largest number of candidates.
            least: for a draft of a given depth, the probabilities of the most likely path to each level but
                the last, below which no further level is drafted.
        """
        return None

    def open(self, canvas: Canvas) -> Draft:
        """Prepare a canvas for its first token; return the draft that the prefill's logits belong to."""
        return Tree.chain(canvas.root[:, None], DraftKind.POINT)

    @abstractmethod
    def propose(self, canvas: Canvas) -> Draft:
        """Propose the draft of one round, given the output so far."""

    def observe(self, draft: Any, output: TargetOutput, scores: AnyDistribution, verdict: Any) -> None:
        """Update the session after verification, including that of another drafter's draft. Optional."""
        return None


class Drafter(ABC):
    """Proposes drafts. `start` returns the state of requests.

    Attributes:
        kind: kind of its drafts, for which the acceptance rule must be sound.
        max_nodes: number of nodes of its largest draft, root included.
        taps: layers of the target whose hidden states it reads.
        branches: True if its drafts have siblings, which some rules cannot verify.
        exactness: LOSSY or APPROXIMATE if nodes attend to less than the model would, so that no rule is
            exact.
        keeps: the distribution that exact rules keep, in words, for models with more than one; "" for
            next-token prediction.
        judged_by: base class of the rules that can verify its drafts.
        distribution: base class of its candidates' distributions; over ids by default.
        decides_places: whether it drafts blocks of places for targets that decide them together.
        runs_ahead: whether sessions propose from data on the device alone, so that the next round can start
            before the host reads the last one. One extra round is run.
        rates_paths: whether sessions estimate the probability of each candidate (`likelihoods`), so that a
            deterministic draft can be pruned.
        shares_tree: whether another drafter's candidates can be added to the trees of its sessions.
        rows_move: whether rows may enter and leave its sessions between rounds (`Rows`).
        draws_anew: whether candidates depend only on the noise of their round, and are used in one round
            alone.
        is_plain: whether it proposes nothing, so that the target's plain decoding can replace it.
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
    shares_tree: bool = False
    rows_move: bool = False
    draws_anew: bool = False
    is_plain: bool = False

    def admit(self, requests: Sequence[Request], sampler: AnySampler, stopping: Stopping) -> None:
        """Raise InputError for a batch that this drafter cannot decode, before its prefill."""
        return None

    @abstractmethod
    def start(
        self, requests: Sequence[Request], prefill: PromptOutput, sampler: AnySampler, random: RandomStream
    ) -> DraftSession:
        """Start a session for a batch that the target has just prefilled."""

    @property
    def reference(self) -> str:
        """Accelerator, as on the command line, whose outputs have the distribution that exact rules keep."""
        return "none"

    @property
    def modules(self) -> Sequence[nn.Module]:
        """The drafter's own modules; see `Target.computing`."""
        return ()

    @property
    def reader(self) -> Any | None:
        """The draft model as a target, if it processes prompts by itself; else None."""
        return None

    def to(self, *args: object, **kwargs: object) -> None:
        """Move the drafter's own model, if any, as `torch.nn.Module.to` does."""
        return None

    def compile(self) -> None:
        """Compile the forward passes of the drafter's own model, if any, each on first use."""
        return None

    @property
    def sizes(self) -> tuple[int, ...]:
        """Depths that drafts can be set to between rounds, the largest first; () if fixed."""
        return ()

    @property
    def candidates_of_sizes(self) -> tuple[int, ...]:
        """Numbers of candidates of drafts of each of the `sizes`; those of chains by default."""
        return self.sizes

    def rehearse(self, device: torch.device) -> Generator[None, None, None]:
        """Yield once for each kind of round that sessions choose; their next rounds are of that kind."""
        yield

    def queries_of(self, candidates: int) -> int:
        """Number of query nodes beside a draft of `candidates`, in the same forward pass of the target."""
        return 0

    def stopping_below(self, probability: float) -> Drafter:
        """Return this drafter with an early stop: it drafts no path whose probability is below `probability`.

        The decision comes before the draw, so that no acceptance rule is biased.

        Raises:
            InputError: the drafter estimates no probability.
        """
        rule = "cannot be used with this drafter, which does not estimate the probability of its candidates"
        raise InputError("length", "confidence", rule)

    def check(self, target: AnyTarget) -> None:
        """Raise InputError if this drafter does not fit the target. The default accepts any target."""
        return None

    def fit(self, target: AnyTarget) -> Drafter:
        """Return this drafter fitted to a target. Drafters that use the target's weights get them here.

        Raises:
            InputError: the drafter does not fit the target.
        """
        self.check(target)
        return self


@dataclass(frozen=True)
class Round:
    """Result of one round of `speculate`: tensors on the device, valid until the next round begins.

    Attributes:
        draft: the draft; the root alone for the prefill.
        first: [T] output index of depth 1 of each lane.
        scores: the target's distribution after each node.
        verdict: the decision of the rule.
        emission: the tokens that were completed, on the host.
    """

    draft: Draft
    first: Tensor
    scores: AnyDistribution
    verdict: Verdict
    emission: Emission
