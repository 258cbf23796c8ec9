"""The suffix index compared with brute force, its cost in steps, and the drafts of the copy drafter."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmspec.core.draft import Tree
from mmspec.core.interfaces import PromptOutput, Request
from mmspec.core.plain import NoDrafter
from mmspec.core.random_stream import RandomStream
from mmspec.core.sampling import Sampler
from mmspec.methods.copy.drafter import LATEST, LONGEST, CopyDrafter, SuffixIndex, grow
from mmspec.methods.copy.trigrams import Trigrams
from mmspec.trees.matching import SampleAndMatch
from tests.contracts.checks import PROMPTS, llama
from tests.contracts.running import canvas_of, decode

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
        if len(seen) <= 2 * LATEST:  # no n-gram occurs so often that the index drops occurrences
            assert max((length for length, _ in matches), default=0) == longest
        assert index.matches(3) == [each for each in matches if each[0] >= 3]


def steps_of(tokens: list[int]) -> int:
    """Count the executed lines of the index while it adds and looks up a text, token by token."""
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
    assert tree[:4] == ([4], [3], [4, 8], [3, 9]), "the likelier places first, and the latest of equals"
    assert [3, 9, 5, 2] in tree


def test_a_draft_has_as_many_nodes_as_the_row_that_copies_most() -> None:
    """Each row copies from its own text only."""
    draft = propose([1, 7, 8, 1], [5, 4, 5], [2, 3], num_draft_tokens=10)
    assert draft.tokens.tolist() == [[1, 7, 8, 1], [5, 4, 5, 0], [3, 0, 0, 0]]
    assert draft.valid.tolist() == [[True] * 4, [True] * 3 + [False], [True] + [False] * 3]


def test_evidence_of_several_occurrences_adds_up() -> None:
    """Tokens that came twice and once behind the same one have 0.22 / (0.33 + 1), and half of that."""
    index = SuffixIndex()
    index.extend([1, 2, 3, 1, 4, 5, 1, 2, 6, 1])
    tree = grow(index, None, nodes=2, top_k=2, shortest=1)
    assert [each.token for each in tree] == [2, 4]
    assert [each.probability for each in tree] == pytest.approx([0.22 / 1.33, 0.11 / 1.33])


def test_a_table_has_the_shares_of_a_naive_count(tmp_path: Path) -> None:
    texts = torch.randint(4, (30, 12), generator=torch.Generator().manual_seed(0)).tolist()
    Trigrams.count(texts).save(tmp_path / "table.safetensors")
    table = Trigrams.load(tmp_path / "table.safetensors")
    assert table.vocabulary == 4
    for a, b in itertools.product(range(4), repeat=2):
        after_two = [text[i + 2] for text in texts for i in range(10) if text[i : i + 2] == [a, b]]
        after_one = [text[i + 1] for text in texts for i in range(11) if text[i] == b]
        for token, share in table([0, a, b]).items():
            two = after_two.count(token) / (1 + len(after_two))
            one = after_one.count(token) / (1 + len(after_one))
            assert share == pytest.approx(two + (1 - len(after_two) / (1 + len(after_two))) * one, abs=1e-6)
    bounded = Trigrams.count(texts, most=5)
    assert len(bounded.ngrams) == 5 and (bounded.ngrams[:, 0] == -1).all(), "the most frequent"


def test_a_corpus_is_drafted_from_and_no_token_changes(tmp_path: Path) -> None:
    """Greedy, and sampled with the noise of each place; a corpus of the same texts is always right."""
    target, file = llama(), tmp_path / "table.safetensors"
    for sampler in (Sampler(), Sampler(1.0)):
        plain = decode(target, PROMPTS, NoDrafter(), SampleAndMatch(), sampler, max_new_tokens=24)
        Trigrams.count([[*p, *o] for p, o in zip(PROMPTS, plain.outputs, strict=True)]).save(file)
        run = decode(target, PROMPTS, CopyDrafter(corpus=file), SampleAndMatch(), sampler, max_new_tokens=24)
        alone = decode(target, PROMPTS, CopyDrafter(), SampleAndMatch(), sampler, max_new_tokens=24)
        assert run.outputs == plain.outputs
        assert run.stats.acceptance_length > max(2.0, 1.2 * alone.stats.acceptance_length)
