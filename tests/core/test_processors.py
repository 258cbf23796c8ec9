"""Logits processors of all nodes at once, against calling them for one node after another."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process as lp

from mmspec.core import loop
from mmspec.core.canvas import Canvas, Stopping
from mmspec.core.draft import DraftKind, Tree
from mmspec.core.interfaces import Drafter
from mmspec.core.lockstep import Lockstep
from mmspec.core.plain import NoDrafter
from mmspec.core.processors import CountPenaltyLogitsProcessor, History, is_vectorized
from mmspec.core.sampling import Sampler
from mmspec.core.statistics import DecodingStats
from mmspec.heads.feature_session import GrownTreeDrafter
from mmspec.methods.copy.drafter import CopyDrafter
from mmspec.targets import CausalTarget
from tests.contracts.checks import PROMPTS
from tests.contracts.running import decode
from tests.kernels.trees import path_up
from tests.methods.eagle_checks import head_for
from tests.oracles import RandomTreeDrafter, ragged_tree
from tests.tiny_models import tiny_llama
from tests.versions import OLDEST

CPU = torch.device("cpu")
V = 13
SEEN = V if OLDEST else V + 2  # ids from V on stand for images in prompts
Make = Callable[[random.Random, int], LogitsProcessor]


def tokens(draw: random.Random, least: int = 1, most: int = 4) -> list[int]:
    return [draw.randrange(V) for _ in range(draw.randint(least, most))]


def biases(draw: random.Random, count: int = 12) -> dict[tuple[int, ...], float]:
    """Some of one token, some of several; many have the same last token."""
    last = tokens(draw, 2, 3)
    return {(*tokens(draw, 0, 3), draw.choice(last)): draw.uniform(-3, 3) for _ in range(count)}


#: Processors for a row whose prompt has a certain length.
MAKERS: dict[str, Make] = {
    "repetition": lambda draw, _: lp.RepetitionPenaltyLogitsProcessor(draw.choice([0.7, 1.05, 1.3, 3.0])),
    "repetition of the output": lambda draw, length: lp.RepetitionPenaltyLogitsProcessor(1.7, length),
    "repetition from a place": lambda draw, length: lp.RepetitionPenaltyLogitsProcessor(
        1.7, torch.tensor([draw.randint(0, length + 4)])
    ),
    "counts": lambda draw, length: CountPenaltyLogitsProcessor(
        draw.uniform(-2, 2), draw.choice([0.0, 0.3, 1.1, -0.7]), length
    ),
    "n-grams": lambda draw, _: lp.NoRepeatNGramLogitsProcessor(draw.randint(1, 4)),
    "biases": lambda draw, _: lp.SequenceBiasLogitsProcessor(biases(draw)),
    "biases of tokens": lambda draw, _: lp.SequenceBiasLogitsProcessor({(3,): 1.7, (5,): -0.3}),
    "bad words": lambda draw, _: lp.NoBadWordsLogitsProcessor([tokens(draw) for _ in range(6)], [2]),
    "suppressed": lambda draw, _: lp.SuppressTokensLogitsProcessor([*tokens(draw), V + 2]),
    "suppressed first": lambda draw, length: lp.SuppressTokensAtBeginLogitsProcessor(
        tokens(draw), length + draw.randint(0, 3)
    ),
    "min length": lambda draw, length: lp.MinLengthLogitsProcessor(length + 3, tokens(draw)),
    "min new tokens": lambda draw, length: lp.MinNewTokensLengthLogitsProcessor(length, 4, tokens(draw)),
    "first token": lambda draw, _: lp.ForcedBOSTokenLogitsProcessor(draw.randrange(V)),
    "last token": lambda draw, length: lp.ForcedEOSTokenLogitsProcessor(length + 4, tokens(draw, 1, 2)),
}

if OLDEST:  # its penalty takes an integer
    del MAKERS["repetition from a place"]


class Penalty(lp.RepetitionPenaltyLogitsProcessor):
    """A class of a user, whose call may differ."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores - 100 * (torch.arange(scores.shape[1]) == input_ids[0, -1])


def random_history(draw: random.Random, rows: int, prompts: Sequence[int] = ()) -> History:
    """Ragged prompts and outputs of few tokens."""
    lengths = prompts or [draw.randint(1, 9) for _ in range(rows)]
    before = [[draw.randrange(SEEN) for _ in range(length)] for length in lengths]
    counts = [draw.randint(0, 5) for _ in range(rows)]
    output = torch.tensor([[draw.randrange(V) for _ in range(8)] for _ in range(rows)])
    ids = [
        [*prompt, *line[:count]] for prompt, line, count in zip(before, output.tolist(), counts, strict=True)
    ]
    return History(ids, History.of_prompts(before, CPU).prompts, output, torch.tensor(counts))


def random_draft(draw: random.Random, rows: int, nodes: int, is_chain: bool) -> Tree:
    drawn = torch.tensor([[draw.randrange(V) for _ in range(nodes)] for _ in range(rows)])
    if is_chain:
        return Tree.chain(drawn, DraftKind.POINT)
    parents = torch.tensor([[draw.randrange(max(node, 1)) for node in range(nodes)] for _ in range(rows)])
    tree = ragged_tree(drawn, parents, torch.ones_like(parents, dtype=torch.bool), DraftKind.POINT)
    assert isinstance(tree, Tree)
    return tree


def one_by_one(
    processors: Sequence[LogitsProcessorList], logits: Tensor, draft: Tree, history: History
) -> Tensor:
    """Call the processors of each row for every node."""
    processed = logits.clone()
    for row, committed in enumerate(history.ids):
        for node in range(logits.shape[1]):
            path = path_up(draft.parents[row].tolist(), node)[1:]
            ids: Any = torch.tensor([[*committed, *draft.tokens[row, path].tolist()]])
            processed[row, node] = processors[row](ids, logits[row, node][None].clone())[0]
    return processed


def lengths_of(history: History) -> list[int]:
    return (history.prompts >= 0).sum(-1).tolist()


def agree(draw: random.Random, names: Sequence[Sequence[str]], dtype: torch.dtype, is_chain: bool) -> Sampler:
    """Both ways give the same for rows with these processors; the given logits are not changed."""
    rows = len(names)
    history = random_history(draw, rows)
    draft = random_draft(draw, rows, draw.choice([1, 2, 7, 12]), is_chain)
    lists = [
        LogitsProcessorList([MAKERS[name](draw, length) for name in row])
        for row, length in zip(names, lengths_of(history), strict=True)
    ]
    generator = torch.Generator().manual_seed(draw.randrange(2**32))
    logits = (4 * torch.randn(*draft.tokens.shape, V, generator=generator)).to(dtype)
    sampler, before = Sampler(processors=lists), logits.clone()
    assert OLDEST or not sampler.reads_ids
    for _ in range(2):  # the second call has its constants already
        found = sampler.processed(logits, draft, history)
        assert found.dtype == dtype and torch.equal(logits, before)
        expected = one_by_one(lists, logits, draft, history)
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    return sampler


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.every(3)
def test_each_kind_gives_the_same_bits_along_trees_and_chains(name: str, dtype: torch.dtype) -> None:
    draw = random.Random(f"{name} {dtype}")
    for trial in range(24):
        rows = draw.randint(1, 4)
        names = [[name] * (row == 0 or draw.random() < 0.7) for row in range(rows)]
        agree(draw, names, dtype, is_chain=trial % 2 == 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lists_that_differ_by_row_keep_their_order(dtype: torch.dtype) -> None:
    draw = random.Random(7)
    for trial in range(30):
        names = [draw.choices(list(MAKERS), k=draw.randint(0, 4)) for _ in range(draw.randint(1, 4))]
        agree(draw, names, dtype, is_chain=trial % 2 == 0)


def test_lists_with_other_processors_are_called_as_before() -> None:
    draw, shared = random.Random(3), lp.RepetitionPenaltyLogitsProcessor(1.5)
    lists = [[shared], [shared, Penalty(1.5)], [lp.TopKLogitsWarper(3)], []]
    rows = [LogitsProcessorList(each) for each in lists]
    assert [is_vectorized(each) for each in rows] == [True, False, False, True]
    assert not is_vectorized(
        LogitsProcessorList([lp.RepetitionPenaltyLogitsProcessor(1.5, torch.tensor([1, 2]))])
    )
    assert not is_vectorized(Lockstep(rows[0], (), (1,), 0))  # type: ignore[arg-type]
    history, draft = random_history(draw, 4), random_draft(draw, 4, 6, False)
    logits, sampler = (
        torch.randn(4, 6, V, generator=torch.Generator().manual_seed(0)),
        Sampler(processors=rows),
    )
    assert sampler.reads_ids and not Sampler().reads_ids
    assert torch.equal(sampler.processed(logits, draft, history), one_by_one(rows, logits, draft, history))


def test_a_bias_outside_the_vocabulary_is_refused_as_by_transformers() -> None:
    draw = random.Random(4)
    history, draft = random_history(draw, 1), random_draft(draw, 1, 3, False)
    for processor in (lp.SequenceBiasLogitsProcessor({(V,): 1.0}), lp.NoBadWordsLogitsProcessor([[1, V]])):
        sampler = Sampler(processors=[LogitsProcessorList([processor])])
        with pytest.raises(ValueError, match="vocabulary size is 13"):
            sampler.processed(torch.zeros(1, 3, V), draft, history)


def canvas_of(prompts: Sequence[list[int]]) -> Canvas:
    return Canvas(prompts, Stopping(8), DecodingStats(), CPU)


def test_the_history_of_a_canvas_follows_its_rows() -> None:
    first, second = canvas_of([[1, 2, 3], [4]]), canvas_of([[5, 6, 7, 8, 9]])
    joined = first.joined(second, (2, 1))
    assert joined.history.prompts.tolist() == [[-1, -1, 1, 2, 3], [-1, -1, -1, -1, 4], [5, 6, 7, 8, 9]]
    assert joined.part([1, 0], 3).history.prompts.tolist() == [[-1, -1, -1, -1, 4], [-1, -1, 1, 2, 3]]


class ByNode(LogitsProcessor):
    """Hides a list from the vectorized way, so that the host calls it for every node."""

    def __init__(self, processors: LogitsProcessorList) -> None:
        self.processors = processors

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return self.processors(input_ids, scores)


def lists_for(prompts: Sequence[Sequence[int]]) -> list[LogitsProcessorList]:
    """Lists that differ by row, with effects at the begin, along the output and at its end."""
    rows = [
        [lp.RepetitionPenaltyLogitsProcessor(1.7), lp.NoRepeatNGramLogitsProcessor(3)],
        [
            lp.ForcedBOSTokenLogitsProcessor(1),
            lp.SequenceBiasLogitsProcessor({(5,): 2.0, (7,): 1.0}),
            lp.RepetitionPenaltyLogitsProcessor(1.3, len(prompts[1])),
            lp.MinNewTokensLengthLogitsProcessor(len(prompts[1]), 9, [3, 17, 40]),
        ],
        [],
    ]
    return [LogitsProcessorList(each) for each in rows]


def head(target: CausalTarget) -> Drafter:
    return GrownTreeDrafter(head_for(target), num_draft_tokens=6, depth=2, top_k=2).fit(target)


DRAFTERS: dict[str, Callable[[CausalTarget], Drafter]] = {
    "none": lambda target: NoDrafter(),
    "copy": lambda target: CopyDrafter(6, min_match=1),
    "tree": lambda target: RandomTreeDrafter(6, target.vocabulary),
    "eagle": head,
}


@pytest.mark.parametrize("ahead", [False, True], ids=["", "ahead"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.every(3)
def test_outputs_are_those_of_calls_by_node(
    name: str, temperature: float, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "runs_by_itself", lambda device: ahead)
    target, lists, seeds, late = CausalTarget(tiny_llama()), lists_for(PROMPTS), [5, 6, 7], set[int]()

    def run(prompts: Sequence[Any], processors: Sequence[LogitsProcessorList], seeds: list[int]) -> list[Any]:
        drafter, sampler = DRAFTERS[name](target), Sampler(temperature, processors=processors)
        how = {"sampler": sampler, "max_new_tokens": 24, "seed": seeds, "end": [3, 17, 40]}
        return decode(target, prompts, drafter, **how, watch=lambda canvas: late.add(canvas.unread)).outputs

    found = run(PROMPTS, lists, seeds)
    assert (1 in late) == (ahead and name in ("none", "eagle"))
    late.clear()
    assert found == run(PROMPTS, [LogitsProcessorList([ByNode(each)]) for each in lists], seeds)
    assert late == {0}, "the host knows all tokens when it calls processors"
    assert found != run(PROMPTS, [LogitsProcessorList()] * 3, seeds)
    alone = [run([prompt], [each], [seed]) for prompt, each, seed in zip(PROMPTS, lists, seeds, strict=True)]
    assert found == [output for row in alone for output in row]
