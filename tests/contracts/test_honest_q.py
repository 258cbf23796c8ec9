"""Honest q: drafts state the distribution that their tokens were drawn from, even with many ties.

Logits have few levels, so that under top-k the k-th is mostly one of several equals. Of all rows in a round,
a token v at a node comes as often as the sum of their q(v): whatever the rows' contexts are, and also in
later rounds, which draw anew with what was kept of the round before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from mmspec.accelerator import default_rule
from mmspec.core import cache
from mmspec.core.canvas import Canvas
from mmspec.core.distributions import Scores
from mmspec.core.draft import Draft, DraftKind, Tree
from mmspec.core.image_grid import ImageGrid
from mmspec.core.indexing import pick
from mmspec.core.interfaces import Drafter, DraftSession, PromptOutput, Request, TargetOutput
from mmspec.core.plain import NoDrafter
from mmspec.core.random_stream import RandomStream
from mmspec.core.sampling import Sampler
from mmspec.core.verdict import Path
from mmspec.kernels import Warping
from mmspec.methods.cjd.drafter import CorrectedDrafter
from mmspec.methods.dflash.drafter import DFlashDrafter
from mmspec.methods.draft_model.drafter import DraftModelDrafter
from mmspec.methods.zipar.drafter import StaircaseDrafter
from mmspec.plugins import METHODS
from mmspec.trees.jacobi import JacobiDrafter
from mmspec.trees.jacobi_session import JacobiSession
from tests.contracts.running import FanOutTarget, decode
from tests.contracts.test_drafters import HEADS, OF_PLACES, OF_VECTORS, REGISTERED
from tests.methods import corrected_checks
from tests.methods.dflash_checks import head_for
from tests.tiny_models import tiny_lm_v8

PROMPT, ROWS, LENGTH = (3, 1, 4), 600, 9
GRID = ImageGrid(rows=3, columns=3, codebook_size=8)
STEP = 2.0  # between levels of logits
# Some thousand sums in all, each nearly normal where it counts: one false alarm in 10^4 suites is at |z| = 6.
ALARM = 6.0
SAMPLED = frozenset({DraftKind.IID, DraftKind.WITHOUT_REPLACEMENT})


class CoarseSampler(Sampler):
    """Rounds all logits of targets and drafters to a few levels before warping."""

    def _scores(self, logits: Tensor, warping: Warping, shape: Sequence[int]) -> Scores:
        return super()._scores((logits / STEP).round() * STEP, warping, shape)


@functools.cache
def target_of(seed: int = 4) -> FanOutTarget:
    """A language model whose eight words are codes."""
    target = FanOutTarget(tiny_lm_v8(seed=seed))
    target.grid = GRID
    return target


def draft_model(sampling: str, tree: str | None = None) -> Drafter:
    return DraftModelDrafter(target_of(seed=5), None if tree else 3, sampling, tree)


def head(kind: str, sampling: str, tree: str) -> Drafter:
    drafter, build = HEADS[kind]
    return drafter(build(target_of()), tree=tree, sampling=sampling).fit(target_of())


def cjd(**options: Any) -> Drafter:
    head = corrected_checks.head_for(target_of())
    return CorrectedDrafter(head, **{"window": 4, "corrected": 3, **options}).fit(target_of())


TREE: dict[str, Any] = {"front": (2, 2), "reach": 2}
DRAFTS: dict[str, Callable[[], Drafter]] = {
    "draft_model": lambda: draft_model("sampled"),
    "draft_model, chains": lambda: draft_model("sampled", "3x1x1"),
    "draft_model, tree": lambda: draft_model("without_replacement", "3x2"),
    "eagle": lambda: head("eagle", "sampled", "3x1x1"),
    "eagle, static": lambda: head("eagle", "without_replacement", "eagle"),
    "eagle3": lambda: head("eagle3", "without_replacement", "2x2"),
    "dflash": lambda: head("dflash", "sampled", "1x1x1"),
    "dflash, two": lambda: DFlashDrafter(
        head_for(target_of(), "dflash, two"), tree="1x1x1", sampling="sampled"
    ).fit(target_of()),
    "dflash, lilicorr": lambda: DFlashDrafter(
        head_for(target_of(), "dflash, lilicorr"), tree="1x1x1", sampling="sampled"
    ).fit(target_of()),
    "dspark": lambda: head("dspark", "sampled", "3x1x1"),
    "medusa": lambda: head("medusa", "sampled", "2x2"),
    "hydra": lambda: head("hydra", "without_replacement", "2x2"),
    "sjd": lambda: JacobiDrafter(4),
    "sjd, fresh": lambda: JacobiDrafter(4, "fresh"),
    "sjd, gumbel": lambda: JacobiDrafter(4, "gumbel"),
    "sjd, uniform": lambda: JacobiDrafter(4, init="uniform"),
    "sjd, tree": lambda: JacobiDrafter(4, **TREE),
    "cjd": cjd,
    "cjd, gumbel": lambda: cjd(coupling="gumbel"),
    "cjd, tree": lambda: cjd(corrected=2, **TREE),
    "zipar": lambda: StaircaseDrafter(2, adaptive=True),
}


class Counted(Drafter, DraftSession):
    """A drafter whose drafts are compared with their q, round by round.

    Attributes:
        worst: the largest |z| of a token's count, and where it was.
        compared: candidates.
    """

    def __init__(self, inner: Drafter) -> None:
        self.inner, self.kind, self.max_nodes, self.taps = inner, inner.kind, inner.max_nodes, inner.taps
        self.branches, self.exactness = inner.branches, inner.exactness
        self.worst, self.compared, self.rounds = (0.0, ""), 0, 0

    def start(
        self, requests: Sequence[Request], prefill: PromptOutput, sampler: Sampler, random: RandomStream
    ) -> DraftSession:
        self.session = self.inner.start(requests, prefill, sampler, random)
        return self

    def open(self, canvas: Canvas) -> Draft:
        return self.session.open(canvas)

    def propose(self, canvas: Canvas) -> Draft:
        draft = self.session.propose(canvas)
        self.rounds += 1
        lanes = draft.lanes
        q = lanes.q.p
        assert torch.allclose(q.sum(-1)[lanes.valid[:, 1:]], q.new_ones(()))
        going = torch.tensor([length < LENGTH for length in canvas.output_lengths])
        going = going.repeat_interleave(len(lanes.tokens) // len(draft.tokens))
        for node in range(1, lanes.tokens.shape[1]):
            self.compare(lanes, q, node, going & lanes.valid[:, node])
        return draft

    def compare(self, draft: Tree, q: Tensor, node: int, counted: Tensor) -> None:
        q, x = q[counted, node - 1], draft.tokens[counted, node : node + 1]
        if not len(q):
            return
        if (
            draft.kind is DraftKind.WITHOUT_REPLACEMENT
        ):  # the older siblings are gone; parents are those of all
            older = [k for k in range(1, node) if draft.parents[0, k] == draft.parents[0, node]]
            q = q.scatter(1, draft.tokens[counted][:, older], 0.0)
            q = q / q.sum(-1, keepdim=True)
        assert (q.gather(1, x) > 0).all(), "a token that its q excludes"
        self.compared += len(q)
        order = q.argsort(dim=1, descending=True, stable=True)
        for by, hits, due in (
            ("token", torch.zeros_like(q).scatter(1, x, 1.0), q),
            ("rank", (order == x).to(q.dtype), q.gather(1, order)),
        ):
            variance = (due * (1 - due)).sum(0)
            z = ((hits - due).sum(0).abs() / variance.clamp_min(20.0).sqrt()).max()
            self.worst = max(self.worst, (float(z), f"{by}, node {node}, round {self.rounds}"))

    def observe(self, draft: Tree, output: TargetOutput, scores: Any, verdict: Path) -> None:
        self.session.observe(draft, output, scores, verdict)
        if not isinstance(self.session, JacobiSession):
            return
        kept, q = self.session.observed.draft.q.p, draft.q.p  # of the chain that goes on
        if self.inner.branches:
            q = pick(q, self.session._path(verdict)[:, 1:] - 1)
        assert (kept - q).abs().max() < 1e-6, "the next round is coupled with another q"


def run(drafter: Drafter, sampler: Sampler, rows: int, seed: int | Sequence[int] = 7) -> list[list[int]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "CAPACITY_BLOCK", 16)
        rule = default_rule(drafter)
        out = decode(
            target_of(), [PROMPT] * rows, drafter, rule, sampler, max_new_tokens=LENGTH, seed=seed, grid=GRID
        )
    return out.outputs


@pytest.mark.parametrize("name", DRAFTS)
@torch.inference_mode()
@pytest.mark.every(6)
def test_tokens_of_a_draft_come_as_often_as_its_q_says(name: str) -> None:
    for sampler in (CoarseSampler(1.0, top_k=1), CoarseSampler(0.8, top_k=3, top_p=0.9)):
        counted = Counted(DRAFTS[name]())
        run(counted, sampler, ROWS)
        assert counted.compared > ROWS / 2 and counted.worst[0] < ALARM, counted.worst


def test_every_drafter_that_samples_is_counted_here() -> None:
    made = {name: REGISTERED[name](3, torch.float64) for name in REGISTERED}
    sampling = {name.split(",")[0] for name in made if made[name].kind in SAMPLED}
    # joint distributions of these are tested beside them; the windows of two rules are those of `sjd`
    others = {"assistant", "self_speculation", "ppd", "gsd", "lantern"}
    unregistered = (
        set(METHODS) - {name.split(",")[0] for name in REGISTERED} - OF_PLACES - OF_VECTORS - others
    )
    assert {name.split(",")[0] for name in DRAFTS} == sampling | unregistered | {"zipar"}


@pytest.mark.parametrize("name", ["sjd", "sjd, tree", "cjd"])
@torch.inference_mode()
def test_equals_are_parted_in_a_batch_as_they_are_alone(name: str) -> None:
    """Rows with different top-k: the tokens that one row keeps do not affect the others."""
    drafter, seeds = DRAFTS[name](), (3, 5, 8, 9)
    temperatures, counts = (1.0, 0.8, 0.9, 0.0), (2, 3, 0, 1)
    together = run(drafter, CoarseSampler(temperatures, top_k=counts), 4, seeds)
    for row in range(4):
        alone = CoarseSampler(temperatures[row], top_k=counts[row])
        assert run(drafter, alone, 1, seeds[row : row + 1]) == [together[row]]


@torch.inference_mode()
def test_the_targets_own_noise_gives_the_tokens_of_plain_decoding_among_equals() -> None:
    sampler = CoarseSampler(1.0, top_k=3)
    expected = run(NoDrafter(), sampler, 50)
    windows = (JacobiDrafter(4, "exact"), cjd(coupling="exact"))
    for drafter in (*windows, draft_model("coupled")):
        assert run(drafter, sampler, 50) == expected
