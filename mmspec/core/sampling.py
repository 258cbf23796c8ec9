"""Sampling settings: from a model's logits to the distribution that tokens are drawn from.

The order is that of transformers: guidance, then logits processors, then temperature, top-k, top-p,
min-p. Target and drafter share this code, so that p and q are warped in the same way. Each row of a batch may
have its own settings.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, TypeAlias

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from mmspec.call_fields import SAMPLING
from mmspec.core.distributions import AnyDistribution, Scores
from mmspec.core.draft import Block, Draft, Tree
from mmspec.core.grammar import GrammarProcessor
from mmspec.core.graphs import power_of_two
from mmspec.core.lockstep import Lockstep
from mmspec.core.once import once
from mmspec.core.processors import History, Paths, Vectorized, is_vectorized, vectorize
from mmspec.core.rows import Rows, concat, named, overwrite, select
from mmspec.errors import InputError
from mmspec.kernels import Warping, warp_logits
from mmspec.kernels.sampling import greedy_rows, limits
from mmspec.open_types import Keywords
from mmspec.validation import is_list, plain_numbers

__all__ = [
    "AnySampler",
    "RowSettings",
    "Sampler",
    "check_rows",
    "check_setting",
    "edges_of",
    "processor_names",
    "read_setting",
]

#: Lower temperatures decode greedily. Configs and clients use them for that (Qwen2.5-VL: 1e-06), and the
#: logits that such a draw would choose between differ by less than half precision resolves.
LEAST_TEMPERATURE = 1e-4


@dataclass(frozen=True)
class RowSettings(Rows, ABC):
    """Base of samplers: settings that turn a target's output into distributions.

    Each row of a batch may have its own temperature, and its own values of the settings of subclasses.
    """

    row_fields = named("temperature")

    temperature: float | Sequence[float] = 0.0

    @property
    def processors(self) -> Sequence[LogitsProcessorList | Lockstep]:
        """Logits processors of the rows; empty for samplers of vectors."""
        return ()

    @once
    def grammars(self) -> Sequence[GrammarProcessor | None]:
        """The grammar of each row, or None; empty if no row has one."""
        found = [first_grammar(each) for each in self.processors]
        return found if any(found) else ()

    @once
    def calls_by_node(self) -> bool:
        """True if the host calls the processors of a row for one node after another."""
        return not all(map(is_vectorized, self.processors))

    @property
    def reads_ids(self) -> bool:
        """True if the host has to know all committed tokens, for processors that it calls or grammars."""
        return self.calls_by_node or bool(self.grammars)

    @property
    def is_guided(self) -> bool:
        """True if any row uses guidance, which also scores the unconditional prompts."""
        return bool(getattr(self, "guidance_scale", 1.0) != 1.0)

    def on_device(self, rows: int, device: torch.device) -> Self:
        """Return the settings of B rows in a form that graphs of rounds share, if there is one."""
        return self

    @abstractmethod
    def __call__(self, logits: Tensor, draft: Draft, history: History, first: Tensor) -> AnyDistribution:
        """Turn the target's output at the nodes of a draft into distributions.

        Args:
            logits: [B, n, V], or [2B, n, V] under guidance: conditional rows, then unconditional ones.
                Parameters or conditions [.., n, D] for targets of vectors.
            draft: the scored nodes, in T chains.
            history: the committed tokens of the B rows.
            first: [T] output index of depth 1.
        """

    @property
    def greedy(self) -> bool:
        """True if all rows decode greedily."""
        return self.temperature == 0.0


#: `RowSettings` of the kind that target and drafter share; see `AnyDistribution`.
AnySampler: TypeAlias = Any


def check_setting(name: str, value: object) -> None:
    """Raise InputError for a value out of range; None is valid if the setting has a neutral value."""
    known = SAMPLING[name]
    if known.check is not None and (value is not None or known.neutral is None):
        known.check(name, value)


def read_setting(name: str, given: Any, check: Callable[[str, object], None]) -> Any:
    """Check one value or a list with one for each row; return a tuple, or one value if all are equal."""
    given = plain_numbers(given)
    values = list(given) if is_list(given) else [given]
    if not values:
        raise InputError(name, given, "must be one value, or a list with one for each row")
    if len(values) > 1:
        values = [SAMPLING[name].neutral if value is None else value for value in values]
    for value in values:
        check(name, value)
    return values[0] if all(value == values[0] for value in values) else tuple(values)


def check_rows(settings: object, count: int, rows: str = "rows") -> None:
    """Raise InputError for a setting that is a list of the wrong length, or that holds None."""
    for name in SAMPLING:
        values = getattr(settings, name, None)
        if is_list(values) and (len(values) != count or None in values):
            rule = f"must be one value, or a list with one for each of the {count} {rows}"
            raise InputError(name, values, rule)


def values_of(setting: Any) -> tuple[Any, ...]:
    """The single value of a checked setting, or the values of all rows."""
    return setting if isinstance(setting, tuple) else (setting,)


@dataclass(frozen=True)
class Sampler(RowSettings):
    """Sampling settings of tokens: how logits become a distribution. The defaults decode greedily.

    Each of the first five is one value for all rows, or a sequence with one for each of the B rows. Equal
    values are stored as one.

    Args:
        temperature: 0 decodes greedily, as does any value below `LEAST_TEMPERATURE`.
        top_k: keep the k most likely tokens; None or 0 keeps all.
        top_p: keep the smallest set of most likely tokens whose mass reaches top_p.
        min_p: keep tokens at least min_p times as likely as the most likely one.
        guidance_scale: s of classifier-free guidance, u + s (c - u); 1 is off.
        processors: empty, or for each row a list of transformers logits processors, which act on every node
            with the token ids on that node's path: a list of known ones for all nodes at once, see
            `is_vectorized`, any other by a call for each node. A `Lockstep`, shared by its rows, is called
            once for their roots. Out-of-order decoding supports only the processors of `edges_of`.
        numbers: set by `on_device`.

    Raises:
        InputError: a value outside its range.
    """

    row_fields = named("top_k", "top_p", "min_p", "guidance_scale", "processors", "numbers")
    converted = frozenset({"processors"})

    top_k: int | Sequence[int | None] | None = None
    top_p: float | Sequence[float | None] | None = None
    min_p: float | Sequence[float | None] | None = None
    guidance_scale: float | Sequence[float] = 1.0
    processors: Sequence[LogitsProcessorList | Lockstep] = ()
    numbers: Tensor | None = None

    def __post_init__(self) -> None:
        for name in SAMPLING:
            object.__setattr__(self, name, read_setting(name, getattr(self, name), check_setting))
        drawn = [value if value >= LEAST_TEMPERATURE else 0.0 for value in values_of(self.temperature)]
        object.__setattr__(self, "temperature", read_setting("temperature", drawn, check_setting))
        if not any(self.processors):  # the last row with some has left
            object.__setattr__(self, "processors", ())

    @property
    def only_guides(self) -> bool:
        """True if guidance is the only change to the model's logits."""
        return not self.processors and self._unguided.is_identity

    def support(self, vocabulary: int) -> int:
        """Largest number of the V tokens that temperature and top-k leave to a row, not counting ties."""
        return 1 if self.greedy else max(k or vocabulary for k in values_of(self.top_k))

    def within_top_k(self, p: Tensor) -> Tensor:
        """Keep at most top_k tokens of warped distributions [B, n, V], ties included; see `part_ties`."""
        if self.greedy or not any(self.warping.top_k):
            return p
        return part_ties(p, limits(self.warping, p))

    def on_device(self, rows: int, device: torch.device) -> Self:
        """Return the settings with their numbers on the device: a CUDA graph stores those of the host.

        The other fields become the same for all settings that use the same parts: 0.5 for a setting that
        changes something, its neutral value for one that does not, and both if rows differ.
        """
        if type(self) is not Sampler or self.numbers is not None:
            return self
        numbers = torch.tensor(self.warping.numbers(rows), dtype=torch.float64, device=device).T.contiguous()
        return self.using(self, numbers=numbers)

    def using(self, other: Self, **changed: Any) -> Self:
        """Return these settings, on the device, in a form for all parts that these or other ones use."""
        both = [(*a, *b) for a, b in zip(self.warping[:5], other.warping[:5], strict=True)]
        temperature, top_k, top_p, min_p, scale = both
        limit = power_of_two(int(max(top_k)))
        return replace(
            self,
            temperature=tuple({0.5 if each else 0.0: 0 for each in sorted(temperature)}),
            top_k=tuple({limit if each else 0: 0 for each in sorted(top_k)}),
            top_p=tuple({0.5 if each < 1.0 else 1.0: 0 for each in sorted(top_p)}),
            min_p=tuple({0.5 if each else 0.0: 0 for each in sorted(min_p)}),
            guidance_scale=0.5 if any(each != 1.0 for each in scale) else 1.0,
            **changed,
        )

    def part(self, rows: Sequence[int], count: int | None = None) -> Self:
        if self.numbers is None:
            return super().part(rows, count)
        own = {name: select(getattr(self, name), rows, count) for name in ("numbers", "processors")}
        return self._prepared_as(replace(self, **own))

    def overwritten(self, slots: Sequence[int], other: Self, counts: tuple[int, int]) -> Self:
        return self._merged(other, counts, lambda own, new: overwrite(own, slots, new, counts))

    def _merged(self, other: Self, counts: tuple[int, int], merge: Callable[[Any, Any], Any]) -> Self:
        """Return settings on the device, with the rows of both merged."""
        changed: Keywords = {"numbers": merge(self.numbers, other.numbers)}
        if self.processors or other.processors:
            rows = [
                [*(each.processors or [LogitsProcessorList()] * count)]
                for each, count in zip((self, other), counts, strict=True)
            ]
            changed["processors"] = merge(*rows)
        return self._prepared_as(other._prepared_as(self.using(other, **changed)))

    def _prepared_as(self, other: Self) -> Self:
        """Return other settings with prepared processors, if these have some."""
        if other.processors and self._prepared:
            for device, dtype, vocabulary in list(self._prepared):
                other._vectorized(torch.empty(1, 1, vocabulary, dtype=dtype, device=device))
        return other

    def joined(self, other: Self, counts: tuple[int, int]) -> Self:
        """Return the settings of these rows followed by those of another batch."""
        if self.numbers is not None:
            return self._merged(other, counts, lambda own, new: concat(own, new, counts))
        both: Keywords = {}
        for name in SAMPLING:
            own, new = values_of(getattr(self, name)), values_of(getattr(other, name))
            if len(own) > 1 or own != new:
                rows, others = counts
                both[name] = [
                    *(own * rows if len(own) == 1 else own),
                    *(new * others if len(new) == 1 else new),
                ]
        if self.processors or other.processors:
            none, (rows, others) = LogitsProcessorList(), counts
            both["processors"] = [*(self.processors or [none] * rows), *(other.processors or [none] * others)]
        return replace(self, **both) if both else self

    @property
    def warping(self) -> Warping:
        """Guidance, temperature and truncation of every row, without the processors."""
        if self.numbers is None:
            return self._settings
        warping = self._settings._replace(rows=self.numbers)
        return warping.guidance() if self.greedy else warping

    @once
    def _settings(self) -> Warping:
        return Warping(
            values_of(self.temperature),
            tuple(k or 0 for k in values_of(self.top_k)),
            tuple(1.0 if top_p is None else top_p for top_p in values_of(self.top_p)),
            tuple(min_p or 0.0 for min_p in values_of(self.min_p)),
            values_of(self.guidance_scale),
        )

    def __call__(self, logits: Tensor, draft: Draft, history: History, first: Tensor) -> Scores:
        """Turn a target's logits into distributions; the logits are warped when a rule first reads them."""
        shape = draft.lanes.valid.shape
        if self.processors:
            guided = self.guided(logits)
            if isinstance(draft, Block):
                return self.scores(self.processed_places(guided, draft), shape)
            return self.scores(self.processed(guided, draft.lanes, history), shape)
        return self._scores(logits, self.warping, shape)

    def guided(self, logits: Tensor) -> Tensor:
        """Apply guidance to the model's logits, [B or 2B, n, V] -> [B, n, V]."""
        return warp_logits(logits, self.warping.guidance())

    def processed(self, logits: Tensor, draft: Tree, history: History) -> Tensor:
        """Apply processors to every node with the token ids of that node's own path."""
        paths = Paths(draft, history)
        for step in self._vectorized(logits):
            logits = step(logits, paths)
        return self.called_by_node(logits, draft, history.ids) if self.calls_by_node else logits

    def _vectorized(self, logits: Tensor) -> list[Vectorized]:
        """Processors of the rows whose lists are known, with constants for such logits."""
        key = logits.device, logits.dtype, logits.shape[-1]
        if key not in self._prepared:
            known: list[Any] = [each if is_vectorized(each) else () for each in self.processors]
            self._prepared[key] = vectorize(known, logits)
        return self._prepared[key]

    @once
    def _prepared(self) -> dict[tuple[Any, ...], list[Vectorized]]:
        return {}

    def constants(self) -> list[Any]:
        """The prepared processors of the rows, whose tensors change with the rows."""
        return [part for steps in self._prepared.values() for step in steps for part in step.parts()]

    def called_by_node(self, logits: Tensor, draft: Tree, history: Sequence[Sequence[int]]) -> Tensor:
        """Apply the processors of the other rows.

        Each node is one call with one row, and the host reads the draft once more.
        """
        tokens, ancestors = draft.tokens.tolist(), draft.ancestors.tolist()
        processed = logits.clone()
        in_step: dict[Lockstep, list[int]] = {}
        for row, committed in enumerate(history):
            processors = self.processors[row]
            if isinstance(processors, Lockstep):
                in_step.setdefault(processors, []).append(row)
                continue
            if is_vectorized(processors):
                continue
            for node, reached in enumerate(ancestors[row]):
                path = [tokens[row][j] for j in range(1, node + 1) if reached[j]]
                ids: Any = torch.tensor([[*committed, *path]], device=logits.device)
                processed[row, node] = processors(ids, logits[row, node][None].clone())[0]
        for together, rows in in_step.items():
            processed[rows, 0] = together.process([history[row] for row in rows], logits[rows, 0])
        return processed

    def processed_places(self, logits: Tensor, draft: Block) -> Tensor:
        """Apply processors that do not depend on other tokens to the places of a block, [B, L, V]."""
        processed, places = logits.clone(), draft.starts.tolist()
        prompts: Sequence[int] = getattr(draft, "prompts", ())
        for row, processors in enumerate(self.processors):
            if isinstance(processors, Lockstep):
                raise TypeError("the places of a block cannot be decoded in lock step")
            edges = sorted(edge for item in processors for edge in edges_of(item) or ())
            alike: dict[int, list[int]] = {}
            for lane, place in enumerate(places[row]):
                alike.setdefault(bisect_right(edges, prompts[row] + place), []).append(lane)
            for lanes in alike.values() if processors else ():
                length = prompts[row] + places[row][lanes[0]]
                ids: Any = torch.zeros(len(lanes), length, dtype=torch.long, device=logits.device)
                processed[row, lanes] = processors(ids, processed[row, lanes])
        return processed

    def scores(self, logits: Tensor, shape: Sequence[int] | None = None) -> Scores:
        """Turn guided logits [B, m, V] into distributions.

        Args:
            logits: of B rows.
            shape: T and n, where the m nodes of a row form T / B lanes of n; B and m if None.
        """
        return self._scores(logits, self._unguided, logits.shape[:2] if shape is None else shape)

    def warp(self, logits: Tensor) -> Tensor:
        """Apply temperature and truncation to guided logits [B, n, V]; greedy rows are not changed."""
        return warp_logits(logits, self._unguided)

    @property
    def _unguided(self) -> Warping:
        return self.warping._replace(guidance_scale=(1.0,))

    def is_greedy(self, like: Tensor) -> bool | Tensor:
        """True if all rows are greedy, False if none is; else a mask [B, 1, 1] on the device of `like`."""
        if self.greedy or 0.0 not in self.warping.temperature:
            return self.greedy
        return greedy_rows(self.warping, like)

    def _scores(self, logits: Tensor, warping: Warping, shape: Sequence[int]) -> Scores:
        greedy = self.is_greedy(logits)
        if isinstance(greedy, Tensor):
            greedy = greedy.repeat_interleave(shape[0] // len(greedy), 0)
        return Scores(logits, greedy, warping, shape)


def processor_names(sampler: RowSettings) -> list[str]:
    """Return the class names of the logits processors of all rows, for error texts."""
    held = (each.processors if isinstance(each, Lockstep) else each for each in sampler.processors)
    return sorted({type(processor).__name__ for row in held for processor in row})


def first_grammar(processors: LogitsProcessorList | Lockstep) -> GrammarProcessor | None:
    """Return the grammar among the processors of a row; None for rows in lock step, which draft nothing."""
    if isinstance(processors, Lockstep):
        return None
    return next((each for each in processors if isinstance(each, GrammarProcessor)), None)


def edges_of(processor: Any) -> list[int] | None:
    """Text lengths at which a processor's effect changes, if it depends on the length alone.

    None for a processor that reads other tokens.
    """
    kind = type(processor)
    if kind is SuppressTokensLogitsProcessor:
        return []
    if kind is SuppressTokensAtBeginLogitsProcessor:
        return [processor.begin_index, processor.begin_index + 1]
    if kind is MinLengthLogitsProcessor:
        return [processor.min_length]
    if kind is MinNewTokensLengthLogitsProcessor:
        return [processor.prompt_length_to_skip + processor.min_new_tokens]
    if kind in (SequenceBiasLogitsProcessor, NoBadWordsLogitsProcessor):
        return [] if all(len(words) == 1 for words in processor.sequence_bias) else None
    return None


def part_ties(p: Tensor, most: float | Tensor) -> Tensor:
    """Break ties at the k-th token under top-k: of equally likely tokens, those with the lowest ids are kept.

    The choice depends on the row alone, not on its batch or device. Distributions without ties are not
    changed.

    Args:
        p: [B, n, V] in which more than k tokens have mass only if the surplus tokens equal the k-th.
        most: k, or [B, 1, 1] of the rows; infinite for all tokens.
    """
    has_mass = p > 0
    surplus = has_mass.sum(-1, keepdim=True) - most
    is_least = p == p.where(has_mass, torch.inf).amin(-1, keepdim=True)
    rank = is_least.cumsum(-1, dtype=torch.int32)
    left = p.masked_fill(is_least & (rank > rank[..., -1:] - surplus), 0.0)
    return torch.where(surplus > 0, left / left.sum(-1, keepdim=True), p)
