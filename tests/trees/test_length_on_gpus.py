"""Draft lengths chosen by the times of a simulated GPU: no synchronisation, few graphs, the same tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from benchmarks.launches import Served
from benchmarks.simulated_gpu import Counts, SimulatedGPU, Step
from mmspec.accelerator import Accelerator, Call, pair
from mmspec.core.canvas import Stopping
from mmspec.core.interfaces import AcceptanceRule, Drafter
from mmspec.core.random_stream import RandomStream
from mmspec.core.sampling import Sampler
from mmspec.heads.feature_session import GrownTreeDrafter
from mmspec.methods.copy.drafter import CopyDrafter
from mmspec.methods.draft_model.drafter import DraftModelDrafter
from mmspec.methods.eagle3.drafter import Eagle3Drafter
from mmspec.methods.eagle3.head import ParallelConfig, ParallelHead
from mmspec.methods.flash.drafter import FlashDrafter
from mmspec.pipelines.running_batch import RunningBatch
from mmspec.targets.causal import CausalTarget
from mmspec.targets.steps import CapturedForward
from mmspec.trees.growth import DynamicTree, smaller_trees
from mmspec.trees.matching import SampleAndMatch
from tests.contracts.checks import PROMPTS
from tests.contracts.running import Run, as_request, decode, random_prompts
from tests.contracts.test_late_reading import same
from tests.methods import dflash_checks, eagle3_checks, eagle_checks, flash_checks, heads_checks, test_ppd
from tests.methods.eagle_checks import WORDS, Gullible
from tests.tiny_models import tiny_lm
from tests.trees.length_checks import paced

#: Sizes, and rests of which some are longer than what a head keeps.
PACE = (0, 1, 0, 0, 2, 3, *[0] * 10, 1)
TREE: dict[str, Any] = {"num_draft_tokens": 12, "depth": 4, "top_k": 3}
DRAFTERS: dict[str, Callable[[CausalTarget], Drafter]] = {
    "draft_model": lambda target: DraftModelDrafter(words(5), 4),
    "draft_model, masks": lambda target: DraftModelDrafter(masked(), 4),
    "peagle": lambda target: Eagle3Drafter(parallel(target), **TREE).fit(target),
    "flash": lambda target: FlashDrafter(flash_checks.head_for(target), **TREE).fit(target),
    "eagle": lambda target: GrownTreeDrafter(eagle_checks.head_for(target), **TREE).fit(target),
    "eagle3": lambda target: Eagle3Drafter(eagle3_checks.head_for(target), **TREE).fit(target),
    "dflash": lambda target: dflash_checks.drafter_for(target, num_draft_tokens=4),
    "medusa": lambda target: heads_checks.drafter_for("medusa", target, **TREE),
    "hydra": lambda target: heads_checks.drafter_for("hydra", target, **TREE),
    "ppd": lambda target: test_ppd.drafter_for(target),
    "copy": lambda target: CopyDrafter(8, min_match=1),
}
CALLS: list[dict[str, Any]] = [
    {"sampler": Sampler(0.9, top_p=0.95), "seed": [7, 8, 9]},
    {"sampler": Sampler(), "end": (1,)},
]


def words(seed: int = 21) -> CausalTarget:
    """A float64 model of few tokens, which random drafts get right now and then."""
    return CausalTarget(tiny_lm(vocab=WORDS, seed=seed))


def masked() -> CausalTarget:
    """A parallel draft model, which reads all committed tokens again after masks."""
    model = tiny_lm(vocab=WORDS, seed=5)
    model.config.pard_token = WORDS - 1
    return CausalTarget(model)


def parallel(target: CausalTarget) -> ParallelHead:
    """A head of P-EAGLE of random weights."""
    config = ParallelConfig.for_target(target.config, target.vocabulary, mask_token=3, own_embedding=True)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return ParallelHead(config).to(target.dtype).eval().requires_grad_(False)


def captured(target: CausalTarget) -> CausalTarget:
    target.steps = CapturedForward(target.model, target._step)
    return target


def calls(target: CausalTarget, drafter: Drafter | None, rule: AcceptanceRule) -> list[Run]:
    prompts = random_prompts(3, WORDS, longest=6, seed=4)
    return [decode(target, prompts, drafter, rule, max_new_tokens=40, **call) for call in CALLS]


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.every(11)
def test_drafts_of_any_sizes_and_rests_are_replayed(name: str) -> None:
    """The tokens are those of plain decoding, and the drafts those of a head that has read all tokens."""
    gullible, matches = Gullible(), SampleAndMatch()
    expected = calls(words(), None, matches)
    with SimulatedGPU() as gpu:
        launched = paced(DRAFTERS[name](words()), PACE)
        eager = calls(words(), launched, gullible)
        target = captured(words())
        inner = DRAFTERS[name](target)
        inner.compile()
        replayed = paced(inner, PACE)
        assert all(map(same, calls(target, replayed, gullible), eager))
        measured = [len(each.policies[3].rounds) for each in (replayed, launched)]  # type: ignore[union-attr]
        for _ in range(2):
            gpu.take()
            found = calls(target, replayed, matches)
            assert [run.outputs for run in found] == [run.outputs for run in expected]
        counts = gpu.take()
    accepted, rounds = (
        sum(sum(getattr(run.stats, name)) for run in eager) for name in ("accepted", "rounds")
    )
    assert accepted > rounds / 25
    if name not in ("copy", "ppd"):  # which the host has a part in
        assert counts.captures <= 2 and counts.replays > 60
        assert measured[0] < measured[1] - 4, "rounds that are captured do not count"


def test_trees_get_smaller_down_to_one_candidate() -> None:
    sizes = [
        (each.num_draft_tokens, each.depth, each.top_k) for each in smaller_trees(DynamicTree(59, 6, 10))
    ]
    assert sizes == [(59, 6, 10), (15, 3, 10), (4, 2, 4), (1, 1, 1)]
    for tree in (DynamicTree(5, 5, 1), DynamicTree(250, 64, 2), DynamicTree(7, 1, 7)):
        *_, last = smaller_trees(tree)
        assert last == DynamicTree(1, 1, 1)


@dataclass
class Heads:
    """Seconds of launches: those that read an output matrix take their time, the others none.

    Attributes:
        target, draft: of the target's forward passes, and of those of the draft model.
        free: number of nodes that the target computes in that time; more take longer.
    """

    target: float = 1.0
    draft: float = 0.1
    free: int = 8
    matrices: dict[int, str] = field(default_factory=dict)

    def __call__(self, step: Step) -> float:
        _, args, kwargs, out = step
        read = (x.data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor))
        name = next((self.matrices[place] for place in read if place in self.matrices), "")
        if name == "target":
            return self.target * max(1.0, out.flatten(0, -2).shape[0] / self.free)
        return self.draft if name == "draft" else 0.0


def drafting(cost: Heads, target: CausalTarget) -> Accelerator:
    """A draft model that is always right, of four tokens at most."""
    drafter = DraftModelDrafter(CausalTarget(tiny_lm()), 4)
    drafter.compile()
    for name, model in (("target", target.model), ("draft", drafter.model.model)):
        cost.matrices[model.get_output_embeddings().weight.data_ptr()] = name
    return pair("draft_model", drafter).fit(target).with_length("cost")


def test_a_draft_that_does_not_pay_rests_and_comes_back() -> None:
    cost = Heads(draft=2.0)
    with SimulatedGPU(cost) as gpu:
        target = captured(CausalTarget(tiny_lm()))
        accelerator = drafting(cost, target)
        drafter = accelerator.decoder_of_any.drafter

        def rounds(tokens: int) -> Iterator[tuple[int, Counts]]:
            request, random = as_request(PROMPTS[0]), RandomStream.from_seed(0, 1)
            call = accelerator.call(target, Sampler(), [request], Stopping(tokens), random)
            for step in call.rounds():
                yield len(step.emission.tokens[0]), gpu.take()

        for _ in drafter.rehearse(target.device):
            list(islice(rounds(60), 5))
        dear = list(rounds(120))[1:]
        cost.draft = 0.1
        cheap = list(rounds(800))[1:]
    tokens = [count for count, _ in dear]
    assert max(tokens) > 1, "drafts were tried"
    assert sum(count > 1 for count in tokens[20:]) <= 3, "pauses are long"
    assert [count for count, _ in cheap][-40:-1].count(5) > 36, "the longest drafts pay best"
    counts = [each for _, each in dear[1:] + cheap[1:]]
    assert all(each.captures == 0 and each.replays == 1 for each in counts)
    assert all(each.reads == 1 and each.copies == 0 and each.outside_graphs <= 12 for each in counts)


class Long(Served):
    """Requests of many tokens."""

    def _call(self, prompt: int) -> Call:
        random = RandomStream.from_seed(prompt, 1, self.target.device)
        return self.accelerator.call(self.target, Sampler(), self.requests_of(prompt), Stopping(900), random)


def test_drafts_rest_in_a_running_batch_of_many_rows_and_not_of_few() -> None:
    cost, drafted = Heads(draft=0.1), dict[int, float]()
    with SimulatedGPU(cost) as gpu:
        target = captured(CausalTarget(tiny_lm()))
        served: Any = Long(target, drafting(cost, target), [Sampler()], context=5)
        with RunningBatch(served, 8) as batch:
            batch.capture()
            for rows in (1, 2, 4, 8):
                while len(batch.handles) < rows:
                    batch.enter(len(batch.handles))
                batch.step()
                gpu.take()
                for _ in range(2):
                    before = batch.stats
                    for _ in range(20):
                        batch.step()
                        counts = gpu.take()
                        assert counts.captures == 0 and counts.reads == 1 and counts.outside_graphs <= 12
                rounds = sum(batch.stats.rounds) - sum(before.rounds)
                drafted[rows] = (sum(batch.stats.drafted) - sum(before.drafted)) / rounds
    assert drafted[1] > 3.5 and drafted[2] > 3.5, "whole drafts cost little more than plain rounds"
    assert 0.5 < drafted[4] < 2, "only short drafts do"
    assert drafted[8] < 0.3
