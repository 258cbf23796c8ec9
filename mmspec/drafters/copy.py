"""Prompt look-up: draft the continuation of the longest suffix that occurred before.

Prompt look-up decoding (Saxena, 2023) with a suffix automaton (Blumer et al., 1985; SAM-Decoding,
2411.10666), which finds that suffix at constant cost per token, however long the prompt is. Needs no training
and no second model.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mmspec.decoding.canvas import Canvas
from mmspec.decoding.draft import Draft, DraftKind, Tree
from mmspec.decoding.interfaces import DraftSession
from mmspec.decoding.rows import named
from mmspec.drafters.length import half_lengths
from mmspec.drafters.session import PromptBatch, SessionDrafter
from mmspec.errors import InputError
from mmspec.validation import check_draft_tokens, is_integer

NOTHING = -1


class SuffixAutomaton:
    """Suffix automaton of a growing sequence; knows where its longest repeated suffix occurred before.

    Attributes:
        tokens: the sequence so far.
        match_length: length of the longest suffix that also ends earlier.
        match_end: index after that earlier occurrence, so `tokens[match_end:]` is how it continued.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.match_length = 0
        self.match_end = 0
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        self._end = [0]  # index after an occurrence of the state's substrings; refreshed when matched
        self._last = 0
        self._match = 0

    def append(self, token: int) -> None:
        """Add a token: amortised constant time."""
        # The suffix is matched in the automaton of the sequence without it, so a match lies earlier.
        while self._match and token not in self._next[self._match]:
            self._match = self._link[self._match]
            self.match_length = self._length[self._match]
        if token in self._next[self._match]:
            self._match = self._next[self._match][token]
            self.match_length += 1
        self.tokens.append(token)
        self._extend(token)
        # A clone made just now may hold the matched suffix; it is the shorter state that contains it.
        while self._match and self._length[self._link[self._match]] >= self.match_length:
            self._match = self._link[self._match]
        self.match_end = self._end[self._match]
        if self._match:
            self._end[self._match] = len(self.tokens)  # the next match copies from the latest occurrence

    def _extend(self, token: int) -> None:
        current = self._add(self._length[self._last] + 1, {}, len(self.tokens))
        state = self._last
        while state != -1 and token not in self._next[state]:
            self._next[state][token] = current
            state = self._link[state]
        if state == -1:
            self._link[current] = 0
        else:
            target = self._next[state][token]
            if self._length[state] + 1 == self._length[target]:
                self._link[current] = target
            else:
                clone = self._add(self._length[state] + 1, dict(self._next[target]), self._end[target])
                self._link[clone] = self._link[target]
                while state != -1 and self._next[state].get(token) == target:
                    self._next[state][token] = clone
                    state = self._link[state]
                self._link[target] = self._link[current] = clone
        self._last = current

    def _add(self, length: int, transitions: dict[int, int], end: int) -> int:
        self._next.append(transitions)
        self._link.append(-1)
        self._length.append(length)
        self._end.append(end)
        return len(self._length) - 1


class CopySession(DraftSession):
    """Suffix automata of one batch, one per row.

    Attributes:
        num_draft_tokens: the longest continuation to propose next.
    """

    row_fields = named("automata")

    def __init__(self, drafter: CopyDrafter, batch: PromptBatch) -> None:
        self.drafter = drafter
        self.num_draft_tokens = drafter.num_draft_tokens
        self.automata = [SuffixAutomaton() for _ in batch.requests]

    def resize(self, choice: int) -> None:
        self.num_draft_tokens = self.drafter.sizes[choice]

    def propose(self, canvas: Canvas) -> Draft:
        found = [self._continuation(row, tokens) for row, tokens in enumerate(canvas.ids)]
        copied = max(map(len, found))  # few sizes, since a forward may be captured for each
        nodes = 1 + min(size for size in (0, *half_lengths(self.num_draft_tokens)) if size >= copied)
        chains = [[0, *copy] + [NOTHING] * (nodes - 1 - len(copy)) for copy in found]
        tokens = torch.tensor(chains, device=canvas.device)  # the one copy to the device in a round
        tokens[:, 0] = canvas.root
        return Tree.chain(tokens.clamp_min(0), self.drafter.kind, valid=tokens != NOTHING)

    def _continuation(self, row: int, tokens: Sequence[int]) -> list[int]:
        automaton = self.automata[row]
        for token in tokens[len(automaton.tokens) :]:
            automaton.append(token)
        if automaton.match_length < self.drafter.min_match:
            return []
        end = automaton.match_end
        return automaton.tokens[end : end + self.num_draft_tokens]


class CopyDrafter(SessionDrafter):
    """Proposes the continuation of the longest suffix seen before, in prompt and output alike.

    Args:
        num_draft_tokens: longest continuation to propose.
        min_match: shortest suffix worth copying from.

    Raises:
        InputError: a value outside its range.
    """

    kind = DraftKind.POINT
    rows_move = True
    session = CopySession

    def __init__(self, num_draft_tokens: int = 10, min_match: int = 2) -> None:
        self.num_draft_tokens = check_draft_tokens(num_draft_tokens)
        if not is_integer(min_match) or min_match < 1:
            raise InputError("min_match", min_match, "an integer of at least 1")
        self.min_match = min_match
        self.max_nodes = num_draft_tokens + 1

    @property
    def sizes(self) -> tuple[int, ...]:
        return half_lengths(self.num_draft_tokens)
