"""The suffix automaton against brute force, its cost in steps, and what the copy drafter makes of it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmspec.decoding.draft import Draft
from mmspec.decoding.interfaces import PromptOutput, Request
from mmspec.decoding.random_stream import RandomStream
from mmspec.decoding.sampling import Sampler
from mmspec.drafters.copy import CopyDrafter, SuffixAutomaton
from tests.contracts.running import canvas_of

TEXTS = st.integers(1, 5).flatmap(lambda size: st.lists(st.integers(0, size - 1), max_size=120))


def longest_repeated_suffix(tokens: list[int]) -> int:
    """Length of the longest suffix that also ends earlier."""
    size = len(tokens)
    for length in range(size - 1, 0, -1):
        if any(tokens[end - length : end] == tokens[-length:] for end in range(length, size)):
            return length
    return 0


@settings(max_examples=150, deadline=None, derandomize=True)
@given(TEXTS)
def test_the_match_is_the_longest_suffix_seen_before(tokens: list[int]) -> None:
    automaton = SuffixAutomaton()
    for count, token in enumerate(tokens, start=1):
        automaton.append(token)
        seen = tokens[:count]
        length, end = automaton.match_length, automaton.match_end
        assert length == longest_repeated_suffix(seen)
        if length:
            assert end < count, "the occurrence is an earlier one"
            assert seen[end - length : end] == seen[-length:]


class Counted(list):  # type: ignore[type-arg]
    """A list that counts how often it is read."""

    reads = 0

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        Counted.reads += 1
        return super().__getitem__(index)


def steps_of(tokens: list[int]) -> int:
    """Number of states that are looked at while a text is read."""
    automaton = SuffixAutomaton()
    automaton._next, automaton._link, automaton._length = (
        Counted(automaton._next),
        Counted(automaton._link),
        Counted(automaton._length),
    )
    Counted.reads = 0
    for token in tokens:
        automaton.append(token)
    return Counted.reads


@pytest.mark.parametrize("kind", ["random", "periodic", "one change"])
def test_a_token_costs_a_constant_number_of_steps(kind: str) -> None:
    """Ten times the text is ten times the steps, not a hundred; and never more than 40 a token."""

    def text(size: int) -> list[int]:
        generator = torch.Generator().manual_seed(0)
        return {
            "random": torch.randint(50, (size,), generator=generator).tolist(),
            "periodic": [i % 7 for i in range(size)],
            "one change": [1] * (size // 2) + [2] + [1] * (size // 2 - 1),
        }[kind]

    short, long = steps_of(text(2_000)), steps_of(text(20_000))
    assert long < 11 * short and long < 40 * 20_000


def propose(*texts: list[int], **settings: int) -> Draft:
    requests = [Request({"input_ids": torch.tensor([text])}) for text in texts]
    prefill = PromptOutput(torch.zeros(len(texts), 1, 10))
    session = CopyDrafter(**settings).start(
        requests, prefill, Sampler(), RandomStream.from_seed(0, len(texts))
    )
    return session.propose(canvas_of(texts, emitted=1))


def test_the_continuation_of_the_latest_occurrence_is_proposed() -> None:
    draft = propose([1, 2, 3, 9, 1, 2, 4, 8, 1, 2], num_draft_tokens=3, min_match=2)
    assert draft.tokens.tolist() == [[2, 4, 8, 1]] and draft.valid.all()


def test_nothing_is_proposed_below_the_shortest_match() -> None:
    draft = propose([1, 2, 3, 4, 2], num_draft_tokens=3, min_match=2)
    assert draft.tokens.tolist() == [[2]], "a round in which no row copies is a plain one"


def test_a_continuation_may_run_into_the_text_that_it_continues() -> None:
    draft = propose([5, 6, 5, 6, 5], num_draft_tokens=8, min_match=1)
    copied = draft.tokens[0][draft.valid[0]].tolist()
    assert copied[:3] == [5, 6, 5]


def test_a_draft_has_as_many_nodes_as_the_row_that_copies_most() -> None:
    """And each copies from its own text alone."""
    draft = propose([1, 7, 8, 1], [5, 4, 5], [2, 3], num_draft_tokens=10, min_match=1)
    assert draft.tokens.tolist() == [[1, 7, 8, 1], [5, 4, 5, 0], [3, 0, 0, 0]]
    assert draft.valid.tolist() == [[True] * 4, [True] * 3 + [False], [True] + [False] * 3]
