"""Masked models in the loop: forward passes, rows, end tokens, errors. test_masked_cache.py tests outputs."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList, PreTrainedModel, RepetitionPenaltyLogitsProcessor

from mmspec.core.canvas import Canvas
from mmspec.core.interfaces import TargetOutput
from mmspec.core.sampling import Sampler
from mmspec.errors import InputError, UnsupportedModelError
from mmspec.families.masked_language.target import MaskedTarget
from mmspec.families.masked_language.unmasking import UnmaskingDrafter
from mmspec.places.confidence import LowConfidence
from mmspec.targets import CausalTarget
from tests.contracts.running import Run, decode
from tests.tiny_models import tiny_lm, tiny_mistral_sliding, tiny_qwen3_5
from tests.tiny_models.masked import masked_target

VOCABULARY, MASK, LENGTH = 32, 31, 9
PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7]]
NULL = [[1], [1, 2, 3], [1, 2]]
SAMPLED = Sampler(0.8, top_k=12)


def tiny_masked() -> PreTrainedModel:
    """Make a model whose outputs vary from place to place although all places hold the same token."""
    model = tiny_lm(vocab=VOCABULARY, seed=3)
    with torch.no_grad():
        model.get_input_embeddings().weight[MASK] *= 0.1
        model.get_output_embeddings().weight[MASK] *= 2.0  # likely, so that it shows where it is not excluded
        for layer in model.model.layers:  # by position, where the random matrices hardly look
            layer.self_attn.q_proj.weight *= 3.0
            layer.self_attn.k_proj.weight *= 3.0
    return model


@functools.cache
def target() -> MaskedTarget:
    return masked_target(tiny_masked(), mask_token_id=MASK)


def unmask(
    block: int | None = None,
    places: int = 1,
    sampler: Sampler | None = None,
    rows: Sequence[int] = (0, 1, 2),
    length: int = LENGTH,
    model: MaskedTarget | None = None,
    **settings: Any,
) -> Run:
    """Decode some of the prompts in the loop, with the noise that they have in a batch of all three."""
    model = model or target()
    rounds = []

    def watch(canvas: Canvas) -> None:
        rounds.append(canvas)
        assert len(rounds) <= length + 1, "every round decides something"

    run = decode(
        model,
        [PROMPTS[row] for row in rows],
        UnmaskingDrafter(block).fit(model),
        LowConfidence(places),
        sampler,
        max_new_tokens=length,
        seed=5,
        negatives=[NULL[row] for row in rows],
        watch=watch,
        **settings,
    )
    assert run.stats.target_forwards == max(len(rounds) - 1, 0)
    return run


def test_forwards_are_the_places_of_each_block_over_those_a_step_decides() -> None:
    for block, places, forwards in (
        (9, 1, 9),
        (9, 9, 1),
        (9, 4, 3),
        (4, 3, 2 + 2 + 1),
        (1, 5, 9),
        (99, 2, 5),
    ):
        stats = unmask(block, places).stats
        assert stats.target_forwards == forwards and stats.rounds == [forwards] * 3
        assert stats.acceptance_length == stats.step_compression == LENGTH / forwards
        assert stats.accepted == stats.drafted == [0] * 3


OWN = Sampler([0.0, 0.9, 1.2], top_k=[0, 20, 5], guidance_scale=[2.0, 1.0, 3.0])


@pytest.mark.parametrize("sampler", [SAMPLED, OWN], ids=str)
def test_rows_of_a_batch_are_the_rows_alone(sampler: Sampler) -> None:
    together = unmask(4, 2, sampler).outputs
    assert unmask(4, 2, sampler.part([0]), rows=[0]).outputs == together[:1]
    assert unmask(4, 2, sampler.part([0, 1]), rows=[0, 1]).outputs == together[:2]
    assert len({tuple(output) for output in together}) == 3


def test_what_is_no_number_ends_its_row_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, real, calls = unmask(4, 2).outputs, MaskedTarget.score, []

    def broken(*arguments: Any) -> TargetOutput:
        output = real(*arguments)
        calls.append(output)
        if len(calls) == 3:  # the second block begins
            output.logits[1] = math.nan
        return output

    monkeypatch.setattr(MaskedTarget, "score", broken)
    run = unmask(4, 2)
    assert run.canvas.finish_reasons == ["length", "error", "length"]
    assert run.outputs == [whole[0], whole[1][:4], whole[2]]


def test_what_cannot_be_unmasked_is_refused() -> None:
    with pytest.raises(InputError, match="masked model"):
        UnmaskingDrafter().fit(CausalTarget(target().model))
    for model in (tiny_mistral_sliding(), tiny_qwen3_5()):
        with pytest.raises(UnsupportedModelError, match="do not see the whole output"):
            masked_target(model, mask_token_id=0)
    for bad in (-1, VOCABULARY, 1.0, True):
        with pytest.raises(InputError, match="mask_token_id"):
            masked_target(target().model, mask_token_id=bad)
    for bad in (0, -1, 2.0, True):
        with pytest.raises(InputError, match="block"):
            UnmaskingDrafter(bad)  # type: ignore[arg-type]
        with pytest.raises(InputError, match="places_per_step"):
            LowConfidence(bad)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="logits_processor"):
        penalty = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.3)])
        unmask(sampler=Sampler(processors=[penalty] * 3))
    with pytest.raises(InputError, match="taps"):
        target().prefill([], 0, taps=[-1])
    with pytest.raises(InputError, match="pixel_values"):
        target().prefill([{"input_ids": torch.ones(1, 2), "pixel_values": torch.ones(1)}], 0)
