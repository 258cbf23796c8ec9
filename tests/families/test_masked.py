"""Masked models: the loop's output is that of low-confidence remasking, written out for one row by lists."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel, RepetitionPenaltyLogitsProcessor

from mmspec.accelerator import Accelerator, is_sound
from mmspec.core.canvas import Canvas, Stopping
from mmspec.core.distributions import Scores
from mmspec.core.draft import DraftKind, Tree
from mmspec.core.interfaces import AcceptanceRule, TargetOutput
from mmspec.core.plain import NoDrafter
from mmspec.core.random_stream import Purpose, RandomStream
from mmspec.core.sampling import Sampler
from mmspec.errors import InputError, UnsupportedModelError
from mmspec.families.masked_language.target import MaskedTarget
from mmspec.families.masked_language.unmasking import UnmaskingDrafter
from mmspec.methods.none.drafter import none
from mmspec.places.confidence import LowConfidence
from mmspec.places.policies import PlaceRule
from mmspec.plugins import RULES
from mmspec.targets import CausalTarget
from mmspec.trees.matching import SampleAndMatch
from mmspec.trees.rejection import SpeculativeSampling
from tests.contracts.running import Run, as_request, decode
from tests.tiny_models import tiny_lm, tiny_mistral_sliding, tiny_qwen3_5

VOCABULARY, MASK, LENGTH = 32, 31, 9
PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7]]
NULL = [[1], [1, 2, 3], [1, 2]]
SAMPLED = Sampler(0.8, top_k=12)
GUIDED = Sampler(0.9, guidance_scale=2.0)
SHAPES = [(None, 1), (None, 3), (4, 1), (4, 2)]  # block, places a step


def tiny_masked() -> PreTrainedModel:
    """A model whose outputs vary from place to place although all of them hold the same token."""
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
    return MaskedTarget(tiny_masked(), MASK)


def naive_unmasking(
    predict: Callable[[list[int]], list[list[float]]],
    length: int,
    block: int,
    places: int,
    choose: Callable[[list[float], int, int], tuple[int, float]],
) -> tuple[list[int], int]:
    """Low-confidence remasking of one row (LLaDA, 2502.09992, section 2.4).

    Args:
        predict: output with masks -> scores over the vocabulary at each of its places.
        length, block, places: tokens of the output, of a block, and of those that a step decides.
        choose: scores, their place, and how many are decided -> a token and its probability.

    Returns:
        The output, and how many forwards it took.
    """
    output: list[int | None] = [None] * length
    forwards = 0
    while None in output:
        begin = output.index(None) // block * block
        scores = predict([MASK if token is None else token for token in output])
        forwards += 1
        chosen, decided = [], length - output.count(None)
        for place in range(begin, min(begin + block, length)):
            if output[place] is None:
                token, probability = choose(scores[place], place, decided)
                chosen.append((-probability, place, token))
        for _, place, token in sorted(chosen)[:places]:
            output[place] = token
    return [token for token in output if token is not None], forwards


def naive_choice(scores: list[float], sampler: Sampler, noise: list[float]) -> tuple[int, float]:
    """A token from scores by the Gumbel-max trick, and its probability; the mask is never drawn."""
    words = [token for token in range(len(scores)) if token != MASK]
    if sampler.top_k:
        words = sorted(words, key=lambda token: -scores[token])[: sampler.top_k]
    warped = {token: scores[token] / (sampler.temperature or 1.0) for token in words}
    perturbed = {token: warped[token] + (0.0 if sampler.greedy else noise[token]) for token in words}
    token = max(perturbed, key=lambda word: perturbed[word])
    largest = max(warped.values())
    total = sum(math.exp(each - largest) for each in warped.values())
    return token, math.exp(warped[token] - largest) / total


@functools.cache
def naive(row: int, block: int | None, places: int, sampler: Sampler, length: int) -> tuple[list[int], int]:
    """The reference output of a row, and its forwards; the noise is that of row i of three, seed 5."""
    stream, model = RandomStream.from_seed(5, len(PROMPTS)), target().model

    def read(prompt: Sequence[int], output: list[int]) -> Tensor:
        ids = torch.tensor([[*prompt, *output]])
        everything = torch.zeros(1, 1, ids.shape[1], ids.shape[1], dtype=torch.float64)
        logits = model(ids, attention_mask=everything, position_ids=torch.arange(ids.shape[1])[None]).logits
        return logits[0, len(prompt) :]

    def predict(output: list[int]) -> list[list[float]]:
        scores = read(PROMPTS[row], output)
        if sampler.guidance_scale != 1.0:
            scores = scores.where(torch.arange(VOCABULARY) != MASK, -math.inf).log_softmax(-1)
            without = read(NULL[row], output)
            without = without.where(torch.arange(VOCABULARY) != MASK, -math.inf).log_softmax(-1)
            scores = without + sampler.guidance_scale * (scores - without)
        return scores.tolist()

    def choose(scores: list[float], place: int, decided: int) -> tuple[int, float]:
        index = torch.full((len(PROMPTS), 1), place)
        noise = stream.at(decided).gumbel(index, Purpose.REDRAW, VOCABULARY, torch.float64)[row, 0]
        return naive_choice(scores, sampler, noise.tolist())

    return naive_unmasking(predict, length, block or length, places, choose)


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


def equals_naive(sampler: Sampler, shapes: Sequence[tuple[int | None, int]] = SHAPES) -> None:
    """Tokens and forwards of ragged rows are those of the reference, at every shape."""
    for block, places in shapes:
        run = unmask(block, places, sampler)
        for row, output in enumerate(run.outputs):
            expected, forwards = naive(row, block, places, sampler, LENGTH)
            assert output == expected, f"block {block}, {places} a step, row {row}"
            assert run.stats.nfe[row] == run.stats.target_forwards == forwards
        assert run.canvas.errors == [None] * 3 and run.canvas.finish_reasons == ["length"] * 3


@pytest.mark.parametrize("sampler", [Sampler(), SAMPLED, GUIDED], ids=str)
def test_output_and_forwards_are_those_of_the_reference(sampler: Sampler) -> None:
    equals_naive(sampler)


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


def test_an_end_token_ends_its_row_once_all_before_it_is_decided() -> None:
    for block in (None, 4):
        whole = unmask(block).outputs
        end = whole[0][5]
        run = unmask(block, end=[end])
        for row, output in enumerate(run.outputs):
            cut = whole[row].index(end) + 1 if end in whole[row] else LENGTH
            assert output == whole[row][:cut]
            assert run.canvas.finish_reasons[row] == ("eos" if end in whole[row] else "length")
        assert run.canvas.finish_reasons[0] == "eos"
        if block == 4:  # the end stands in the second block: the third is never begun
            assert run.stats.rounds[0] <= 8


def test_lengths_that_no_block_divides_and_none_at_all() -> None:
    assert unmask(4, length=0).outputs == [[]] * 3
    for length in (1, 4, 6):
        assert unmask(4, length=length).outputs == [
            naive(row, 4, 1, Sampler(), length)[0] for row in range(3)
        ]


def test_additive_masks_see_the_same() -> None:
    model = tiny_masked()
    model.set_attn_implementation("eager")
    assert unmask(4, 2, SAMPLED, model=MaskedTarget(model, MASK)).outputs == unmask(4, 2, SAMPLED).outputs


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


def test_the_rule_is_for_masked_places_and_they_for_no_other_rule() -> None:
    sound = [name for name in RULES if is_sound(RULES[name], UnmaskingDrafter())]
    assert {"low_confidence", "threshold"} <= {*sound} and not is_sound(LowConfidence, NoDrafter())
    assert all(issubclass(RULES[name], PlaceRule) for name in sound)
    for rule, exactness in ((LowConfidence(), "exact"), (LowConfidence(2), "lossy")):
        assert Accelerator("unmasking", UnmaskingDrafter(), rule).exactness == exactness
    with pytest.raises(InputError, match="low_confidence"):
        Accelerator("unmasking", UnmaskingDrafter(), SampleAndMatch())
    chain = Tree.chain(torch.zeros(1, 2, dtype=torch.long), DraftKind.POINT)
    stream, emitted = RandomStream.from_seed(0, 1), torch.ones(1, dtype=torch.long)
    with pytest.raises(TypeError, match="open places"):
        LowConfidence().verify(chain, Scores(torch.zeros(1, 2, 3), greedy=True), stream, emitted)


def test_what_cannot_be_unmasked_is_refused() -> None:
    with pytest.raises(InputError, match="masked model"):
        UnmaskingDrafter().fit(CausalTarget(target().model))
    for model in (tiny_mistral_sliding(), tiny_qwen3_5()):
        with pytest.raises(UnsupportedModelError, match="do not see the whole output"):
            MaskedTarget(model, 0)
    for bad in (-1, VOCABULARY, 1.0, True):
        with pytest.raises(InputError, match="mask_token_id"):
            MaskedTarget(target().model, bad)  # type: ignore[arg-type]
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


@pytest.mark.parametrize(
    ("sampler", "rule"),
    [(Sampler(), SpeculativeSampling()), (SAMPLED, SampleAndMatch()), (GUIDED, None)],
    ids=["greedy", "sampled", "guided"],
)
def test_plain_decoding_is_one_place_a_forward_the_surest_first(
    sampler: Sampler, rule: AcceptanceRule | None
) -> None:
    """With nothing proposed every rule is plain decoding; the preset is fitted and called (None)."""
    model = target()
    if rule is not None:
        negatives = {"negatives": NULL} if sampler.is_guided else {}
        settings: dict[str, Any] = {"max_new_tokens": LENGTH, "seed": 5, **negatives}
        run = decode(model, PROMPTS, NoDrafter().fit(model), rule, sampler, **settings)
        outputs, stats = run.outputs, run.stats
    else:
        pairs = zip(PROMPTS, NULL, strict=True)
        requests = [as_request(prompt, null) for prompt, null in pairs]
        call = (
            none()
            .fit(model)
            .call(model, sampler, requests, Stopping(LENGTH), RandomStream.from_seed(5, len(PROMPTS)))
        )
        assert sum(1 for _ in call.rounds()) == LENGTH + 1
        outputs, stats = call.canvas.outputs(), call.stats
        assert str(stats).endswith("none: exact (one place a forward, the surest first)")
    assert outputs == [naive(row, None, 1, sampler, LENGTH)[0] for row in range(3)]
    assert stats.target_forwards == LENGTH and stats.exactness == "exact"


def test_plain_decoding_refuses_what_looks_at_a_path() -> None:
    sampler = Sampler(processors=[LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.3)])] * 3)
    with pytest.raises(InputError, match="logits_processor"):
        target().plain_decoding()[0].admit([], sampler, Stopping(3))
