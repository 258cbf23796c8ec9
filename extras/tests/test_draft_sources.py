"""Superposed drafts, draft graphs and drafts from the target: exact outputs, and drafts without a cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mmspec.accelerators import build_accelerator
from mmspec.core.canvas import Canvas, Stopping
from mmspec.core.decoder import Decoder
from mmspec.core.draft import DraftKind, Tree
from mmspec.core.interfaces import Drafter
from mmspec.core.loop import speculate
from mmspec.core.random_stream import RandomStream
from mmspec.core.sampling import Sampler
from mmspec.core.statistics import DecodingStats
from mmspec.core.verdict import Path
from mmspec.errors import InputError
from mmspec.targets import CausalTarget
from mmspec.trees.matching import SampleAndMatch
from mmspec.trees.rejection import RecursiveRejection
from mmspec_extras.methods.graph_drafts.drafter import DraftGraph, GraphDrafter, GraphSession
from mmspec_extras.methods.superposed.drafter import SuperposedDrafter
from mmspec_extras.methods.target_start.drafter import TargetStartDrafter
from tests.contracts.checks import PROMPTS, check_words, llama, precise
from tests.contracts.running import FanOutTarget, as_request, decode, generate
from tests.contracts.test_drafters import SAMPLER, inspected, neighbour, sampled_answers
from tests.tiny_models import tiny_lm_v8

TOKENS = 24
DRAFTERS: dict[str, Callable[[CausalTarget], Drafter]] = {
    "superposed": lambda model: SuperposedDrafter(model, 4, 3),
    "graph_drafts": lambda model: GraphDrafter(model, 12, 3, 3, 0, 0.0, 0.05),
    "graph_drafts, unmerged": lambda model: GraphDrafter(model, 12, 3, 3, -1, 0.0, 0.05),
    "target_start": lambda model: TargetStartDrafter(model, "3x1x1").stopping_below(0.05),
}


def rounds(drafter: Drafter) -> list[tuple[list[list[int]], Any]]:
    """The drafts of a greedy ragged batch, each with the texts that it continues."""
    target, texts, found = llama(), [list(prompt) for prompt in PROMPTS], []
    canvas = Canvas([list(prompt) for prompt in PROMPTS], Stopping(TOKENS), DecodingStats(), target.device)
    requests = [as_request(prompt) for prompt in PROMPTS]
    stream = RandomStream.from_seed(0, len(PROMPTS))
    decoder = Decoder(drafter.fit(target), SampleAndMatch())
    for step in speculate(target, decoder, Sampler(), requests, canvas, stream):
        found.append((texts, step.draft))
        texts = [list(ids) for ids in canvas.ids]
    return found


@pytest.mark.parametrize("name", DRAFTERS)
def test_outputs_are_those_of_generate_and_of_plain_sampling(name: str) -> None:
    drafter = inspected(DRAFTERS[name](neighbour(torch.float32)), TOKENS)
    run = decode(llama(), PROMPTS, drafter, max_new_tokens=TOKENS)
    assert run.outputs == [generate(llama().model, prompt, TOKENS) for prompt in PROMPTS]
    assert 0.1 < run.stats.acceptance_rate < 1
    drafter = inspected(DRAFTERS[name](neighbour(torch.float64)), TOKENS)
    for order in ([0, 1, 2], [2, 0]):
        prompts, seeds = [PROMPTS[row] for row in order], [(7, 8, 9)[row] for row in order]
        how: Any = {"sampler": SAMPLER, "max_new_tokens": TOKENS, "seed": seeds}
        run = decode(precise(), prompts, drafter, **how)
        assert run.outputs == [sampled_answers()[tuple(prompt)] for prompt in prompts]


def log_probabilities(model: CausalTarget, text: list[int], embedded: list[Tensor]) -> Tensor:
    """[V] after a text and further embeddings [d], without a cache."""
    inputs = torch.cat([model.embed(torch.tensor(text)), *[each[None] for each in embedded]])[None]
    logits: Tensor = model.model(inputs_embeds=inputs, use_cache=False).logits
    return logits[0, -1].log_softmax(-1)


@torch.inference_mode()
def test_superposed_chains_are_those_of_a_search_over_mean_embeddings() -> None:
    """Every chain of three, in every round, compared with forward passes without a cache."""
    model, compared = neighbour(torch.float32), 0
    for texts, draft in rounds(SuperposedDrafter(model, 3, 3, ngram_weight=0.0))[1:]:
        for row, text in enumerate(texts):
            if len(text) >= len(PROMPTS[row]) + TOKENS:
                continue
            beams, read, expected = [(0.0, ())], [], []
            for _ in range(3):
                log_p = log_probabilities(model, text, read)
                likeliest = log_p.topk(9).indices.tolist()
                continued = [
                    (score + float(log_p[token]), (*path, token))
                    for score, path in beams
                    for token in likeliest
                ]
                beams = sorted(continued, reverse=True)[:3]
                expected += [path for _, path in beams]
                weights = torch.tensor([score for score, _ in beams]).softmax(-1)
                read.append(weights @ model.embed(torch.tensor([path[-1] for _, path in beams])))
            assert sorted(paths_of(draft, row)) == sorted(expected)
            compared += 1
    assert compared > 12


def paths_of(draft: Any, row: int) -> list[tuple[int, ...]]:
    """The path to every valid candidate of a row."""
    found: list[tuple[int, ...]] = [()]
    rows = draft.tokens[row].tolist(), draft.parents[row].tolist()
    for token, parent in [*zip(*rows, strict=True)][1:]:
        found.append((*found[parent], token))
    return [path for path, valid in zip(found, draft.valid[row].tolist(), strict=True) if valid and path]


@torch.inference_mode()
def test_unmerged_graphs_hold_the_likeliest_paths_of_the_draft_model() -> None:
    model, compared = neighbour(torch.float32), 0
    for texts, draft in rounds(GraphDrafter(model, 10, 2, 3, -1, 0.0, 0.01))[1:]:
        for row, text in enumerate(texts):
            if len(text) >= len(PROMPTS[row]) + TOKENS:
                continue
            paths = {(): 0.0}
            for above in [(), *paths_of(draft, row)]:
                if len(above) < 2 and above in paths:
                    log_p = log_probabilities(model, [*text, *above], [])
                    for token in log_p.topk(3).indices.tolist():
                        score = paths[above] + float(log_p[token])
                        if score >= torch.tensor(0.01).log():
                            paths[(*above, token)] = score
            best = sorted(filter(None, paths), key=lambda path: -paths[path])[:10]
            assert sorted(paths_of(draft, row)) == sorted(best)
            compared += 1
    assert compared > 12


@torch.inference_mode()
def test_level_1_is_what_the_target_said_after_the_candidate_that_it_rejected() -> None:
    model, before, compared = neighbour(torch.float32), None, [0, 0]
    for texts, draft in rounds(TargetStartDrafter(model, "3x1", share=1.0)):
        for row, text in enumerate(texts):
            if before is not None and len(text) < len(PROMPTS[row]) + TOKENS:
                old, paths = before[0][row], paths_of(before[1], row)
                accepted = tuple(text[len(old) : -1])
                rejected = [path for path in paths if path[:-1] == accepted]
                asked, read = (llama(), [*old, *rejected[0]]) if rejected else (model, text)
                expected = log_probabilities(asked, read, []).topk(3).indices.tolist()
                assert [path[0] for path in paths_of(draft, row) if len(path) == 1] == expected
                compared[bool(rejected)] += 1
        before = texts, draft
    assert min(compared) > 2


def test_drafts_end_where_the_row_has_less_success_than_its_draft_model_expects() -> None:
    drafter, depths = TargetStartDrafter(neighbour(torch.float32), "2x1x1x1"), []
    for least in (0.0, 0.2, 1.0):
        depths.append([step.max_depth for _, step in rounds(drafter.stopping_below(least))[1:]])
    assert set(depths[0]) == {4} and set(depths[2]) == {1} and 1 < sum(depths[1]) / len(depths[1]) < 4
    session: Any = drafter.session
    session = session.__new__(session)
    session.paths, session.levels = torch.tensor([[0.0, -0.5, -0.7]]), torch.tensor([[4.0, 5.0]])
    draft = Tree.chain(torch.tensor([[1, 2, 3]]), DraftKind.POINT)
    session._count(draft, Path.at(draft, torch.tensor([1]), torch.tensor([9])))
    expected = 5 + (torch.tensor([-0.5, -0.2]).exp() * 5 / 4).clamp_max(1).sum()
    assert torch.allclose(session.levels, torch.tensor([[5.0, float(expected)]]))


@pytest.mark.parametrize("sampling", ["sampled", "without_replacement"])
def test_rejection_of_mixed_candidates_keeps_the_distribution(sampling: str) -> None:
    target, small = FanOutTarget(tiny_lm_v8()), FanOutTarget(tiny_lm_v8(seed=5))
    drafter = TargetStartDrafter(small, "2x1", sampling, 0.7)
    check_words(target, drafter, RecursiveRejection(), Sampler(1.0), 4000, length=4)


def test_merging_computes_less_and_every_path_stays() -> None:
    """Two synonyms before the same continuation: six paths of four vertices instead of six."""
    level = [[(5, -0.5), (6, -1.0)], [(7, -0.1), (8, -2.5)], [(7, -0.2), (9, -2.0)]]
    sizes, trees = [], []
    for repeat in (0, 1, -1):
        graph = DraftGraph(repeat)
        graph.grow(level[:1])
        graph.grow(level[1:])
        sizes.append(len(graph.newest))
        trees.append(graph.unroll(20))
    assert sizes == [3, 4, 4] and trees[0] == trees[1] == trees[2]
    assert trees[0] == [(5, 0), (7, 1), (6, 0), (7, 3), (8, 1), (9, 3)]
    assert graph.unroll(3) == trees[0][:3]


def test_merged_drafts_read_fewer_vertices() -> None:
    sessions: list[GraphSession] = []

    class Counted(GraphDrafter):
        def start(self, *args: Any) -> Any:
            sessions.append(super().start(*args))  # type: ignore[arg-type]
            return sessions[-1]

    for repeat in (0, -1):
        rounds(Counted(neighbour(torch.float32), 12, 4, 4, repeat, 0.0, 0.002))
    assert 0 < sessions[0].vertices < sessions[1].vertices


def test_bad_options_are_refused() -> None:
    model = neighbour(torch.float32)
    for name, options in {
        "superposed": {"drafts": 0, "ngram_weight": 2.0},
        "target_start": {"share": 1.5},
        "graph_drafts": {"siblings": 0, "repeat": -2, "least_share": -1.0, "least_path": 0.0},
    }.items():
        for option, value in options.items():
            with pytest.raises(InputError, match=option):
                build_accelerator(name, model, **{option: value})
        if name != "target_start":
            with pytest.raises(InputError, match="length"):
                build_accelerator(name, model, length="confidence")
