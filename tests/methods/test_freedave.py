"""States of masked blocks: the output of one place per forward pass, in fewer forward passes."""

from __future__ import annotations

from typing import Any

import pytest

from mmspec.accelerators import build_accelerator
from mmspec.core.plain import NoDrafter
from mmspec.core.sampling import Sampler
from mmspec.errors import InputError
from mmspec.families.masked_language.target import MaskedTarget
from mmspec.families.masked_language.unmasking import UnmaskingDrafter
from mmspec.methods.freedave.drafter import StatesDrafter
from mmspec.places.confidence import LowConfidence
from mmspec.places.sequential import Sequential
from mmspec.places.state_walk import StateWalk
from tests.contracts.running import Run, decode
from tests.tiny_models import tiny_llada, tiny_sdar
from tests.tiny_models.masked import masked_target

WORDS, LENGTH = 32, 26
PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7, 1], [4, 4, 4, 4]]


def sdar(block: int = 4, predicts: str = "own", order: str = "confidence") -> MaskedTarget:
    return masked_target(tiny_sdar(WORDS), block_length=block, predicts=predicts, order=order)


def run_of(target: MaskedTarget, drafter: Any, sampler: Sampler, rows: list[int], **more: Any) -> Run:
    rule = StateWalk().fit(target) if isinstance(drafter, StatesDrafter) else LowConfidence()
    prompts = [PROMPTS[row] for row in rows]
    return decode(
        target, prompts, drafter.fit(target), rule, sampler, max_new_tokens=LENGTH, seed=[*rows], **more
    )


@pytest.mark.parametrize("sampler", [Sampler(), Sampler(0.7), Sampler(1.2, top_k=5)], ids=str)
@pytest.mark.parametrize("predicts", ["own", "next"])
@pytest.mark.parametrize(("block", "states"), [(4, 2), (4, 8), (8, 5), (1, 2)])
@pytest.mark.every(6)
def test_output_is_that_of_one_place_a_forward(
    sampler: Sampler, block: int, states: int, predicts: str
) -> None:
    """In ragged batches and in single rows, for any predicted tokens, in fewer forward passes."""
    target, rows = sdar(block, predicts), [0, 1, 2, 3]
    plain = run_of(target, NoDrafter(), sampler, rows)
    fast = run_of(target, StatesDrafter(states), sampler, rows)
    assert fast.outputs == plain.outputs
    for row in rows:
        assert run_of(target, StatesDrafter(states), sampler, [row]).outputs == [plain.outputs[row]]
    assert sum(fast.stats.accepted) <= sum(fast.stats.drafted)
    if block > 1:
        assert sum(fast.stats.accepted) > 0 and all(ours < LENGTH for ours in fast.stats.nfe)


@pytest.mark.parametrize("sampler", [Sampler(), Sampler(0.7)], ids=["greedy", "sampled"])
def test_models_that_decide_from_left_to_right_keep_that_order(sampler: Sampler) -> None:
    """Plain decoding uses the model's order, so that drafts fail only at a wrong token."""
    target, rows = sdar(order="left_to_right"), [0, 1, 2, 3]
    plain = run_of(target, NoDrafter(), sampler, rows)
    by_hand = decode(
        target,
        [PROMPTS[row] for row in rows],
        UnmaskingDrafter().fit(target),
        Sequential(),
        sampler,
        max_new_tokens=LENGTH,
        seed=rows,
    )
    fast = run_of(target, StatesDrafter(), sampler, rows)
    assert fast.outputs == plain.outputs == by_hand.outputs
    assert plain.outputs != run_of(sdar(), NoDrafter(), sampler, rows).outputs
    assert StatesDrafter().fit(target).keeps == "one place per forward pass, from left to right"
    made = build_accelerator("low_confidence").fit(target)
    assert made.exactness == "lossy" and build_accelerator("freedave").fit(target).exactness == "exact"


def test_an_end_token_ends_a_row_where_plain_decoding_ends_it() -> None:
    target, rows = sdar(), [0, 1, 2, 3]
    whole = run_of(target, NoDrafter(), Sampler(), rows)
    for end in (whole.outputs[0][7], whole.outputs[1][12]):
        plain = run_of(target, NoDrafter(), Sampler(), rows, end=[end])
        fast = run_of(target, StatesDrafter(), Sampler(), rows, end=[end])
        assert fast.outputs == plain.outputs
        assert fast.canvas.finish_reasons == plain.canvas.finish_reasons


def test_models_that_see_all_places_are_refused() -> None:
    with pytest.raises(InputError, match="block-causal"):
        StatesDrafter().fit(MaskedTarget(tiny_llada(WORDS)))
    for bad in (1, 65, 2.0):
        with pytest.raises(InputError, match="states"):
            build_accelerator("freedave", states=bad)
