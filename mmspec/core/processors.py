"""Logits processors of transformers for all nodes of a draft and all rows of a batch at once, on the device.

Each is a function of the tokens before a node. The results equal, bit for bit, those of calling the
processors for one node after another.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import (
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    LogitsProcessor,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from mmspec.core.draft import Tree
from mmspec.core.once import once
from mmspec.kernels import path_tokens, penalize_tokens
from mmspec.kernels.path_tokens import NOTHING

__all__ = [
    "CountPenaltyLogitsProcessor",
    "History",
    "Paths",
    "Vectorized",
    "is_known",
    "is_vectorized",
    "vectorize",
]

ANYTHING = -2  # matches every token
NEVER = 2**40  # beyond every length


@dataclass(frozen=True)
class History:
    """The committed tokens of a batch, prompt and root included.

    Attributes:
        ids: B lists on the host. With rounds that the host has not read, the device knows more tokens.
        prompts: [B, P] on the device, padded in front with -1.
        output: [B, C] on the device: the token at each output index.
        emitted: [B] on the device: number of output tokens.
    """

    ids: Sequence[Sequence[int]]
    prompts: Tensor
    output: Tensor
    emitted: Tensor

    @classmethod
    def of_prompts(cls, prompts: Sequence[Sequence[int]], device: torch.device) -> History:
        """Return the history before the first output token."""
        padded = pad_in_front(prompts, device)
        return cls(prompts, padded, padded[:, :0], padded.new_zeros(len(padded)))


def pad_in_front(prompts: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Copy B lists of ids to the device as [B, P], padded in front with -1."""
    longest = max(map(len, prompts), default=0)
    padded = [[NOTHING] * (longest - len(prompt)) + [*prompt] for prompt in prompts]
    return torch.tensor(padded, dtype=torch.long, device=device).reshape(len(prompts), longest)


class Paths:
    """The tokens before each node of a tree, its own included."""

    def __init__(self, draft: Tree, history: History) -> None:
        self.draft, self.history = draft, history

    @once
    def tokens(self) -> Tensor:
        """[B, n, W] ids, as of `path_tokens`."""
        prompts, output, emitted = self.history.prompts, self.history.output, self.history.emitted
        return path_tokens(
            prompts, output, emitted, self.draft.tokens, *self.draft.paths, self.draft.max_depth
        )

    @once
    def prompt_lengths(self) -> Tensor:
        """[B] number of tokens of each prompt."""
        return (self.history.prompts != NOTHING).sum(-1)

    @once
    def lengths(self) -> Tensor:
        """[B, n] number of tokens of each path."""
        return (self.prompt_lengths + self.history.emitted)[:, None] + self.draft.depth

    def last(self, count: int) -> Tensor:
        """[B, n, count] the last tokens of each path; -1 before its beginning."""
        end = (self.history.prompts.shape[1] + self.history.emitted)[:, None] + self.draft.depth
        column = end[..., None] + torch.arange(-count, 0, device=end.device)
        return self.tokens.gather(2, column.clamp_min(0)).where(column >= 0, NOTHING)


class Vectorized(ABC):
    """A kind of processor, for all rows of a batch.

    Args:
        rows: the processor of each row; None for rows without one, whose logits stay the same.
        logits: [B, n, V] whose device, dtype and size the constants take.
    """

    @abstractmethod
    def __init__(self, rows: Sequence[Any], logits: Tensor) -> None: ...

    @abstractmethod
    def __call__(self, logits: Tensor, paths: Paths) -> Tensor:
        """Return the processed logits [B, n, V]."""

    def parts(self) -> list[Any]:
        """The objects that hold the constants of the rows, tensors [B, ...]."""
        return [self]


class RepetitionPenalty(Vectorized):
    """Divides or multiplies the logits of the tokens on the path."""

    def __init__(self, rows: Sequence[Any], logits: Tensor) -> None:
        penalties = [1.0 if item is None else item.penalty for item in rows]
        dtype = torch.promote_types(logits.dtype, torch.float32)
        self.penalty = torch.tensor(penalties, dtype=dtype, device=logits.device)
        starts = [NEVER if item is None else int(item.prompt_ignore_length or 0) for item in rows]
        self.starts, self.skips = torch.tensor(starts, device=logits.device), any(starts)

    def __call__(self, logits: Tensor, paths: Paths) -> Tensor:
        first = self.starts
        if self.skips:
            first = first + (paths.history.prompts.shape[1] - paths.prompt_lengths)
        return penalize_tokens(logits, paths.tokens, first, self.penalty)


class NoRepeatedNGrams(Vectorized):
    """Excludes tokens that would complete an n-gram that is on the path already."""

    def __init__(self, rows: Sequence[Any], logits: Tensor) -> None:
        sizes = [0 if item is None else item.ngram_size for item in rows]
        self.size = max(sizes)
        size = torch.tensor(sizes, device=logits.device)[:, None, None]
        self.acts = size > 0
        # [B, 1, 1, size - 1] the places of a window that are before the row's own, shorter n-grams
        place = torch.arange(self.size - 1, device=logits.device)
        self.before = place < (self.size - size)[..., None]

    def __call__(self, logits: Tensor, paths: Paths) -> Tensor:
        tokens, vocabulary = paths.tokens, logits.shape[2]
        windows = pad(tokens, (self.size - 1, 0), value=NOTHING).unfold(2, self.size, 1)
        # a window that begins before the text never matches: it holds more padding than the path's end
        is_same = windows[..., :-1] == paths.last(self.size - 1)[:, :, None]
        completes = (is_same | self.before).all(-1) & self.acts & (tokens != NOTHING)
        # other tokens go to an extra column that is dropped
        ids = tokens.where(completes, vocabulary).clamp(max=vocabulary)
        excluded = logits.new_zeros(*logits.shape[:2], vocabulary + 1, dtype=torch.bool)
        return logits.masked_fill(excluded.scatter_(2, ids, True)[..., :-1], -math.inf)


class CountPenaltyLogitsProcessor(LogitsProcessor):
    """Presence and frequency penalties of OpenAI's API, which transformers lacks.

    The logit of a token that occurs c > 0 times in the output is reduced by c * frequency + presence. Tokens
    of the prompt do not count.

    Args:
        presence, frequency: the penalties; negative ones make repetitions more likely.
        prompt_length: number of leading tokens that do not count.
    """

    def __init__(self, presence: float, frequency: float, prompt_length: int) -> None:
        self.presence, self.frequency, self.prompt_length = presence, frequency, prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        counts = counts_of(input_ids[:, self.prompt_length :], scores.shape[-1])
        return scores - (counts * self.frequency + (counts > 0) * self.presence).to(scores.dtype)


def counts_of(tokens: Tensor, vocabulary: int) -> Tensor:
    """Count each of V tokens, [.., W] ids -> [.., V] float32; other ids are ignored."""
    ids = tokens.where((tokens >= 0) & (tokens < vocabulary), vocabulary)  # an extra column, dropped
    counts = torch.zeros(*tokens.shape[:-1], vocabulary + 1, device=tokens.device)
    counts.scatter_add_(-1, ids, torch.ones_like(ids, dtype=counts.dtype))
    return counts[..., :-1]


class CountPenalty(Vectorized):
    """Reduces the logits of the tokens that occur in the output, by their number."""

    def __init__(self, rows: Sequence[Any], logits: Tensor) -> None:
        given = [(0.0, 0.0) if item is None else (item.presence, item.frequency) for item in rows]
        penalties = torch.tensor(given, dtype=torch.float32, device=logits.device)
        self.presence, self.frequency = penalties.T[..., None, None]

    def __call__(self, logits: Tensor, paths: Paths) -> Tensor:
        counts = counts_of(paths.tokens[..., paths.history.prompts.shape[1] :], logits.shape[-1])
        penalty: Tensor = counts * self.frequency + (counts > 0) * self.presence
        return logits - penalty.to(logits.dtype)


Biases = dict[tuple[int, ...], float]


class SequenceBias(Vectorized):
    """Adds biases to the last tokens of sequences whose other tokens end the path; bad words have -inf.

    Raises:
        ValueError: a token is outside the vocabulary, as in transformers.
    """

    def __init__(self, rows: Sequence[Any], logits: Tensor) -> None:
        biases = [Biases() if item is None else item.sequence_bias for item in rows]
        vocabulary, device = logits.shape[2], logits.device
        for item, bias in zip(rows, biases, strict=True):
            if any(token >= vocabulary for sequence in bias for token in sequence):
                item(torch.zeros(1, 1, dtype=torch.long, device=device), logits[:1, 0])
        one = torch.zeros(len(rows), 1, vocabulary)  # of single tokens
        longer: list[list[Biases]] = []
        for row, bias in enumerate(biases):
            # in half precision, sums depend on the order: transformers adds one length after another
            by_length: dict[int, Biases] = {}
            for sequence, value in bias.items():
                by_length.setdefault(len(sequence), {})[sequence] = value
            for sequence, value in by_length.pop(1, {}).items():
                one[row, 0, sequence[0]] = value
            longer.append([*by_length.values()])
        self.one = one.to(device, logits.dtype)
        steps = zip_longest(*longer, fillvalue=Biases())
        self.steps = [EndingBias(step, device) for step in steps]

    def parts(self) -> list[Any]:
        return [self, *self.steps]

    def __call__(self, logits: Tensor, paths: Paths) -> Tensor:
        if not self.steps:
            return logits + self.one
        bias = self.one.repeat(1, logits.shape[1], 1)
        for step in self.steps:
            step.add_to(bias, paths)
        return logits + bias


class EndingBias:
    """Biases of sequences of several tokens.

    Args:
        rows: the sequences of each of B rows, with their biases.
    """

    def __init__(self, rows: Sequence[Biases], device: torch.device) -> None:
        most = max(map(len, rows))
        self.before = max(len(sequence) for row in rows for sequence in row) - 1
        nothing: list[tuple[tuple[int, ...], float]] = [((0,), 0.0)]
        padded = [[*row.items(), *nothing * (most - len(row))] for row in rows]
        begins = [
            [
                [ANYTHING] * (self.before - len(sequence) + 1) + [*map(int, sequence[:-1])]
                for sequence, _ in row
            ]
            for row in padded
        ]
        self.begins = torch.tensor(begins, dtype=torch.long, device=device)[:, None]
        self.is_free = self.begins == ANYTHING
        self.ends = torch.tensor([[int(each[-1]) for each, _ in row] for row in padded], device=device)
        values = [[value for _, value in row] for row in padded]
        self.values = torch.tensor(values, dtype=torch.float32, device=device)[:, None]

    def add_to(self, bias: Tensor, paths: Paths) -> None:
        """Add the biases of the sequences that the paths begin to bias [B, n, V], in place."""
        agrees = (self.begins == paths.last(self.before)[:, :, None]) | self.is_free
        values = torch.where(agrees.all(-1), self.values, 0.0).to(bias.dtype)
        bias.scatter_add_(2, self.ends[:, None].expand_as(values), values)


class Suppression(Vectorized):
    """Excludes tokens: always, or where the length of the path is in a range."""

    def __init__(self, rows: Sequence[Any], logits: Tensor) -> None:
        spans = [span_of(item) for item in rows]
        self.excluded = masks_of([tokens for tokens, _, _ in spans], logits)
        limits = torch.tensor([span[1:] for span in spans], device=logits.device)
        self.first, self.end = limits.T[..., None]
        self.is_constant = all(span[1:] == (0, NEVER) for span in spans)

    def __call__(self, logits: Tensor, paths: Paths) -> Tensor:
        excluded = self.excluded
        if not self.is_constant:
            acts = (paths.lengths >= self.first) & (paths.lengths < self.end)
            excluded = excluded & acts[..., None]
        return logits.masked_fill(excluded, -math.inf)


class Forcing(Vectorized):
    """Excludes all tokens but some, where the path has a certain length."""

    def __init__(self, rows: Sequence[Any], logits: Tensor) -> None:
        device = logits.device
        places, tokens = list[int](), list[Tensor | None]()
        for item in rows:
            begins = isinstance(item, ForcedBOSTokenLogitsProcessor)
            places.append(NEVER if item is None else 1 if begins else item.max_length - 1)
            bos = torch.tensor([item.bos_token_id], device=device) if begins else None
            tokens.append(bos if item is None or begins else item.eos_token_id)
        self.place = torch.tensor(places, device=device)[:, None]
        forced = masks_of(tokens, logits)
        self.forced = torch.zeros_like(forced, dtype=logits.dtype).masked_fill(~forced, -math.inf)

    def __call__(self, logits: Tensor, paths: Paths) -> Tensor:
        return torch.where((paths.lengths == self.place)[..., None], self.forced, logits)


#: The processors that are known here, and the class for each.
KINDS: dict[type, type[Vectorized]] = {
    CountPenaltyLogitsProcessor: CountPenalty,
    RepetitionPenaltyLogitsProcessor: RepetitionPenalty,
    NoRepeatNGramLogitsProcessor: NoRepeatedNGrams,
    SequenceBiasLogitsProcessor: SequenceBias,
    NoBadWordsLogitsProcessor: SequenceBias,
    SuppressTokensLogitsProcessor: Suppression,
    SuppressTokensAtBeginLogitsProcessor: Suppression,
    MinLengthLogitsProcessor: Suppression,
    MinNewTokensLengthLogitsProcessor: Suppression,
    ForcedBOSTokenLogitsProcessor: Forcing,
    ForcedEOSTokenLogitsProcessor: Forcing,
}


def is_vectorized(processors: Any) -> bool:
    """Return whether all processors of a row's list are known here; subclasses are not."""
    return isinstance(processors, list) and all(map(is_known, processors))


def is_known(processor: object) -> bool:
    """Return whether a processor is of a known kind, and holds no tensor with several rows of a batch."""
    ignored = getattr(processor, "prompt_ignore_length", None)
    if type(processor) not in KINDS or (isinstance(ignored, Tensor) and len(ignored) > 1):
        return False
    # older versions of transformers ignore a sequence that begins with the text
    biases = getattr(processor, "sequence_bias", {})
    return hasattr(processor, "multi_token_biases") or all(len(sequence) == 1 for sequence in biases)


def vectorize(rows: Sequence[Sequence[Any]], logits: Tensor) -> list[Vectorized]:
    """Return processors of all rows, to be called one after another; each row's order is kept.

    Args:
        rows: the known processors of each row.
        logits: see `Vectorized`.
    """
    return [KINDS[kind](step, logits) for kind, step in steps_of(rows)]


def steps_of(rows: Sequence[Sequence[Any]]) -> Iterator[tuple[type, list[Any]]]:
    """Split the processors of B rows into steps of one kind, with the processor of each row, or None.

    A kind that comes later in another row waits for it, so that rows with the same kinds in the same order
    share all steps.
    """
    rest = [list(row) for row in rows]
    while any(rest):
        later = {KINDS[type(item)] for row in rest for item in row[1:]}
        first = [type(row[0]) for row in rest if row]
        kind = next((each for each in first if KINDS[each] not in later), first[0])
        acts = [bool(row) and KINDS[type(row[0])] is KINDS[kind] for row in rest]
        yield kind, [row.pop(0) if own else None for row, own in zip(rest, acts, strict=True)]


def span_of(processor: Any) -> tuple[Tensor | None, int, int]:
    """Tokens that a processor excludes, and the lengths of a path from which and below which it does."""
    match processor:
        case None:
            return None, 0, NEVER
        case SuppressTokensLogitsProcessor():
            return processor.suppress_tokens, 0, NEVER
        case SuppressTokensAtBeginLogitsProcessor():
            begin = processor.begin_index
            return processor.begin_suppress_tokens, begin, begin + 1
        case MinLengthLogitsProcessor():
            return processor.eos_token_id, 0, processor.min_length
    return processor.eos_token_id, 0, processor.prompt_length_to_skip + processor.min_new_tokens


def masks_of(rows: Sequence[Tensor | None], logits: Tensor) -> Tensor:
    """[B, 1, V] which tokens are among those of each row; ids outside the vocabulary are ignored."""
    masks = logits.new_zeros(len(rows), 1, logits.shape[2], dtype=torch.bool)
    vocabulary = torch.arange(logits.shape[2], device=logits.device)
    for mask, tokens in zip(masks, rows, strict=True):
        if tokens is not None:
            mask[0] = torch.isin(vocabulary, tokens.to(logits.device))
    return masks
