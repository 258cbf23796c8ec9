"""Output of a batch on the device: decided tokens, complete tokens, and the rows that are still active.

Stopping is exact at token granularity: the output ends at the end token, the stop string or the last allowed
token, even if a round accepted more tokens after it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self, TypeAlias

import torch
from torch import Tensor
from transformers import MaxTimeCriteria, StoppingCriteriaList

from mmspec.core.draft import Draft
from mmspec.core.graphs import has_graphs, power_of_two
from mmspec.core.indexing import pick, put, take
from mmspec.core.lockstep import Lockstep
from mmspec.core.logprobs import TokenLogprob, unpack
from mmspec.core.once import once
from mmspec.core.processors import History, pad_in_front
from mmspec.core.rows import RowField, Rows, lengthen, named
from mmspec.core.statistics import DecodingStats
from mmspec.core.verdict import MILLIONTHS, Fill, Measured, Path, Verdict
from mmspec.errors import InputError, NumericalError
from mmspec.validation import is_integer

NOT_FINITE = (
    "the target's logits are NaN or infinite, or every token is excluded; "
    "check the weights, the dtype and the logits processors"
)
MAX_NEW_TOKENS = 1_000_000
LEAST_PLACES = 2048  # where sizes are to be few
GROWTH = 512  # least number of places that are added at a time
NO_TOKEN = -1
LEAST_ENDS = 8  # columns for end tokens where sizes are to be few
RETIRED = "retired"

#: Output of a row: a list of token ids, or a tensor [k, d] of vectors.
RowOutput: TypeAlias = Any


@dataclass(frozen=True)
class Stopping:
    """Conditions under which a row ends.

    Args:
        max_new_tokens: 0 or more.
        end_token_ids: ids that end a row; the id itself is emitted, as in transformers.
        criteria: transformers stopping criteria (stop strings, time, custom criteria), called after every
            single token with the row's ids [1, length] and scores None. If all of them have an attribute
            `window`, the number of last tokens that they read, they get these alone, on the host.
        of_output: stopping criteria that are called with the ids of the output alone [1, tokens].
        lockstep: set for rows that decode one token a round together; its criteria replace the others.
        logprobs: number of most likely tokens that are reported with each output token and its
            log-probability; None reports neither.

    Raises:
        InputError: max_new_tokens is not an integer from 0 to 1,000,000.
    """

    max_new_tokens: int
    end_token_ids: frozenset[int] = frozenset()
    criteria: StoppingCriteriaList = field(default_factory=StoppingCriteriaList)
    of_output: StoppingCriteriaList = field(default_factory=StoppingCriteriaList)
    lockstep: Lockstep | None = None
    logprobs: int | None = None

    def __post_init__(self) -> None:
        if not is_integer(self.max_new_tokens) or not 0 <= self.max_new_tokens <= MAX_NEW_TOKENS:
            raise InputError(
                "max_new_tokens", self.max_new_tokens, f"must be an integer from 0 to {MAX_NEW_TOKENS:,}"
            )

    @once
    def window(self) -> int | None:
        """Number of last tokens that all criteria read, on the host; None if one may read others."""
        windows: list[int] = []
        for each in self.criteria:
            window = 1 if type(each) is MaxTimeCriteria else getattr(each, "window", None)
            if window is None:
                return None
            windows.append(window)
        return max(windows, default=1)


@dataclass(frozen=True)
class Emission:
    """Tokens that one round completed, in the order of the output.

    Attributes:
        tokens: B lists of new token ids, or B tensors [k, d] of new vectors; empty for rows that were
            finished, or for which only later places were decided.
    """

    tokens: list[RowOutput]


class Report(NamedTuple):
    """Report of a round [B, columns], which is copied to the host asynchronously."""

    numbers: Tensor
    arrived: torch.cuda.Event | None  # recorded after the copy; None on a CPU
    reach: int  # of the round's draft
    measured: str  # the rule's measurement: "tv" or "drift"

    @classmethod
    def send(cls, numbers: Tensor, reach: int, measured: str) -> Report:
        """Start an asynchronous copy of the numbers to the host."""
        if not numbers.is_cuda:
            return cls(numbers, None, reach, measured)
        pinned = torch.empty(numbers.shape, dtype=numbers.dtype, device="cpu", pin_memory=True)
        pinned.copy_(numbers, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record(torch.cuda.current_stream(numbers.device))
        return cls(pinned, arrived, reach, measured)

    def rows(self) -> list[list[int]]:
        """Wait for the copy, and return the numbers."""
        if self.arrived is not None:
            self.arrived.synchronize()
        rows: list[list[int]] = self.numbers.tolist()
        return rows


class Canvas(Rows):
    """Output of a batch of token ids; `VectorCanvas` is that of a batch of vectors.

    Attributes:
        tokens: [B, C + 1] on the device: the token at each output index, if decided; index C takes unused
            writes.
        decided: [B, C + 1] on the device: whether it is decided; tokens may be decided in any order.
        emitted: [B] on the device: length of each active row's complete prefix.
        active: [B] bool on the device: rows that still decode. The numbers of other rows are meaningless.
        stopping: B stopping conditions.
        ids: B lists on the host: the prompt and the complete tokens.
        output_lengths: B numbers of complete tokens, known to the host.
        drafted: B lists of flags, one per output token: whether it came from a draft.
        finish_reasons: "eos", "length", "stop" or "error" for finished rows, else None.
        errors: the NumericalError of rows that finished with "error".
        logprobs: B lists, one item per output token where `Stopping.logprobs` asks for them, else empty.
    """

    row_fields = named(
        *(
            "stopping",
            "ids",
            "prompt_lengths",
            "drafted",
            "logprobs",
            "finish_reasons",
            "errors",
            "output_lengths",
        ),
        *("stats", "_line", "decided", "is_draft", "active", "emitted", "_limits"),
        RowField("_ends", NO_TOKEN),
        RowField("_prompts", NO_TOKEN, newest_last=True),
    )

    def __init__(
        self,
        prompts: Sequence[list[int]],
        stopping: Stopping | Sequence[Stopping],
        stats: DecodingStats,
        device: torch.device,
    ) -> None:
        rows = len(prompts)
        self.stopping = [stopping] * rows if isinstance(stopping, Stopping) else list(stopping)
        self.stats, self.device = stats, device
        self.ids = [list(prompt) for prompt in prompts]
        self.prompt_lengths = [len(prompt) for prompt in prompts]
        self.drafted: list[list[bool]] = [[] for _ in prompts]
        self.logprobs: list[list[TokenLogprob]] = [[] for _ in prompts]
        self.finish_reasons: list[str | None] = [None] * rows
        self.errors: list[NumericalError | None] = [None] * rows
        self.output_lengths = [0] * rows
        # to widen tensors later takes launches
        places, least_ends = (LEAST_PLACES, LEAST_ENDS) if has_graphs(device) else (1, 0)
        self.decided = torch.zeros(rows, places, dtype=torch.bool, device=device)
        self.is_draft = torch.zeros_like(self.decided)
        line = [[*prompt[-1:], *[0] * places] for prompt in prompts]
        self._line = torch.tensor(line, dtype=torch.long, device=device).reshape(rows, places + 1)
        self._prompts = pad_in_front(prompts, device)
        self.active = torch.ones(rows, dtype=torch.bool, device=device)
        self.emitted = torch.zeros(rows, dtype=torch.long, device=device)
        self._unread: deque[Report] = deque()
        self._begun = False  # the first commit holds the prefill's tokens, without a scoring forward pass
        ends = [sorted(each.end_token_ids) for each in self.stopping]
        most = max([least_ends, *map(len, ends)])
        limits = [each.max_new_tokens for each in self.stopping]
        told = [
            [limit, *own, *[NO_TOKEN] * (most - len(own))] for limit, own in zip(limits, ends, strict=True)
        ]
        numbers = torch.tensor(told, dtype=torch.long, device=device).reshape(rows, 1 + most)  # in one copy
        self._limits, self._ends = numbers[:, :1], numbers[:, 1:]
        stats.new_tokens, stats.rounds, stats.drafted_rounds = [0] * rows, [0] * rows, [0] * rows
        stats.drafted, stats.accepted = [0] * rows, [0] * rows
        stats.accepted_histograms = [Counter() for _ in prompts]

    @property
    def tokens(self) -> Tensor:
        return self._line[:, 1:]

    @property
    def history(self) -> History:
        """The committed tokens of all rows; logits processors depend on them."""
        return History(self.ids, self._prompts, self.tokens, self.emitted)

    @property
    def finished(self) -> bool:
        return all(reason is not None for reason in self.finish_reasons)

    @property
    def without_errors(self) -> list[int]:
        """Rows whose logits were finite so far."""
        return [row for row, error in enumerate(self.errors) if error is None]

    @property
    def in_step(self) -> list[int]:
        """Rows that get one token a round, because their callbacks rely on it."""
        return [row for row, stopping in enumerate(self.stopping) if stopping.lockstep is not None]

    @property
    def most_logprobs(self) -> int | None:
        """Largest number of most likely tokens that a row asks for; None if no row asks for any."""
        return max((one.logprobs for one in self.stopping if one.logprobs is not None), default=None)

    @property
    def unread(self) -> int:
        """Number of submitted rounds that the host has not read."""
        return len(self._unread)

    @property
    def length_bounds(self) -> list[int]:
        """B upper bounds of the number of complete tokens, known to the host."""
        ahead = sum(report.reach for report in self._unread)
        rows = zip(self.output_lengths, self.stopping, strict=True)
        return [min(length + ahead, stopping.max_new_tokens) for length, stopping in rows]

    @property
    def root(self) -> Tensor:
        """[B] last emitted token of each row, or [B, d] vector; the prompt's last where none is emitted."""
        return take(self._line, self.emitted)

    def before(self, count: int) -> Tensor:
        """[B, count] or [B, count, d]: the last tokens; the prompt's last token fills up short outputs."""
        place = self.emitted[:, None] + torch.arange(1 - count, 1, device=self.device)
        return pick(self._line, place.clamp_min(0))

    def outputs(self) -> list[RowOutput]:
        """B lists of output tokens, without the prompts."""
        return [ids[length:] for ids, length in zip(self.ids, self.prompt_lengths, strict=True)]

    def joined(self, other: Self, counts: tuple[int, int]) -> Self:
        """Return the canvas of these rows followed by those of `other`; all rounds must have been read."""
        self._make_as_wide(other)
        return super().joined(other, counts)

    def overwritten(self, slots: Sequence[int], other: Self, counts: tuple[int, int]) -> Self:
        """Return this canvas with the rows of `other` in place of some; all rounds must have been read."""
        self._make_as_wide(other)
        return super().overwritten(slots, other, counts)

    def _make_as_wide(self, other: Self) -> None:
        """Add undecided places to the canvas that has fewer."""
        width = max(self.decided.shape[1], other.decided.shape[1])
        for canvas in (self, other):
            if canvas.decided.shape[1] < width:
                canvas._widen(width - canvas.decided.shape[1])

    def retire(self, rows: Sequence[int]) -> None:
        """End rows that decode no longer, but stay in the batch; see `Slots`."""
        for row in rows:
            if self.finish_reasons[row] is None:
                self.finish_reasons[row] = RETIRED
                self.active[row] = False

    def decide(self, places: Tensor, tokens: Tensor, which: Tensor, is_draft: Tensor | bool = False) -> None:
        """Write tokens [B, k] at output places [B, k] where `which` [B, k] is true."""
        places = places.where(which, self.decided.shape[1] - 1)
        put(self.tokens, places, tokens)
        self.decided.scatter_(1, places, True)
        if isinstance(is_draft, Tensor):
            self.is_draft.scatter_(1, places, is_draft)

    def reserve(self, places: int) -> None:
        """Allocate output indices below `places`."""
        missing = places + 1 - self.decided.shape[1]
        if missing > 0:
            self._widen(max(missing, GROWTH, self.decided.shape[1]))

    def use_few_sizes(self, places: int, reads_prompts: bool) -> None:
        """Pad tensors to powers of two, because each size has CUDA graphs of its own.

        Args:
            places: number of output indices to allocate.
            reads_prompts: whether logits processors read the prompts; otherwise they are dropped.
        """
        self.reserve(power_of_two(max(places, LEAST_PLACES)) - 1)
        if reads_prompts:
            length = power_of_two(max(self._prompts.shape[1], LEAST_PLACES))
            self._prompts = lengthen(self._prompts, length, NO_TOKEN, newest_last=True)
        else:
            self.forget_prompts()
        ends = max(LEAST_ENDS, power_of_two(self._ends.shape[1]))
        self._ends = lengthen(self._ends, ends, NO_TOKEN)

    def forget_prompts(self) -> None:
        """Drop the prompts on the device, which only logits processors read."""
        self._prompts = self._prompts[:, :0]

    def _widen(self, room: int) -> None:
        """Add undecided places; the last one still takes unused writes."""
        self._line, self.decided, self.is_draft = (
            lengthen(plane[:, :-1], plane.shape[1] + room)
            for plane in (self._line, self.decided, self.is_draft)
        )

    def send(self, report: Tensor, reach: int, measured: str) -> None:
        """Send the report of `write` to the host asynchronously.

        Args:
            report: [B, columns].
            reach: of the round's draft.
            measured: name of the rule's measurement.
        """
        self._unread.append(Report.send(report, reach, measured))

    def read(self) -> Emission:
        """Read the report of the oldest unread round: the host's only read of the device in a round."""
        report, emission, stopped = self._unread.popleft(), Emission([]), False
        for row, (count, ended, full, failed, drafted, faulty, *rest) in enumerate(report.rows()):
            (total, largest, places), block = rest[:3], rest[3:]
            kept, flags = [], list[bool]()
            if self.finish_reasons[row] is None:
                reason = "eos" if ended else "length" if full else None
                kept = self._extend(row, count, block[report.reach : report.reach + count], reason)
                self.output_lengths[row] += len(kept)
                stopped |= self.finish_reasons[row] == "stop"
                if failed and self.finish_reasons[row] is None:
                    self.errors[row] = NumericalError(row, self.output_lengths[row], NOT_FINITE)
                    self.finish_reasons[row] = "error"
                if (most := self.stopping[row].logprobs) is not None:
                    columns = block[2 * report.reach :]
                    self.logprobs[row] += unpack(columns, kept, len(columns) // report.reach, most)
                flags = [bool(flag) for flag in block[: len(kept)]]
                self.drafted[row] += flags
                self.stats.new_tokens[row] += len(kept)
                if self._begun:
                    self.stats.count_round(row, drafted, sum(flags), faulty)
                    measured = total / MILLIONTHS, largest / MILLIONTHS, places
                    self.stats.count_measured(report.measured, *measured)
            emission.tokens.append(kept)
        self._begun = True
        stopped |= self._stop_in_step(emission)
        if stopped:  # only the host evaluates stopping criteria
            self.active = torch.tensor([r is None for r in self.finish_reasons], device=self.device)
            self.emitted = torch.tensor(self.output_lengths, device=self.device)
        return emission

    def write(self, draft: Draft, verdict: Verdict, measured: Measured, *more: Tensor) -> Tensor:
        """Write the tokens that a round decided, on the device; call `reserve` first.

        Args:
            draft, verdict: of this round.
            measured: the rule's measurement.
            more: further columns for the report: those of log-probabilities.

        Returns:
            [B, columns] the report that the host reads.
        """
        if isinstance(verdict, Path):
            fresh, flags, missing = self.append(verdict)
        else:
            fresh, flags, missing = self.fill(verdict, draft.reach)
        ends = self._are_ends(fresh)
        window = self.emitted[:, None] + torch.arange(draft.reach, device=self.device)
        missing = missing | (window >= self._limits)
        missing[:, 1:] |= ends[:, :-1]
        kept = missing.cumsum(-1) == 0
        count = kept.sum(-1) * self.active
        self.emitted = self.emitted + count
        ended = (kept & ends).any(-1)
        full = self.emitted >= self._limits[:, 0]
        self.active = self.active & ~(ended | full | verdict.failed)
        summary = torch.stack([count, ended, full, verdict.failed, draft.candidates, draft.faulty], 1)
        return torch.cat([summary, measured.rows, flags, *self._readable(fresh), *more], 1)

    def append(self, path: Path) -> tuple[Tensor, Tensor, Tensor]:
        """Append the values that a path decides to the output.

        Returns:
            [B, m] or [B, m, d] the values from the first unemitted place on, and [B, m] which of them come
            from a draft, and which places are undecided.
        """
        steps = torch.arange(path.nodes.shape[1], device=self.device)
        places, keep = self.emitted[:, None] + steps, steps < path.decided[:, None]
        put(self.tokens, places, path.values)
        self.decided.scatter_(1, places, keep)
        return path.values, steps < path.accepted[:, None], ~keep

    def fill(self, fill: Fill, reach: int) -> tuple[Tensor, Tensor, Tensor]:
        """Write values at their places, and reopen places; returns as `append` for `reach` places."""
        active = self.active[:, None]
        self.decide(fill.places, fill.values, fill.decided & active, fill.is_draft)
        opened = fill.places.where(fill.reopened & active, self.decided.shape[1] - 1)
        self.decided.scatter_(1, opened, False)
        window = self.emitted[:, None] + torch.arange(reach, device=self.device)
        missing = ~self.decided.gather(1, window) | (window >= fill.settled[:, None])
        return pick(self.tokens, window), self.is_draft.gather(1, window), missing

    def _stop_in_step(self, emission: Emission) -> bool:
        """Apply the criteria of rows in lock step after each token; return whether any row stops."""
        groups: dict[Lockstep, list[int]] = {}
        for row, stopping in enumerate(self.stopping):
            if stopping.lockstep is not None and stopping.lockstep.criteria:
                groups.setdefault(stopping.lockstep, []).append(row)
        stopped = False
        for lockstep, rows in groups.items():
            if not any(emission.tokens[row] for row in rows):
                continue
            answers = lockstep.stops([self.ids[row] for row in rows], self.device)
            for row, stops in zip(rows, answers, strict=True):
                if stops and self.finish_reasons[row] is None:
                    self.finish_reasons[row], stopped = "stop", True
        return stopped

    def _are_ends(self, tokens: Tensor) -> Tensor:
        """[B, k] whether each token ends its row."""
        return (tokens[..., None] == self._ends[:, None]).any(-1)  # `torch.isin` takes three times as long

    def _readable(self, tokens: Tensor) -> list[Tensor]:
        """Integer columns that report new tokens to the host."""
        return [tokens]

    def _extend(self, row: int, count: int, block: list[int], reason: str | None) -> RowOutput:
        """Append a block of tokens, ending the row if there is a reason; return the tokens kept."""
        for index, token in enumerate(block, start=1):
            self.ids[row].append(token)
            stopping, stops = self.stopping[row], False
            if stopping.criteria:  # called after the last token as well: some criteria count their calls
                if stopping.window is None:
                    ids = torch.tensor([self.ids[row]], device=self.device)
                else:  # without a copy to the device and a read for each token
                    ids = torch.tensor([self.ids[row][-stopping.window :]], device="cpu")
                stops = bool(stopping.criteria(ids, None).any())
            if stopping.of_output:
                ids = torch.tensor([self.ids[row][self.prompt_lengths[row] :]], device=self.device)
                stops |= bool(stopping.of_output(ids, None).any())
            if reason is not None and index == len(block):
                self.finish_reasons[row] = reason
            elif stops:
                self.finish_reasons[row] = "stop"
                return block[:index]
        return block


class VectorCanvas(Canvas):
    """Output of a batch of vectors, which stay on the device. The host reads only their number.

    Args:
        size: d of a vector.
    """

    def __init__(
        self,
        prompts: Sequence[list[int]],
        stopping: Stopping,
        stats: DecodingStats,
        device: torch.device,
        size: int,
    ) -> None:
        super().__init__(prompts, stopping, stats, device)
        # the prompt's last token is an id, not a vector
        shape = len(prompts), self._line.shape[1], size
        self._line = torch.zeros(shape, dtype=torch.float32, device=device)

    def outputs(self) -> list[RowOutput]:
        """B tensors [N, d] of output vectors."""
        return [row[:count] for row, count in zip(self.tokens, self.output_lengths, strict=True)]

    def _are_ends(self, tokens: Tensor) -> Tensor:
        return torch.zeros_like(tokens[..., 0], dtype=torch.bool)

    def _readable(self, tokens: Tensor) -> list[Tensor]:
        return []

    def _extend(self, row: int, count: int, block: list[int], reason: str | None) -> RowOutput:
        start = self.output_lengths[row]
        self.finish_reasons[row] = reason
        return self.tokens[row, start : start + count]
