"""The suffix index against brute force, its cost in steps, and what the copy drafter makes of it."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmspec.decoding.draft import Tree
from mmspec.decoding.interfaces import PromptOutput, Request
from mmspec.decoding.random_stream import RandomStream
from mmspec.decoding.sampling import Sampler
from mmspec.drafters.copy import GUESSES, LATEST, LONGEST, CopyDrafter, SuffixIndex
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
def test_matches_are_suffixes_seen_before_and_the_longest_is_among_them(tokens: list[int]) -> None:
    index = SuffixIndex()
    for count, token in enumerate(tokens, start=1):
        index.extend([token])
        seen, matches = tokens[:count], index.matches()
        assert matches == sorted(matches, reverse=True), "the longest first, then the latest"
        for length, end in matches:
            assert end < count, "the occurrence is an earlier one"
            assert seen[end - length : end] == seen[-length:]
            longer = end > length and seen[end - length - 1] == seen[-length - 1]
            assert length == LONGEST or not longer, "matches are as long as they can be"
        longest = min(LONGEST, longest_repeated_suffix(seen))
        if len(seen) <= 2 * LATEST:  # no n-gram occurs so often that some are forgotten
            assert max((length for length, _ in matches), default=0) == longest
        assert index.matches(3) == [each for each in matches if each[0] >= 3]


def steps_of(tokens: list[int]) -> int:
    """Number of lines of the index that run while a text is read and looked up, token by token."""
    index, steps = SuffixIndex(), 0

    def count(frame: Any, event: str, argument: object) -> Any:
        nonlocal steps
        steps += event == "line"
        return count

    sys.settrace(count)
    try:
        for token in tokens:
            index.extend([token])
            index.matches()
    finally:
        sys.settrace(None)
    return steps


@pytest.mark.parametrize("kind", ["random", "periodic", "one change"])
@pytest.mark.every(3)
def test_a_token_costs_a_constant_number_of_steps(kind: str) -> None:
    """Four times the text is about four times the steps, not sixteen."""

    def text(size: int) -> list[int]:
        generator = torch.Generator().manual_seed(0)
        return {
            "random": torch.randint(50, (size,), generator=generator).tolist(),
            "periodic": [i % 7 for i in range(size)],
            "one change": [1] * (size // 2) + [2] + [1] * (size // 2 - 1),
        }[kind]

    short, long = steps_of(text(500)), steps_of(text(2_000))
    assert long < 6 * short and long < 1_100 * 2_000


def propose(*texts: list[int], **settings: int) -> Tree:
    requests = [Request({"input_ids": torch.tensor([text])}) for text in texts]
    prefill = PromptOutput(torch.zeros(len(texts), 1, 10))
    session = CopyDrafter(**settings).start(
        requests, prefill, Sampler(), RandomStream.from_seed(0, len(texts))
    )
    draft = session.propose(canvas_of(texts, emitted=1))
    assert isinstance(draft, Tree)
    return draft


def paths(draft: Tree) -> list[tuple[list[int], ...]]:
    """The paths of each row's candidates, in the order of its nodes."""
    found = []
    for tokens, parents, valid in zip(
        draft.tokens.tolist(), draft.parents.tolist(), draft.valid.tolist(), strict=True
    ):
        row: list[list[int]] = [[]]
        for node in range(1, sum(valid)):
            row.append([*row[parents[node]], tokens[node]])
        assert valid == [True] * len(row) + [False] * (len(valid) - len(row))
        found.append(tuple(row[1:]))
    return found


def test_the_continuation_of_the_latest_occurrence_comes_first_and_those_of_shorter_matches_last() -> None:
    text = [1, 2, 3, 9, 5, 2, 7, 1, 2, 4, 8, 1, 2]
    (tree,) = paths(propose(text, num_draft_tokens=16))
    # the places of 2 behind 1, the latest first; then that behind another token
    assert [path for path in tree if len(path) == 1] == [[4], [3], [7]]
    assert tree[:3] == ([4], [4, 8], [4, 8, 1]), "a longer match is trusted more as it goes on"
    assert [3, 9, 5, 2] in tree


def test_a_chain_is_the_likeliest_path() -> None:
    draft = propose([1, 2, 3, 9, 1, 2, 4, 8, 1, 2], num_draft_tokens=3, min_match=2, top_k=1)
    assert draft.tokens.tolist() == [[2, 4, 8, 1]] and draft.valid.all() and draft.is_chain


def test_nothing_is_proposed_below_the_shortest_match() -> None:
    draft = propose([1, 2, 3, 4, 2], num_draft_tokens=3, min_match=2)
    assert draft.tokens.tolist() == [[2]], "a round in which no row copies is a plain one"


def test_a_continuation_may_run_into_the_text_that_it_continues() -> None:
    (tree,) = paths(propose([5, 6, 5, 6, 5], num_draft_tokens=8))
    assert tree[:2] == ([6], [6, 5])


def test_a_draft_has_as_many_nodes_as_the_row_that_copies_most() -> None:
    """And each copies from its own text alone."""
    draft = propose([1, 7, 8, 1], [5, 4, 5], [2, 3], num_draft_tokens=10)
    assert draft.tokens.tolist() == [[1, 7, 8, 1], [5, 4, 5, 0], [3, 0, 0, 0]]
    assert draft.valid.tolist() == [[True] * 4, [True] * 3 + [False], [True] + [False] * 3]


def test_rates_follow_the_text() -> None:
    """Of tokens that come in turns, a match of one is right every other time, and longer ones always."""
    drafter = CopyDrafter()
    text = [1, 2, 1, 3] * 60
    prefill, random = PromptOutput(torch.zeros(1, 1, 10)), RandomStream.from_seed(0, 1)
    session = drafter.start([Request({"input_ids": torch.tensor([text[:4]])})], prefill, Sampler(), random)
    canvas = canvas_of([text[:4]], emitted=1)
    for token in text[4:]:
        canvas.ids[0].append(token)
        session.propose(canvas)
    rates = drafter.rates
    assert rates(8, 0) > 0.95 > GUESSES[7]
    assert rates(1, 0) == pytest.approx(GUESSES[0], abs=0.03), (
        "but for the beginning, there was a longer match"
    )
    likelihoods = session.likelihoods[0].exp().tolist()
    assert likelihoods == sorted(likelihoods, reverse=True) and likelihoods[1] > 0.9
