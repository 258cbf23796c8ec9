"""The contract of every registered drafter, and of the drafters in `tests/oracles.py` as extremes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from mmspec.core.canvas import Canvas
from mmspec.core.distributions import PointMass
from mmspec.core.draft import Draft, DraftKind, check_tree
from mmspec.core.interfaces import Drafter, DraftSession, Request
from mmspec.core.plain import NoDrafter
from mmspec.core.sampling import Sampler
from mmspec.heads.drafter import HeadDrafter
from mmspec.heads.feature_session import GrownTreeDrafter
from mmspec.methods.cjd.drafter import CorrectedDrafter
from mmspec.methods.copy.beside_head import CopyBesideHeadDrafter
from mmspec.methods.copy.drafter import CopyDrafter
from mmspec.methods.dflash.drafter import DFlashDrafter
from mmspec.methods.draft_model.drafter import DraftModelDrafter
from mmspec.methods.eagle3.drafter import Eagle3Drafter
from mmspec.methods.flash.drafter import FlashDrafter
from mmspec.methods.hydra.drafter import HydraDrafter
from mmspec.methods.medusa.drafter import MedusaDrafter
from mmspec.plugins import METHODS
from mmspec.targets import CausalTarget
from mmspec.trees.jacobi import JacobiDrafter
from tests.contracts.checks import PROMPTS, VOCABULARY, llama, precise
from tests.contracts.running import decode, futures, generate, random_prompts
from tests.methods import (
    corrected_checks,
    dflash_checks,
    eagle3_checks,
    eagle_checks,
    flash_checks,
    heads_checks,
    mtp_checks,
)
from tests.oracles import AdversarialDrafter, OracleDrafter, RandomTreeDrafter, mass
from tests.tiny_models import tiny_llama, tiny_lm
from tests.trees.length_checks import paced

MANY = random_prompts(10, seed=1)
SAMPLER = Sampler(temperature=0.9, top_p=0.95)


@functools.cache
def greedy_answers() -> list[list[int]]:
    return [generate(llama().model, prompt, 32) for prompt in MANY]


@functools.cache
def sampled_answers() -> dict[tuple[int, ...], list[int]]:
    return futures(precise(), PROMPTS, SAMPLER, max_new_tokens=24, seed=[7, 8, 9])


@functools.cache
def neighbour(dtype: torch.dtype) -> CausalTarget:
    """Add a little noise to the target's weights, for a draft model that is often right."""
    model = tiny_llama() if dtype == torch.float32 else tiny_lm()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.03 * torch.randn(parameter.shape, generator=generator, dtype=dtype)
    return CausalTarget(model)


def fitted(kind: str, dtype: torch.dtype, head: dict[str, Any] | None = None, **shape: Any) -> Drafter:
    """A drafter with a head of random weights for the target of that dtype."""
    target = llama() if dtype == torch.float32 else precise()
    drafter, build = HEADS[kind]
    return drafter(build(target, **head or {}), **shape).fit(target)  # type: ignore[return-value]


def with_head(kind: str, head: dict[str, Any] | None = None, **shape: Any) -> Build:
    return lambda length, dtype: fitted(kind, dtype, head, num_draft_tokens=length, **shape)


def beside_copies(kind: str) -> Build:
    return lambda length, dtype: CopyBesideHeadDrafter(with_head(kind)(length, dtype))  # type: ignore[arg-type]


def draft_model(length: int, dtype: torch.dtype, *sampling: str) -> Drafter:
    return DraftModelDrafter(neighbour(dtype), length, *sampling)


def of_blocks(length: int, dtype: torch.dtype) -> Drafter:
    shape = {"depth": length, "top_k": min(2, length), "block": 3}
    return fitted("flash", dtype, num_draft_tokens=length, **shape)


def of_chains(length: int, dtype: torch.dtype) -> Drafter:
    shape = {"depth": min(length, 4), "top_k": min(length, 4)}
    return fitted("dspark", dtype, num_draft_tokens=length, **shape)


def cjd(length: int, dtype: torch.dtype, coupling: str = "maximal") -> Drafter:
    target = llama() if dtype == torch.float32 else precise()
    head = corrected_checks.head_for(target)
    return CorrectedDrafter(head, length, min(length - 1, 5), coupling).fit(target)


Build = Callable[[int, torch.dtype], Drafter]
HEADS: dict[str, tuple[Callable[..., HeadDrafter], Callable[..., Any]]] = {
    "eagle": (GrownTreeDrafter, eagle_checks.head_for),
    "eagle3": (Eagle3Drafter, eagle3_checks.head_for),
    "mtp": (GrownTreeDrafter, mtp_checks.head_for),
    "flash": (FlashDrafter, flash_checks.head_for),
    "dflash": (DFlashDrafter, dflash_checks.head_for),
    "dspark": (DFlashDrafter, functools.partial(dflash_checks.head_for, kind="dspark, rnn")),
    "medusa": (MedusaDrafter, heads_checks.medusa_for),
    "hydra": (HydraDrafter, heads_checks.hydra_for),
}
# name -> builder(draft length, dtype of the target); a newly registered drafter needs a line here
REGISTERED: dict[str, Build] = {
    "none": lambda length, dtype: NoDrafter(),
    "copy": lambda length, dtype: CopyDrafter(length, min_match=1),
    "draft_model": draft_model,
    "draft_model, greedy": lambda length, dtype: draft_model(length, dtype, "greedy"),
    "draft_model, sampled": lambda length, dtype: draft_model(length, dtype, "sampled"),
    "draft_model, tree": lambda length, dtype: DraftModelDrafter(
        neighbour(dtype), tree=f"{min(length, 4)}x2", sampling="coupled"
    ),
    "draft_model, chains": lambda length, dtype: DraftModelDrafter(
        neighbour(dtype), tree=f"{min(length, 4)}x1x1", sampling="sampled"
    ),
    "draft_model, without replacement": lambda length, dtype: DraftModelDrafter(
        neighbour(dtype), tree="eagle", sampling="without_replacement"
    ),
    "draft_model, of changing sizes": lambda length, dtype: paced(draft_model(length, dtype)),
    "eagle": with_head("eagle"),
    "eagle, static": lambda length, dtype: fitted("eagle", dtype, tree=[0, *range(length)]),
    "eagle, coupled": lambda length, dtype: fitted(
        "eagle", dtype, num_draft_tokens=length, sampling="coupled"
    ),
    "eagle, chains": lambda length, dtype: fitted("eagle", dtype, tree="3x1x1", sampling="sampled"),
    "eagle, without replacement": lambda length, dtype: fitted(
        "eagle", dtype, tree="eagle", sampling="without_replacement"
    ),
    "eagle, of changing sizes": lambda length, dtype: paced(with_head("eagle")(length, dtype)),
    "eagle3": with_head("eagle3", {"draft_vocabulary": VOCABULARY // 2}),
    "eagle3, without replacement": lambda length, dtype: fitted(
        "eagle3", dtype, {"draft_vocabulary": VOCABULARY // 2}, tree="3x2", sampling="without_replacement"
    ),
    "mtp": with_head("mtp"),
    "flash": with_head("flash"),
    "flash, blocks in a row": of_blocks,
    "dflash": lambda length, dtype: fitted("dflash", dtype, {"kind": "dflash", "block": length + 1}),
    "dflash, two": lambda length, dtype: fitted(
        "dflash", dtype, {"kind": "dflash, two", "block": length + 1}
    ),
    "dflash, lilicorr, sampled": lambda length, dtype: fitted(
        "dflash", dtype, {"kind": "dflash, lilicorr", "block": length + 1}, tree="1x1", sampling="sampled"
    ),
    "dflash, sampled": lambda length, dtype: fitted("dflash", dtype, tree="1x1x1", sampling="sampled"),
    "dspark": lambda length, dtype: fitted("dspark", dtype, {"kind": "dspark", "block": length}),
    "dspark, tree": of_chains,
    "dspark, sampled": lambda length, dtype: fitted("dspark", dtype, tree="3x1x1", sampling="sampled"),
    "medusa": with_head("medusa"),
    "medusa, static": lambda length, dtype: fitted("medusa", dtype, tree=[0] * (length + 1)),
    "medusa, sampled": lambda length, dtype: fitted("medusa", dtype, tree="3x2", sampling="sampled"),
    "hydra": with_head("hydra"),
    "hydra, without replacement": lambda length, dtype: fitted(
        "hydra", dtype, tree="3x2", sampling="without_replacement"
    ),
    "hydra, without prefix attention": with_head("hydra", {"prefix_attention": False}),
    **{f"{kind}, beside copies": beside_copies(kind) for kind in ("eagle", "flash", "medusa", "hydra")},
    "dflash, beside copies": lambda length, dtype: CopyBesideHeadDrafter(
        fitted("dflash", dtype, {"kind": "dflash", "block": length + 1})  # type: ignore[arg-type]
    ),
    "eagle3, beside copies, of changing sizes": lambda length, dtype: paced(
        beside_copies("eagle3")(length, dtype)
    ),
    "cjd": cjd,
    "cjd, exact": lambda length, dtype: cjd(length, dtype, "exact"),
    "sjd": lambda length, dtype: JacobiDrafter(length),
    "sjd, exact": lambda length, dtype: JacobiDrafter(length, "exact", "uniform"),
    "sjd, tree": lambda length, dtype: JacobiDrafter(length + 1, front=(4,), reach=1),
}
ORACLES: dict[str, Build] = {
    "oracle": lambda length, dtype: OracleDrafter(sampled_answers(), length, VOCABULARY),
    "oracle, 30 % wrong": lambda length, dtype: OracleDrafter(sampled_answers(), length, VOCABULARY, 0.3),
    "oracle tree": lambda length, dtype: OracleDrafter(
        sampled_answers(), length, VOCABULARY, 0.1, siblings=2
    ),
    "adversary": lambda length, dtype: AdversarialDrafter(sampled_answers(), length, VOCABULARY),
    "random trees": lambda length, dtype: RandomTreeDrafter(length + 1, VOCABULARY, hints=sampled_answers()),
}


def inspected(drafter: Drafter, limit: int) -> Drafter:
    """Return the drafter with a check of all its drafts."""

    def start(requests: Sequence[Request], *args: Any) -> DraftSession:
        session = type(drafter).start(drafter, requests, *args)
        prompts = [len(request.prompt_tokens) for request in requests]
        propose = functools.partial(type(session).propose, session)  # a session may be the drafter itself

        def examined(canvas: Canvas) -> Draft:
            for row, (tokens, prompt) in enumerate(zip(canvas.ids, prompts, strict=True)):
                if len(tokens) - prompt < limit:  # the inputs of a finished row do not matter
                    assert canvas.root[row] == tokens[-1] and canvas.emitted[row] == len(tokens) - prompt
            draft = propose(canvas)
            examine(draft, drafter)
            assert torch.equal(draft.tokens[:, 0], canvas.root) and len(draft.tokens) == len(canvas.ids)
            return draft

        session.propose = examined  # type: ignore[method-assign]
        return session

    drafter.start = start  # type: ignore[method-assign]
    return drafter


def examine(draft: Draft, drafter: Drafter) -> None:
    assert draft.kind is drafter.kind and draft.tokens.shape[1] <= drafter.max_nodes
    assert draft.valid[:, 0].all()
    depths = [check_tree(parents) for parents in draft.parents.tolist()]
    assert draft.max_depth >= max(map(max, depths)) and torch.equal(draft.depth, torch.tensor(depths))
    assert int((draft.children >= 0).sum(-1).max()) <= draft.max_children
    assert drafter.branches or draft.is_chain
    assert (draft.tokens >= 0).all() and (draft.tokens < VOCABULARY).all()
    assert isinstance(draft.q, PointMass) == (draft.kind in (DraftKind.POINT, DraftKind.COUPLED))
    if isinstance(draft.q, PointMass):
        assert torch.equal(draft.q.values, draft.tokens[:, 1:])
        return
    drawn = mass(draft.q, draft.tokens[:, 1:])
    assert torch.allclose(draft.q.p.sum(-1), torch.ones_like(drawn))
    assert (drawn > 0)[draft.valid[:, 1:]].all(), "no token that q excludes"


#: Methods that decide places in another order than left to right, and methods of continuous tokens.
OF_PLACES = {name for name, method in METHODS.items() if method.drafter_class.decides_places} | {
    *("zipar", "masked", "lpd", "maskgit"),
}
OF_VECTORS = {"cspd", "shared_noise"}


def test_every_registered_drafter_is_tested_here() -> None:
    windows = {"gsd", "lantern"}  # draft like `sjd`; their acceptance rules have their own tests
    others = {"assistant", "self_speculation"}  # of one family of models
    others |= {"ppd"}  # its probes are nodes of the target's forward pass: tests/methods/test_ppd.py
    left = set(METHODS) - OF_PLACES - OF_VECTORS - windows - others
    assert {name.split(",")[0] for name in REGISTERED} == left


@pytest.mark.parametrize("name", REGISTERED)
@pytest.mark.every(6)
def test_greedy_output_of_well_formed_drafts_is_that_of_generate(name: str) -> None:
    check_greedy_output(REGISTERED[name])


def check_greedy_output(build: Build) -> None:
    """Ten ragged prompts of 32 tokens in one batch, and one of them alone."""
    drafter = inspected(build(5, torch.float32), 32)
    assert decode(llama(), MANY, drafter, max_new_tokens=32).outputs == greedy_answers()
    assert decode(llama(), MANY[7:8], drafter, max_new_tokens=32).outputs == greedy_answers()[7:8]


BUILDERS = REGISTERED | ORACLES
SHORT_AND_LONG = (1, 8, 2, 32, 3)  # one of these for each builder, in turn


@pytest.mark.parametrize(
    ("name", "length"), [(name, SHORT_AND_LONG[index % 5]) for index, name in enumerate(BUILDERS)]
)
@pytest.mark.every(6)
def test_sampling_is_bitwise_that_of_plain_decoding_wherever_a_row_stands(name: str, length: int) -> None:
    check_sampled_output(BUILDERS[name], length)


def check_sampled_output(build: Build, length: int) -> None:
    """Sampling with the Gumbel coupling equals plain sampling for chains and trees; all drafts are valid."""
    drafter, seeds = inspected(build(length, torch.float64), 24), [7, 8, 9]
    for order in ([0, 1, 2], [2, 0, 0], [length % 3]):
        prompts, keys = [PROMPTS[row] for row in order], [seeds[row] for row in order]
        run = decode(precise(), prompts, drafter, sampler=SAMPLER, max_new_tokens=24, seed=keys)
        assert run.outputs == [sampled_answers()[tuple(prompt)] for prompt in prompts], f"order {order}"


@pytest.mark.parametrize(("depth", "siblings"), [(1, 0), (8, 0), (2, 2), (3, 2)])
def test_an_oracle_is_accepted_whole_and_an_adversary_never(depth: int, siblings: int) -> None:
    """The acceptance length is depth + 1 with the oracle and 1 with the adversary; both outputs are right."""
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

    # models are created on first use, with the global generator
    target, drafters = precise(), {name: build(3, torch.float64) for name, build in REGISTERED.items()}
    torch.manual_seed(123)
    before = world()
    for name, drafter in drafters.items():
        decode(target, PROMPTS[:1], drafter, sampler=SAMPLER, max_new_tokens=4)
        assert world() == before, name
