"""The contract of every registered drafter; the oracles of the tests run along as the extremes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from mmspec.decoding.canvas import Canvas
from mmspec.decoding.draft import Draft, DraftKind, check_tree
from mmspec.decoding.interfaces import Drafter, DraftSession, Request, TargetOutput
from mmspec.decoding.random_stream import RandomStream
from mmspec.decoding.sampling import Sampler
from mmspec.drafters import DRAFTERS
from mmspec.drafters.corrected import CorrectedDrafter
from mmspec.drafters.dflash import DFlashDrafter, DSparkDrafter
from mmspec.drafters.eagle import Eagle3Drafter, EagleDrafter, MtpDrafter
from mmspec.drafters.flash import FlashDrafter
from mmspec.drafters.level_heads import HydraDrafter, MedusaDrafter
from mmspec.targets import CausalTarget
from tests.contracts.checks import PROMPTS, VOCABULARY, llama, precise
from tests.contracts.running import decode, futures, generate, random_prompts
from tests.drafters import (
    corrected_checks,
    dflash_checks,
    eagle3_checks,
    flash_checks,
    heads_checks,
    mtp_checks,
)
from tests.drafters.eagle_checks import head_for
from tests.drafters.length_checks import paced
from tests.oracles import AdversarialDrafter, OracleDrafter, RandomTreeDrafter
from tests.tiny_models import tiny_llama, tiny_lm

MANY = random_prompts(20, seed=1)
SAMPLER = Sampler(temperature=0.9, top_p=0.95)
LENGTHS = (1, 2, 3, 8)


@functools.cache
def greedy_answers() -> list[list[int]]:
    return [generate(llama().model, prompt) for prompt in MANY]


@functools.cache
def sampled_answers() -> dict[tuple[int, ...], list[int]]:
    return futures(precise(), PROMPTS, SAMPLER, max_new_tokens=40, seed=[7, 8, 9])


@functools.cache
def neighbour(dtype: torch.dtype) -> CausalTarget:
    """The target with a little noise on its weights: a draft model that is often right."""
    model = tiny_llama() if dtype == torch.float32 else tiny_lm()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.03 * torch.randn(parameter.shape, generator=generator, dtype=dtype)
    return CausalTarget(model)


def eagle(dtype: torch.dtype, **shape: Any) -> Drafter:
    """A head of random weights for the target of that dtype."""
    target = llama() if dtype == torch.float32 else precise()
    return EagleDrafter(head_for(target), **shape).fit(target)


def eagle3(dtype: torch.dtype, **shape: Any) -> Drafter:
    """A head of random weights that knows half of the words of the target of that dtype."""
    target = llama() if dtype == torch.float32 else precise()
    head = eagle3_checks.head_for(target, draft_vocabulary=VOCABULARY // 2)
    return Eagle3Drafter(head, **shape).fit(target)


def mtp(dtype: torch.dtype, **shape: Any) -> Drafter:
    """A head of random weights for the target of that dtype."""
    target = llama() if dtype == torch.float32 else precise()
    return MtpDrafter(mtp_checks.head_for(target), **shape).fit(target)


def dflash(dtype: torch.dtype, kind: str, length: int) -> Drafter:
    """A head of random weights for the target of that dtype, with blocks of that length."""
    target = llama() if dtype == torch.float32 else precise()
    head = dflash_checks.head_for(target, kind, block=length + kind.startswith("dflash"))
    return (DFlashDrafter if kind == "dflash" else DSparkDrafter)(head).fit(target)


def flash(dtype: torch.dtype, **shape: Any) -> Drafter:
    """A head of random weights for the target of that dtype."""
    target = llama() if dtype == torch.float32 else precise()
    return FlashDrafter(flash_checks.head_for(target), **shape).fit(target)


def medusa(dtype: torch.dtype, **shape: Any) -> Drafter:
    """Heads of random weights for the target of that dtype."""
    target = llama() if dtype == torch.float32 else precise()
    return MedusaDrafter(heads_checks.medusa_for(target), **shape).fit(target)


def hydra(dtype: torch.dtype, settings: dict[str, Any] | None = None, **shape: Any) -> Drafter:
    """Heads of random weights for the target of that dtype."""
    target = llama() if dtype == torch.float32 else precise()
    return HydraDrafter(heads_checks.hydra_for(target, **settings or {}), **shape).fit(target)


def cjd(dtype: torch.dtype, window: int, coupling: str = "maximal") -> Drafter:
    """A head of random weights for the target of that dtype."""
    target = llama() if dtype == torch.float32 else precise()
    head = corrected_checks.head_for(target)
    return CorrectedDrafter(head, window, min(window - 1, 5), coupling).fit(target)


# name -> builder(draft length, dtype of the target); a newly registered drafter needs a line here
REGISTERED: dict[str, Callable[[int, torch.dtype], Drafter]] = {
    "none": lambda length, dtype: DRAFTERS["none"](),
    "copy": lambda length, dtype: DRAFTERS["copy"](length, min_match=1),  # type: ignore[call-arg]
    "draft_model": lambda length, dtype: DRAFTERS["draft_model"](neighbour(dtype), length),  # type: ignore[call-arg]
    "draft_model, greedy": lambda length, dtype: DRAFTERS["draft_model"](  # type: ignore[call-arg]
        neighbour(dtype), length, "greedy"
    ),
    "draft_model, sampled": lambda length, dtype: DRAFTERS["draft_model"](  # type: ignore[call-arg]
        neighbour(dtype), length, "sampled"
    ),
    "eagle": lambda length, dtype: eagle(dtype, num_draft_tokens=length),
    "eagle3": lambda length, dtype: eagle3(dtype, num_draft_tokens=length),
    "mtp": lambda length, dtype: mtp(dtype, num_draft_tokens=length),
    "flash": lambda length, dtype: flash(dtype, num_draft_tokens=length),
    "flash, blocks in a row": lambda length, dtype: flash(
        dtype, num_draft_tokens=length, depth=length, top_k=min(2, length), block=3
    ),
    "dflash": lambda length, dtype: dflash(dtype, "dflash", length),
    "dspark": lambda length, dtype: dflash(dtype, "dspark", length),
    "dspark, tree": lambda length, dtype: DSparkDrafter(
        dflash_checks.head_for(llama() if dtype == torch.float32 else precise(), "dspark, rnn"),
        num_draft_tokens=length,
        depth=min(length, 4),
        top_k=min(length, 4),
    ).fit(llama() if dtype == torch.float32 else precise()),
    "medusa": lambda length, dtype: medusa(dtype, num_draft_tokens=length),
    "medusa, static": lambda length, dtype: medusa(dtype, tree=[0] * (length + 1)),
    "hydra": lambda length, dtype: hydra(dtype, num_draft_tokens=length),
    "hydra, without prefix attention": lambda length, dtype: hydra(
        dtype, {"prefix_attention": False}, num_draft_tokens=length
    ),
    "eagle, of changing sizes": lambda length, dtype: paced(eagle(dtype, num_draft_tokens=length)),
    "draft_model, of changing sizes": lambda length, dtype: paced(
        DRAFTERS["draft_model"](neighbour(dtype), length)  # type: ignore[call-arg]
    ),
    "eagle, static": lambda length, dtype: eagle(dtype, tree=[0, *range(length)]),
    "cjd": lambda length, dtype: cjd(dtype, length),
    "cjd, exact": lambda length, dtype: cjd(dtype, length, "exact"),
    "jacobi": lambda length, dtype: DRAFTERS["jacobi"](length),  # type: ignore[call-arg]
    "jacobi, exact": lambda length, dtype: DRAFTERS["jacobi"](length, "exact", "uniform"),  # type: ignore[call-arg]
    "jacobi, tree": lambda length, dtype: DRAFTERS["jacobi"](  # type: ignore[call-arg]
        length + 1, front=(4,), reach=1
    ),
}
ORACLES: dict[str, Callable[[int, torch.dtype], Drafter]] = {
    "oracle": lambda length, dtype: OracleDrafter(sampled_answers(), length, VOCABULARY),
    "oracle, 30 % wrong": lambda length, dtype: OracleDrafter(sampled_answers(), length, VOCABULARY, 0.3),
    "oracle tree": lambda length, dtype: OracleDrafter(
        sampled_answers(), length, VOCABULARY, 0.1, siblings=2
    ),
    "adversary": lambda length, dtype: AdversarialDrafter(sampled_answers(), length, VOCABULARY),
    "random trees": lambda length, dtype: RandomTreeDrafter(length + 1, VOCABULARY, hints=sampled_answers()),
}


class Inspected(Drafter, DraftSession):
    """A drafter whose drafts are examined on their way."""

    def __init__(self, inner: Drafter, limit: int) -> None:
        self.limit = limit
        self.inner, self.kind, self.max_nodes, self.taps = inner, inner.kind, inner.max_nodes, inner.taps

    def start(
        self, requests: Sequence[Request], prefill: TargetOutput, sampler: Sampler, random: RandomStream
    ) -> DraftSession:
        self.prompts = [len(request.prompt_tokens) for request in requests]
        self.session = self.inner.start(requests, prefill, sampler, random)
        return self

    def propose(self, canvas: Canvas) -> Draft:
        for row, tokens in enumerate(canvas.ids):
            if len(tokens) - self.prompts[row] < self.limit:  # what a finished row is told does not matter
                assert (
                    canvas.root[row] == tokens[-1] and canvas.emitted[row] == len(tokens) - self.prompts[row]
                )
        draft = self.session.propose(canvas)
        rows, nodes = draft.tokens.shape
        assert draft.kind is self.kind and nodes <= self.max_nodes and rows == len(canvas.ids)
        assert torch.equal(draft.tokens[:, 0], canvas.root) and draft.valid[:, 0].all()
        depths = [check_tree(parents) for parents in draft.parents.tolist()]
        assert draft.max_depth >= max(map(max, depths)) and torch.equal(draft.depth, torch.tensor(depths))
        assert int((draft.children >= 0).sum(-1).max()) <= draft.max_children
        assert self.inner.branches or draft.is_chain
        assert (draft.tokens >= 0).all() and (draft.tokens < VOCABULARY).all()
        assert (draft.q is None) == (draft.kind in (DraftKind.POINT, DraftKind.COUPLED))
        if draft.q is not None:
            assert torch.allclose(draft.q.p[:, 1:].sum(-1), torch.ones_like(draft.q.p[:, 1:, 0]))
            mass = draft.q.mass(draft.tokens)
            assert (mass > 0)[:, 1:][draft.valid[:, 1:]].all(), "no token that q excludes"
        return draft


def test_every_registered_drafter_is_tested_here() -> None:
    out_of_order = {"staircase", "unmasking"}  # have tests of their own: no other order gives plain output
    others = {"assistant", "ssd"}  # of one family of targets, of images alone
    vectors = {name for name in DRAFTERS if DRAFTERS[name].proposes == "vectors"}  # as those have
    assert {name.split(",")[0] for name in REGISTERED} == set(DRAFTERS) - out_of_order - vectors - others


@pytest.mark.parametrize("name", REGISTERED)
def test_greedy_output_is_that_of_generate_on_twenty_prompts(name: str) -> None:
    """20 ragged prompts of 64 tokens in one batch, and some of them alone."""
    drafter = REGISTERED[name](5, torch.float32)
    assert decode(llama(), MANY, drafter).outputs == greedy_answers()
    for row in (0, 7, 13):
        assert decode(llama(), [MANY[row]], drafter).outputs == [greedy_answers()[row]]


@pytest.mark.parametrize("name", REGISTERED)
def test_drafts_are_well_formed(name: str) -> None:
    for sampler in (Sampler(), SAMPLER):
        inspected = Inspected(REGISTERED[name](4, torch.float64), 24)
        decode(precise(), PROMPTS, inspected, sampler=sampler, max_new_tokens=24)


BUILDERS = REGISTERED | ORACLES
SHORT_AND_LONG = ((1, 8), (2, 32), (3, 32), (1, 3))  # of each builder one of these, which in turn


@pytest.mark.parametrize(
    ("name", "length"),
    [(name, length) for index, name in enumerate(BUILDERS) for length in SHORT_AND_LONG[index % 4]],
)
def test_sampling_is_bitwise_that_of_plain_decoding(name: str, length: int) -> None:
    """Gumbel-exact for drafts of any length, chains and trees, batches of one and of three."""
    drafter = BUILDERS[name](length, torch.float64)
    expected = list(sampled_answers().values())
    seeds = [7, 8, 9]
    run = decode(precise(), PROMPTS, drafter, sampler=SAMPLER, max_new_tokens=40, seed=seeds)
    assert run.outputs == expected
    row = length % 3
    alone = decode(precise(), [PROMPTS[row]], drafter, sampler=SAMPLER, max_new_tokens=40, seed=[seeds[row]])
    assert alone.outputs == [expected[row]]


@pytest.mark.parametrize("depth", LENGTHS)
@pytest.mark.parametrize("siblings", [0, 2])
def test_an_oracle_is_accepted_whole_and_an_adversary_never(depth: int, siblings: int) -> None:
    """Acceptance length depth + 1 in full rounds, and 1 with the right text all the same."""
    rounds = 3
    length = 1 + rounds * (depth + 1)
    known = {tuple(prompt): output for prompt, output in zip(MANY[:3], greedy_answers(), strict=False)}
    expected = [output[:length] for output in known.values()]
    oracle = OracleDrafter(known, depth, VOCABULARY, siblings=siblings)
    run = decode(llama(), MANY[:3], oracle, max_new_tokens=length)
    assert run.outputs == expected
    assert run.stats.acceptance_length == depth + 1 and run.stats.target_forwards == rounds + 1
    assert run.stats.accepted_histograms == [{depth: rounds}] * 3
    assert run.stats.accepted_histogram == {depth: 3 * rounds}
    adversary = AdversarialDrafter(known, depth, VOCABULARY, siblings)
    run = decode(llama(), MANY[:3], adversary, max_new_tokens=length)
    assert run.outputs == expected
    assert run.stats.acceptance_length == 1.0 and run.stats.acceptance_rate == 0.0


@pytest.mark.parametrize("name", REGISTERED)
def test_rows_keep_their_answers_when_they_change_places(name: str) -> None:
    drafter = REGISTERED[name](3, torch.float64)
    seeds = [7, 8, 9]
    for order in ([2, 0, 1], [1, 2], [0, 0, 1]):
        prompts = [PROMPTS[row] for row in order]
        run = decode(
            precise(), prompts, drafter, None, SAMPLER, max_new_tokens=40, seed=[seeds[row] for row in order]
        )
        assert run.outputs == [sampled_answers()[tuple(prompt)] for prompt in prompts], f"order {order}"


def test_a_list_of_seeds_reproduces_single_calls_and_rows_of_one_seed_differ() -> None:
    prompt = PROMPTS[0]
    singles = [
        decode(precise(), [prompt], sampler=SAMPLER, max_new_tokens=12, seed=s).outputs[0] for s in (3, 5)
    ]
    assert decode(precise(), [prompt] * 2, sampler=SAMPLER, max_new_tokens=12, seed=[3, 5]).outputs == singles
    rows = decode(precise(), [prompt] * 3, sampler=SAMPLER, max_new_tokens=12, seed=3).outputs
    assert rows[0] == singles[0] and rows[1] != rows[0] and rows[2] != rows[1]


def test_a_call_leaves_generators_and_flags_as_they_were() -> None:
    def world() -> tuple[object, ...]:
        return (
            torch.get_rng_state().tolist(),
            torch.get_default_dtype(),
            torch.get_num_threads(),
            torch.are_deterministic_algorithms_enabled(),
            torch.backends.cuda.matmul.allow_tf32,
            torch.backends.cudnn.deterministic,
            torch.backends.cudnn.benchmark,
            torch.get_float32_matmul_precision(),
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
        )

    precise()  # is made when first asked for, by the world's generator
    torch.manual_seed(123)
    before = world()
    for name, build in REGISTERED.items():
        decode(precise(), PROMPTS, build(3, torch.float64), sampler=SAMPLER, max_new_tokens=8)
        assert world() == before, name
