"""Drafters that run trained heads on their target's hidden states.

A head is trained for one target, whose embedding and output matrix it uses.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from mmspec.core.cache import RaggedCache
from mmspec.core.canvas import Canvas
from mmspec.core.chunked_prefill import ChunkedPrefill
from mmspec.core.distributions import Scores
from mmspec.core.draft import Tree
from mmspec.core.indexing import pick, put, take
from mmspec.core.interfaces import DraftSession, TargetOutput
from mmspec.core.rows import Rows, named
from mmspec.core.sampling import Sampler
from mmspec.core.session import PromptBatch, SessionDrafter
from mmspec.core.verdict import Path
from mmspec.errors import InputError
from mmspec.heads.model import HIDDEN, DraftingHead, WindowHead
from mmspec.targets import AnyTarget
from mmspec.targets.batches import group_by_length
from mmspec.targets.causal import CacheState, CausalTarget, to_device
from mmspec.trees.growth import DynamicTree, TreeGrowth, choose_tree, drawable, smaller_trees
from mmspec.trees.siblings import SiblingDraws, kind_of
from mmspec.validation import MAX_DRAFT_TOKENS

__all__ = [
    "CachingSession",
    "HeadDrafter",
    "HeadSession",
    "LevelDrafter",
    "NEWEST",
    "StateSession",
    "TrainedDrafter",
    "ordered",
    "padded",
]

T = TypeVar("T")

EVERYWHERE, NEWEST = slice(None), slice(-1, None)


class TrainedDrafter(SessionDrafter):
    """Base of drafters that run a head trained for one target.

    Attributes:
        model: the trained head.
        target: provides the embedding and output matrix; None before `fit`.
        compiled: result of `compile`; None before, and after the head has moved.
    """

    model: DraftingHead | WindowHead
    target: CausalTarget | None = None
    compiled: Any = None

    @property
    def title(self) -> str:
        """Name of such heads in messages."""
        return type(self.model).__name__

    def check(self, target: AnyTarget) -> None:
        """Raise InputError unless the head was trained for a target of this kind and size."""
        config: Any = self.model.config
        if target.config is None:
            raise InputError("drafter", self.title, "needs a target that is a transformers model")
        text = target.config.get_text_config(decoder=True)
        wanted = {
            "model type": (config.target_type, text.model_type),
            "hidden size": (config.hidden_size, text.hidden_size),
            "layers": (config.target_layers, text.num_hidden_layers),
            "vocabulary": (config.vocabulary, target.vocabulary),
        }
        for name, (trained, given) in wanted.items():
            if trained and trained != given:  # published heads do not state all of these
                rule = f"must be a head that was trained for this target, whose {name} is {given}"
                raise InputError("drafter", f"a head for a target whose {name} is {trained}", rule)

    @property
    def modules(self) -> Sequence[nn.Module]:
        return (self.model,)

    def to(self, *args: Any, **kwargs: Any) -> None:
        self.model.to(*args, **kwargs)
        self.compiled = None

    def fit(self, target: AnyTarget) -> Self:
        self.check(target)
        fitted = copy.copy(self)
        fitted.target = target  # type: ignore[assignment]  # checked
        return fitted

    @property
    def fitted_target(self) -> CausalTarget:
        if self.target is None:
            rule = "must be fitted to a target first: `drafter.fit(target)`"
            raise InputError("drafter", type(self).__name__, rule)
        return self.target


class HeadDrafter(TrainedDrafter):
    """Drafts a tree of continuations with a head that reads its target's hidden states.

    Args:
        model: the trained head.
        num_draft_tokens: nodes of a dynamic tree, 1 to 512, the root not counted; head's config if None.
        depth: levels of a dynamic tree, at most 64 and at most its nodes; head's config if None.
        top_k: nodes of a dynamic tree that are expanded on each level, and children of each; 1 drafts a
            chain; head's config if None.
        tree: "dynamic"; or a static tree: "eagle", "medusa", "wide", the children of every node of each level
            as "4x2x2", or the parents of its nodes, the root (0) first.
        sampling: how the children of a node are chosen where the target samples. "greedy" takes the
            likeliest. "coupled" draws with the target's own noise, so that equal distributions give equal
            tokens. "sampled" draws them independently, and "without_replacement" each from the tokens that
            are left, in static trees, for rejection rules.

    Raises:
        InputError: a value is out of range, sizes of a dynamic tree are given beside a static one, or
            siblings cannot be drawn in the tree.

    Attributes:
        more_taps: hidden states of the target that it reads beside the head's.
        read_out: states [..., d] -> logits [..., V] by the target's output matrix, or [..., V'] of the tokens
            that the head drafts; set by `fit`.
        names: [V'] the target's tokens of the head's logits; None for all. Set by `fit`.
    """

    runs_ahead = True
    shares_tree = True
    rows_move = True
    draws_anew = True
    model: DraftingHead
    more_taps: ClassVar[tuple[int, ...]] = ()
    read_out: Callable[[Tensor], Tensor]
    names: Tensor | None

    def __init__(
        self,
        model: DraftingHead,
        num_draft_tokens: int | None = None,
        depth: int | None = None,
        top_k: int | None = None,
        tree: str | int | Sequence[int] = "dynamic",
        sampling: str = "greedy",
    ) -> None:
        self.model = model
        self.kind = kind_of(sampling)
        self.shape = drawable(choose_tree(model.config, num_draft_tokens, depth, top_k, tree), sampling)
        self.rates_paths = not self.kind.is_drawn  # selection among drawn candidates would bias them
        most, what = self.deepest
        if self.shape.depth > most:
            raise InputError("depth", self.shape.depth, f"must be at most {most}, {what}")
        self.taps = (*self.more_taps, *model.taps)
        self.max_nodes = self.shape.num_draft_tokens + 1
        self.branches = self.shape.max_children > 1

    @property
    def deepest(self) -> tuple[int, str]:
        """The largest depth that the head can predict, and its meaning, for messages."""
        return MAX_DRAFT_TOKENS, "the most nodes of a tree"

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(each.depth for each in smaller_trees(self.shape)) if self.rates_paths else ()

    @property
    def candidates_of_sizes(self) -> tuple[int, ...]:
        trees = smaller_trees(self.shape) if self.rates_paths else ()
        return tuple(each.num_draft_tokens for each in trees)

    def check(self, target: AnyTarget) -> None:
        super().check(target)
        known = self.model.draft_tokens
        most = target.vocabulary if known is None else len(known)
        if max(self.shape.branch(level) for level in range(1, self.shape.depth + 1)) > most:
            raise InputError("top_k", self.shape.max_children, f"must be at most {most}, the vocabulary")

    def fit(self, target: AnyTarget) -> Self:
        fitted = super().fit(target)
        fitted.read_out = fitted.fitted_target.head_of(self.model.rows_read)
        fitted.names = self.model.draft_tokens
        return fitted

    def stopping_below(self, probability: float) -> Self:
        if not isinstance(self.shape, DynamicTree) and self.rates_paths:
            rule = "must be 'auto' or 'fixed' with a static tree; tree='dynamic' can stop early"
            raise InputError("length", "confidence", rule)
        cautious = copy.copy(self)
        cautious.shape = self.shape.stopping_below(probability)
        return cautious


class HeadSession(DraftSession):
    """A head that drafts for one batch.

    Attributes:
        copies: rows of the target for each request: R = copies x B rows, 2B under guidance.
        names: [V'] the target's tokens of the head's logits; None for all.
    """

    row_fields = named("sampler", "random")

    sampler: Sampler

    def __init__(self, drafter: HeadDrafter, batch: PromptBatch) -> None:
        self.drafter, self.head, self.shape = drafter, drafter.model, drafter.shape
        self.target, self.sampler, self.random = drafter.fitted_target, batch.sampler, batch.random
        self.read_out, self.names = drafter.read_out, drafter.names
        self.copies = len(batch.prompts) // len(batch.requests)

    def resize(self, choice: int) -> None:
        self.shape = smaller_trees(self.drafter.shape)[choice]

    def limit(self, nodes: int, least: Callable[[int], Sequence[float]]) -> None:
        if isinstance(self.drafter.shape, DynamicTree):
            self.shape = self.drafter.shape.limited(nodes, least)

    def growth(self, canvas: Canvas) -> TreeGrowth:
        """Start a tree with the drafter's way of choosing siblings."""
        noise = self.sampler, self.random, canvas.emitted
        draws = SiblingDraws(self.drafter.kind, *noise, self.target.vocabulary, self.names)
        return TreeGrowth(self.shape, canvas.root, draws)

    def rated(self, growth: TreeGrowth) -> Tree:
        """Return the grown tree, and store the log-probabilities of its paths as `likelihoods`."""
        draft, self.likelihoods = growth.draft()
        return draft

    def _guided(self, logits: Tensor) -> Tensor:
        """[R, w, V] logits of the head -> [B, w, V] in float32, both prompts combined by guidance."""
        return self.sampler.guided(logits.float())

    def _log_probabilities(self, logits: Tensor) -> Tensor:
        """[B, w, V] log-probabilities of guided logits, warped as the target's will be.

        Logits processors are left out: running them on paths costs more than a better draft saves.
        """
        return self.sampler.warp(logits).log_softmax(-1)

    def _copied(self, values: Tensor) -> Tensor:
        """[B, ...] values -> [R, ...], for all rows that the target reads."""
        return values if self.copies == 1 else values.repeat(self.copies, *[1] * (values.dim() - 1))


class StateSession(HeadSession):
    """A head without a cache, which reads only the hidden state before the root.

    Attributes:
        hidden: [R, d].
    """

    row_fields = named("hidden")

    def __init__(self, drafter: HeadDrafter, batch: PromptBatch) -> None:
        super().__init__(drafter, batch)
        self.hidden = torch.cat([hidden[:, -1] for hidden in batch.prefill.taps[HIDDEN]])

    def observe(self, draft: Tree, output: TargetOutput, scores: Scores, verdict: Path) -> None:
        self.hidden = take(output.taps[HIDDEN], self._copied(verdict.last))


class Committed(NamedTuple):
    """Tokens that one round has committed.

    Attributes:
        tokens: [B, m] from the root of the round's draft on.
        features: [R, m, d] of the target for these.
        accepted: [B] index of the last of them; later ones are padding.
    """

    tokens: Tensor
    features: Tensor
    accepted: Tensor


class CachingSession(HeadSession):
    """A head with a cache of its own, which reads the target's states of every committed token.

    Prompts are read at the first draft, and so not at all if nothing is ever drafted. Two batches are joined
    without reading them if neither has read its own.

    Attributes:
        unread: the batch whose prompts the head has not read; None afterwards.
        state: its cache, after the prompts; None before they are read.
        features: [R, c, d] of the target, for tokens that were committed since the head last read.
        accepted: [B] index of the newest of them, -1 for none; later ones are padding.
        has_read: whether the head has read them.
        later: tokens of the rounds after these, in which the head drafted nothing. They are appended before
            the next draft: appending them each round would copy `features` each time. With `room` they are
            written to the places of `features`, whose shape graphs require to stay.
    """

    row_fields = named("unread", "state", "features", "accepted")

    head: Any
    state: CacheState = None  # type: ignore[assignment]  # before the prompts are read, which no caller sees
    features: Tensor
    accepted: Tensor
    later: tuple[Committed, ...] = ()

    def __init__(self, drafter: HeadDrafter, batch: PromptBatch) -> None:
        super().__init__(drafter, batch)
        self.unread: PromptBatch | None = batch
        self.has_read = False

    def deferred_prefill(self) -> ChunkedPrefill[None]:
        self._append_later()
        if self.unread is not None:
            batch, self.unread = self.unread, None
            yield from self._read_prompts(batch)

    def part(self, rows: Sequence[int], count: int | None = None) -> Self:
        self._append_later()
        return Rows.part(self, rows, count)  # prompts can still be read later

    def joined(self, other: Self, counts: tuple[int, int]) -> Self:
        self._read_as_much(other)
        return Rows.joined(self, other, counts)

    def overwritten(self, slots: Sequence[int], other: Self, counts: tuple[int, int]) -> Self:
        self._read_as_much(other)
        return Rows.overwritten(self, slots, other, counts)

    def _read_as_much(self, other: CachingSession) -> None:
        """Read the prompts of both batches if one of them has read its own, and append later tokens."""
        self._append_later()
        other._append_later()
        if self.unread is None or other.unread is None:
            self.prepare()
            other.prepare()

    @abstractmethod
    def _read_prompts(self, batch: PromptBatch) -> ChunkedPrefill[None]:
        """Read the R prompts of a batch into a cache, as the target does, and set `state`."""

    def _parts(self, rows: Sequence[int], lengths: Sequence[int], cache: RaggedCache) -> Iterator[slice]:
        """Prepare the cache for each forward pass over some prompts; yields the places that it reads.

        Args:
            rows: of the batch.
            lengths: of their prompts.
            cache: of the head.
        """
        most = max(lengths)
        size = (self.target.prefill_tokens or most) if len(rows) == 1 else most
        for start in range(0, most, max(size, 1)):
            end = min(start + size, most)
            cache.begin_prefill_rows(rows, [end - start] if len(rows) == 1 else lengths, [start] * len(rows))
            yield slice(start, end)

    def _weigh(self, tokens: int, cache: RaggedCache) -> int:
        """Number of tokens whose prefill by the target takes as long as that of some by the head."""
        layers: int = self.target.config.get_text_config(decoder=True).num_hidden_layers
        return -(-tokens * len(cache.layers) // layers)

    def _groups(self, lengths: Sequence[int]) -> list[list[int]]:
        """Group prompts of these lengths that are read in one forward pass, as the target's prefill does."""
        return group_by_length(lengths, most=self.target.prefill_tokens or 0)

    def _positions(self, prompts: Sequence[Mapping[str, Tensor]]) -> tuple[Tensor, list[int]]:
        """Positions of prompts in the target, [G, L] or [3, G, L], and their offsets after each."""
        device = self.target.device
        found, offsets = zip(
            *(self.target.positions(to_device(each, device)) for each in prompts), strict=True
        )
        axes = max((each.shape[:-2] for each in found), key=len)  # text in an M-RoPE model may have one
        longest = max(each.shape[-1] for each in found)
        padded = [pad(each, (0, longest - each.shape[-1])).expand(*axes, 1, -1) for each in found]
        return torch.cat(padded, -2), list(offsets)

    def _known(self, batch: PromptBatch, places: slice = EVERYWHERE) -> list[Tensor]:
        """Features of the R prompts at these places, [1, L_r, d] each; by default at all of them."""
        taps = [[states[:, places] for states in batch.prefill.taps[tap]] for tap in self.head.taps]
        return [self.head.join(states) for states in zip(*taps, strict=True)]

    def observe(self, draft: Tree, output: TargetOutput, scores: Scores, verdict: Path) -> None:
        tokens, states = draft.tokens, [output.taps[tap] for tap in self.head.taps]
        if tokens.shape[1] > 1:  # else the root alone was scored
            path = self._copied(verdict.nodes)
            tokens = tokens.gather(1, verdict.nodes)
            states = [pick(state, path) for state in states]
        committed = Committed(tokens, self.head.join(states), verdict.accepted)
        if self.has_read:
            self.has_read = False
            self._hold(committed)
            self._lengthen(self.room)
        elif self.room and not self.later and committed.tokens.shape[1] == 1:
            self.accepted = self.accepted + 1
            self._write(self.accepted[:, None], committed.tokens, committed.features)
        else:
            self.later = (*self.later, committed)

    def _hold(self, committed: Committed) -> None:
        """Hold the tokens that were committed since the head last read."""
        _, self.features, self.accepted = committed

    def _append_later(self) -> None:
        """Append the tokens of all rounds in `later`."""
        if not self.later:
            return
        later, self.later = self.later, ()
        sizes, device = [each.tokens.shape[1] for each in later], self.accepted.device
        accepted = torch.stack([each.accepted for each in later], 1)  # [B, rounds]
        starts = self.accepted[:, None] + (1 + accepted).cumsum(1) - accepted
        rounds = [round for round, size in enumerate(sizes) for _ in range(size)]
        nodes = torch.tensor([node for size in sizes for node in range(size)], device=device)
        # a place takes one write: padding goes behind all others
        unused = self.features.shape[1] + len(rounds)
        places = (starts[:, rounds] + nodes).where(nodes <= accepted[:, rounds], unused)
        tokens, features = ([getattr(each, name) for each in later] for name in ("tokens", "features"))
        self._lengthen(unused + 1)
        self._write(places, torch.cat(tokens, 1), torch.cat(features, 1))
        self.accepted = self.accepted + (1 + accepted).sum(1)

    def use_few_sizes(self, room: int = 0) -> None:
        super().use_few_sizes(room)
        self.room = room
        self._lengthen(room)

    def _lengthen(self, places: int) -> None:
        """Pad `features` to so many places, if there are fewer."""
        if (more := places - self.features.shape[1]) > 0:
            self.features = pad(self.features, (0, 0, 0, more))

    def _write(self, places: Tensor, tokens: Tensor, features: Tensor) -> None:
        """Write tokens [B, m] and their features [R, m, d] to places [B, m] of `features`."""
        put(self.features, self._copied(places), features)

    def _keep(self, accepted: Tensor, read: int) -> None:
        """Keep the rows [R] up to `accepted` of the `read` rows that were read."""
        self.has_read = True
        self.state.cache.commit(None, accepted + 1)
        self.state.cache.longest += read

    def tighten(self, emitted: Sequence[int]) -> None:
        if self.unread is None:
            self.state.tighten(emitted)


class LevelDrafter(HeadDrafter):
    """Drafts a tree with one head for each level, at most as deep as there are heads.

    Args:
        model, num_draft_tokens, top_k, sampling: see `HeadDrafter`.
        depth: see `HeadDrafter`. At most the number of heads.
        tree: see `HeadDrafter`; or "measured", the best static tree of its size for the hit rates measured in
            training.
    """

    @property
    def deepest(self) -> tuple[int, str]:
        return self.model.config.num_heads, "the number of heads"


def padded(states: Sequence[Tensor]) -> Tensor:
    """Join states [1, L, d] of prompts to [G, L, d], padded on the right."""
    return states[0] if len(states) == 1 else pad_sequence([each[0] for each in states], batch_first=True)


def ordered(groups: Sequence[Sequence[int]], values: Sequence[Iterable[T]]) -> list[T]:
    """Order the values of all groups by their rows."""
    pairs = (pair for rows, own in zip(groups, values, strict=True) for pair in zip(rows, own, strict=True))
    return [value for _, value in sorted(pairs, key=lambda pair: pair[0])]
