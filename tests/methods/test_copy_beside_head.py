"""Copies in the trees of heads: the shared tree, its probabilities, and unsupported combinations."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmspec.accelerators import build_accelerator
from mmspec.core.canvas import Canvas
from mmspec.core.draft import Draft, Tree
from mmspec.core.verdict import Path
from mmspec.errors import InputError
from mmspec.evaluation.contenders import count_parameters
from mmspec.methods.copy.beside_head import CopyBesideHeadDrafter
from mmspec.methods.copy.drafter import OF_HEAD, SuffixIndex, grow
from mmspec.methods.copy.trigrams import Trigrams
from mmspec.methods.medusa.drafter import MedusaDrafter
from mmspec.trees.matching import SampleAndMatch
from tests.contracts.checks import PROMPTS, llama
from tests.contracts.running import decode, generate
from tests.contracts.test_drafters import fitted
from tests.methods.heads_checks import medusa_for
from tests.methods.test_copy import TEXTS, paths

NEW = [7, 3, 21, 40]
SHAPE: dict[str, Any] = {"num_draft_tokens": 6, "depth": 2, "top_k": 3}


def first_draft(prompt: list[int], beside: bool) -> set[tuple[int, ...]]:
    """Return the paths of the first draft of Medusa heads, with or without copies."""
    drafts: list[Tree] = []

    class Watching(SampleAndMatch):
        def verify(self, draft: Tree, *more: Any) -> Path:
            drafts.append(draft)
            return super().verify(draft, *more)

    drafter: Any = fitted("medusa", torch.float32, **SHAPE)
    drafter = CopyBesideHeadDrafter(drafter) if beside else drafter
    decode(llama(), [prompt], drafter, Watching(), max_new_tokens=2)
    (row,) = paths(drafts[0])
    return {tuple(path) for path in row}


def test_where_nothing_repeats_the_tree_is_the_heads() -> None:
    assert first_draft(NEW, beside=True) == first_draft(NEW, beside=False)


def repeating(build: Callable[[int, int], list[int]]) -> list[int]:
    """Return a prompt of a token that the target repeats, and of another token."""
    prompts = ((token, build(token, other)) for other in range(60) for token in range(64))
    return next(prompt for token, prompt in prompts if generate(llama().model, prompt, 1) == [token])


def test_what_repeats_takes_the_places_of_what_is_less_likely() -> None:
    """Copies and the head's candidates share one tree of equal size; long matches exceed the head's depth."""
    short = repeating(
        lambda token, other: [*(each for n in range(56, 60) for each in (token, 50, n)), other, *NEW]
    )
    long = repeating(lambda token, other: [*NEW, token, 50, 51, 52, 53, other, *NEW])
    for prompt, copied in ((short, {(50,)}), (long, {(50, 51, 52, 53), (50, 51, 52)})):
        beside, alone = first_draft(prompt, beside=True), first_draft(prompt, beside=False)
        assert copied <= beside and beside & alone and len(beside) == 6


def test_a_head_takes_the_place_of_what_no_occurrence_says() -> None:
    """Two occurrences with odds 0.11 predict 2 and 4; the head predicts 4 and 5, and continues its 4."""
    index = SuffixIndex()
    index.extend([1, 2, 3, 1, 4, 5, 1])
    guesses = {0: {4: (1, 0.5), 5: (2, 0.25)}, 1: {6: (3, 0.8)}}
    tree = grow(index, None, nodes=8, top_k=3, shortest=1, guesses=guesses)
    total = 2 * 0.11 + OF_HEAD
    level = {each.token: each.probability for each in tree if each.depth == 1}
    expected = {4: (0.11 + OF_HEAD * 0.5) / total, 5: OF_HEAD * 0.25 / total, 2: 0.11 / total}
    assert level == pytest.approx(expected)
    (parent,) = (node for node, each in enumerate(tree, start=1) if (each.token, each.depth) == (4, 1))
    after = {each.token: each.probability for each in tree if each.parent == parent}
    # 5 followed 1 4, a match of two tokens with odds 1
    assert after[6] == pytest.approx(level[4] * OF_HEAD * 0.8 / (1 + OF_HEAD))
    assert after[5] == pytest.approx(level[4] * 1.0 / (1 + OF_HEAD))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(TEXTS.filter(len), st.integers(0, 99), st.booleans())
def test_a_path_is_no_likelier_than_the_one_it_continues(
    text: list[int], seed: int, has_corpus: bool
) -> None:
    """The total probability of a node's children is not above the probability of the node."""
    dice, index = random.Random(seed), SuffixIndex()
    index.extend(text)
    guesses: dict[int, dict[int, tuple[int, float]]] = {}
    for node in range(4):
        tokens = dice.sample(range(5), 3)
        guesses[node] = {token: (3 * node + rank + 1, dice.random() / 3) for rank, token in enumerate(tokens)}
    corpus = Trigrams.count([text, text[::-1]]) if has_corpus else None
    tree = grow(index, corpus, nodes=20, top_k=5, shortest=1, guesses=guesses)
    above = [1.0, *(each.probability for each in tree)]
    assert len({(each.parent, each.token) for each in tree}) == len(tree), "each path once"
    for node, probability in enumerate(above):
        children = [each for each in tree if each.parent == node]
        assert sum(each.probability for each in children) <= probability + 1e-12


def test_the_head_is_told_what_was_decided() -> None:
    """At the same place, a head with copies drafts the same as a head alone."""
    prompt = [*PROMPTS[0], *NEW, *PROMPTS[0]]

    def drafts(beside: bool) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        drafter: Any = fitted("eagle", torch.float32, **SHAPE)

        class Watching(drafter.session):  # type: ignore[misc, name-defined]
            def propose(self, canvas: Canvas) -> Draft:
                draft: Draft = super().propose(canvas)
                found[canvas.output_lengths[0]] = draft.tokens[0].tolist()
                return draft

        drafter.session = Watching
        decode(llama(), [prompt], CopyBesideHeadDrafter(drafter) if beside else drafter, max_new_tokens=32)
        return found

    beside, alone = drafts(beside=True), drafts(beside=False)
    common = beside.keys() & alone.keys()
    assert len(beside) < 32 and len(common) > 8
    assert {place: beside[place] for place in common} == {place: alone[place] for place in common}


def test_options_of_a_head_put_copies_beside_it(tmp_path: Any) -> None:
    head = medusa_for(llama())
    assert type(build_accelerator("medusa", model=head).drafter) is MedusaDrafter
    accelerator = build_accelerator("medusa", model=head, copy=True, **SHAPE)
    assert type(accelerator.drafter) is CopyBesideHeadDrafter and accelerator.drafter.max_nodes == 7
    assert count_parameters(accelerator) == sum(each.numel() for each in head.parameters()) > 0
    run = decode(llama(), PROMPTS, accelerator.fit(llama()).drafter, max_new_tokens=12)
    assert run.outputs == [generate(llama().model, prompt, 12) for prompt in PROMPTS]
    with pytest.raises(InputError, match="corpus must be a file of trigrams"):
        build_accelerator("medusa", model=head, corpus=tmp_path / "none")
    cautious: Any = build_accelerator("medusa", model=head, copy=True, length="confidence", stop_below=0.9)
    assert cautious.drafter.head.shape.stop_below == 0.9
    with pytest.raises(
        InputError, match="copy must be False for this head .*, whose tree cannot contain copies"
    ):
        build_accelerator("medusa", model=head, copy=True, tree="3x2", sampling="sampled")
