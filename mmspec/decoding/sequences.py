"""Committed tokens of a batch on the host, and where each row stops.

Everything here is exact at token granularity: a block that holds the end token, a stop string or
the last allowed token is cut right there, whatever else was accepted with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import StoppingCriteriaList

from mmspec.decoding.draft import Draft
from mmspec.decoding.stats import DecodingStats
from mmspec.decoding.verdict import Verdict
from mmspec.errors import InputError, NumericalError
from mmspec.validation import is_integer

NOT_FINITE = (
    "the target's logits are NaN or infinite, or every token is excluded; "
    "check the weights, the dtype and the logits processors"
)
MAX_NEW_TOKENS = 1_000_000
MILLIONTHS = 1_000_000  # total variation travels to the host among integers, to cost no second read


@dataclass(frozen=True)
class Stopping:
    """Conditions under which a row ends.

    Args:
        max_new_tokens: 0 or more.
        end_token_ids: ids that end a row; the id itself is emitted, as transformers does.
        criteria: transformers stopping criteria (stop strings, time, the user's own); each is asked
            after every single token, with the row's ids [1, length] and scores None.

    Raises:
        InputError: max_new_tokens is not an integer from 0 to 1,000,000.
    """

    max_new_tokens: int
    end_token_ids: frozenset[int] = frozenset()
    criteria: StoppingCriteriaList = field(default_factory=StoppingCriteriaList)

    def __post_init__(self) -> None:
        if not is_integer(self.max_new_tokens) or not 0 <= self.max_new_tokens <= MAX_NEW_TOKENS:
            raise InputError(
                "max_new_tokens", self.max_new_tokens, f"an integer from 0 to {MAX_NEW_TOKENS:,}"
            )


@dataclass(frozen=True)
class Emission:
    """Tokens that one round added.

    Attributes:
        tokens: B lists of new token ids, empty for rows that were finished.
        from_draft: B counts: how many of them, from the first, came from the draft.
    """

    tokens: list[list[int]]
    from_draft: list[int]


def measured_variation(verdict: Verdict) -> Tensor:
    """[B, 3] over the judged places of each row: sum and maximum of the total variation, and their number."""
    if verdict.tv is None or not verdict.tv.shape[1]:  # an exact rule, or a draft of nothing
        return verdict.accepted.new_zeros(len(verdict.accepted), 3)
    depths = torch.arange(verdict.tv.shape[1], device=verdict.tv.device)
    judged = depths <= verdict.accepted[:, None]  # the first rejected place included
    measured = judged & ~verdict.tv.isnan()
    variation = (verdict.tv * MILLIONTHS).where(measured, 0.0).round().long()
    return torch.stack([variation.sum(-1), variation.amax(-1), measured.sum(-1)], 1)


class Sequences:
    """Committed tokens of a batch.

    Attributes:
        tokens: B lists, prompt and output.
        drafted: B lists of flags, one for each output token: whether it came from a draft.
        finish_reasons: "eos", "length", "stop" or "error" for rows that ended, else None.
        errors: the NumericalError of rows that ended in one.
        active: [B] bool on the device: rows that go on.
        emitted: [B] on the device: output tokens of each active row.
        root: [B] on the device: newest token of each active row. Rows that ended go on decoding padding,
            so both are meaningless for them.
    """

    def __init__(
        self, prompts: Sequence[list[int]], stopping: Stopping, stats: DecodingStats, device: torch.device
    ) -> None:
        rows = len(prompts)
        self.stopping = stopping
        self.stats = stats
        self.tokens = [list(prompt) for prompt in prompts]
        self.prompt_lengths = [len(prompt) for prompt in prompts]
        self.drafted: list[list[bool]] = [[] for _ in prompts]
        self.finish_reasons: list[str | None] = [None] * rows
        self.errors: list[NumericalError | None] = [None] * rows
        self.active = torch.ones(rows, dtype=torch.bool, device=device)
        self.emitted = torch.zeros(rows, dtype=torch.long, device=device)
        self.root = torch.tensor([prompt[-1] for prompt in prompts], dtype=torch.long, device=device)
        stats.new_tokens, stats.rounds = [0] * rows, [0] * rows
        stats.drafted, stats.accepted = [0] * rows, [0] * rows

    @property
    def finished(self) -> bool:
        return all(reason is not None for reason in self.finish_reasons)

    @property
    def output_lengths(self) -> list[int]:
        """B numbers of output tokens, known to the host."""
        return [self._output_length(row) for row in range(len(self.tokens))]

    def outputs(self) -> list[list[int]]:
        """B lists of output tokens, without the prompts."""
        return [tokens[length:] for tokens, length in zip(self.tokens, self.prompt_lengths, strict=True)]

    def append(self, draft: Draft, verdict: Verdict, finite: Tensor) -> Emission:
        """Append the tokens that a round accepted: the one place in a round where the host reads the device.

        Args:
            draft, verdict: of this round.
            finite: [B, n] whether the target's logits at each node are usable.
        """
        visited = torch.arange(verdict.path.shape[1], device=finite.device) <= verdict.accepted[:, None]
        usable = (finite.gather(1, verdict.path) | ~visited).long().cumprod(-1).sum(-1)
        report = [
            verdict.accepted[:, None],
            usable[:, None],
            draft.valid[:, 1:].sum(-1, keepdim=True),
            draft.faulty[:, None],
            measured_variation(verdict),
            draft.tokens.gather(1, verdict.path[:, 1:]),
            verdict.next_token[:, None],
        ]
        rows = torch.cat(report, dim=1).tolist()
        self.emitted = self.emitted + (verdict.accepted + 1) * self.active
        self.root = verdict.next_token
        emission = Emission([], [])
        for row, (accepted, usable_nodes, drafted, is_faulty, *rest, bonus) in enumerate(rows):
            (variation, largest, places), path = rest[:3], rest[3:]
            kept, from_draft = [], 0
            if self.finish_reasons[row] is None:
                scored = self._output_length(row) > 0  # the first token came with the prompt, from no round
                # a node's logits decide the token after it: what the usable ones decided is kept
                kept = self._extend(row, [*path[:accepted], bonus][:usable_nodes])
                if usable_nodes <= accepted and self.finish_reasons[row] is None:
                    self._fail(row)
                from_draft = min(accepted, len(kept))
                self.drafted[row] += [index < from_draft for index in range(len(kept))]
                self.stats.new_tokens[row] += len(kept)
                if scored:
                    self.stats.count_round(row, drafted, from_draft, is_faulty)
                    self.stats.count_variation(variation / MILLIONTHS, largest / MILLIONTHS, places)
            emission.tokens.append(kept)
            emission.from_draft.append(from_draft)
        self.active = torch.tensor([r is None for r in self.finish_reasons], device=self.active.device)
        return emission

    def extend(self, blocks: Sequence[list[int]], usable: Sequence[bool]) -> Emission:
        """Append the tokens that a forward of the parallel loop completed; the host has read them already.

        Args:
            blocks: B lists of the next output tokens; empty where only cells further on were decoded.
            usable: B flags; False ends a row, some cell of which had logits that were not finite.
        """
        emission = Emission([], [0] * len(blocks))
        for row, block in enumerate(blocks):
            kept = []
            if self.finish_reasons[row] is None:
                scored = self._output_length(row) > 0
                kept = self._extend(row, block)
                if not usable[row] and self.finish_reasons[row] is None:
                    self._fail(row)
                self.drafted[row] += [False] * len(kept)
                self.stats.new_tokens[row] += len(kept)
                if scored:
                    self.stats.count_round(row, 0, 0, False)
            emission.tokens.append(kept)
        return emission

    def _fail(self, row: int) -> None:
        """End a row whose next token cannot be chosen."""
        self.errors[row] = NumericalError(row, self._output_length(row), NOT_FINITE)
        self.finish_reasons[row] = "error"

    def _extend(self, row: int, block: list[int]) -> list[int]:
        """Append a block of tokens up to where the row ends; return those that were kept."""
        for index, token in enumerate(block, start=1):
            self.tokens[row].append(token)
            self.finish_reasons[row] = self._finish_reason(row, token)
            if self.finish_reasons[row] is not None:
                return block[:index]
        return block

    def _output_length(self, row: int) -> int:
        return len(self.tokens[row]) - self.prompt_lengths[row]

    def _finish_reason(self, row: int, token: int) -> str | None:
        if token in self.stopping.end_token_ids:
            return "eos"
        if self._output_length(row) >= self.stopping.max_new_tokens:
            return "length"
        if self.stopping.criteria:
            ids = torch.tensor([self.tokens[row]], device=self.active.device)
            if bool(self.stopping.criteria(ids, None).any()):
                return "stop"
        return None
