"""Early exits: drafts equal those of a model cut to its first layers; the choice of exits and lengths."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from extras.tests.running import outputs_alone, outputs_of
from mmspec.accelerators import build_accelerator
from mmspec.core.canvas import Canvas, Stopping
from mmspec.core.decoder import Decoder
from mmspec.core.interfaces import Drafter
from mmspec.core.loop import speculate
from mmspec.core.random_stream import RandomStream
from mmspec.core.sampling import Sampler
from mmspec.core.statistics import DecodingStats
from mmspec.errors import InputError
from mmspec.pipelines import VisionLanguagePipeline
from mmspec.targets import CausalTarget, VisionLanguageTarget
from mmspec.trees.matching import SampleAndMatch
from mmspec_extras.methods.early_exit.drafter import EarlyExitDrafter, ExitRates, best_exit
from tests.contracts.checks import llama, precise
from tests.contracts.running import as_request, decode, generate, random_prompts
from tests.contracts.test_drafters import check_greedy_output, check_sampled_output
from tests.targets import loop, test_threads
from tests.tiny_models import encode, tiny_images, tiny_llama, tiny_llava, tiny_qwen3_5, user_message

PROMPTS = random_prompts(3, seed=6)
LAYERS = 4


def target() -> CausalTarget:
    return CausalTarget(tiny_llama(layers=LAYERS))


def cut(model: PreTrainedModel, layers: int) -> PreTrainedModel:
    """Return a copy of the model without its later layers."""
    short = copy.deepcopy(model)
    short.model.layers = short.model.layers[:layers]
    return short


@torch.inference_mode()
def said_after(model: PreTrainedModel, ids: list[int], count: int) -> list[int]:
    """The likeliest tokens after the last `count` places of a text, without a cache."""
    logits: torch.Tensor = model(input_ids=torch.tensor([ids]), use_cache=False).logits
    return logits[0, -count:].argmax(-1).tolist()


@pytest.mark.parametrize("layers", [1, 3])
def test_drafts_are_those_of_the_cut_model_and_the_text_is_that_of_generate(layers: int) -> None:
    """Compared with forward passes without a cache, in every round of a ragged batch after rejections."""
    whole, count, tokens = target(), 3, 24
    drafter, short = EarlyExitDrafter(layers, count).fit(whole), cut(whole.model, layers)
    canvas = Canvas([list(prompt) for prompt in PROMPTS], Stopping(tokens), DecodingStats(), whole.device)
    requests, stream = [as_request(prompt) for prompt in PROMPTS], RandomStream.from_seed(0, len(PROMPTS))
    before, compared = [list(ids) for ids in canvas.ids], 0
    for step in speculate(whole, Decoder(drafter, SampleAndMatch()), Sampler(), requests, canvas, stream):
        for row, drafted in enumerate(step.draft.tokens[:, 1:].tolist()):
            if drafted and len(canvas.ids[row]) < len(PROMPTS[row]) + tokens:
                assert drafted == said_after(short, before[row] + drafted[:-1], count), len(before[row])
                compared += 1
        before = [list(ids) for ids in canvas.ids]
    assert canvas.outputs() == [generate(whole.model, prompt, tokens) for prompt in PROMPTS]
    assert compared > 12 and 0 < canvas.stats.acceptance_rate < 1


@pytest.mark.parametrize("layers", [1, "auto"])
def test_a_ragged_batch_with_images_says_what_generate_says(layers: int | str) -> None:
    model, processor = tiny_llava()
    images = (tiny_images()[:1], tiny_images()[1:3], [])
    inputs = [dict(encode(processor, user_message("what is there ?", each))) for each in images]
    whole = VisionLanguageTarget(model)
    fitted = build_accelerator("early_exit", layers=layers, num_draft_tokens=3).fit(whole)
    run = loop.decode(whole, fitted, inputs, Stopping(24))
    assert run.outputs == [loop.generate(model, each, 24) for each in inputs]
    assert run.stats.draft_passes > 0 and len(whole.model.get_decoder().layers) == 2


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_all_layers_are_accepted_whole(temperature: float) -> None:
    whole = target()
    drafter = EarlyExitDrafter(LAYERS, 3).fit(whole)
    run = decode(whole, PROMPTS, drafter, sampler=Sampler(temperature), max_new_tokens=17)
    assert run.stats.acceptance_rate == 1.0 and run.stats.rounds == [4] * 3


def test_rows_come_and_go_with_the_keys_that_drafts_read() -> None:
    pipe: Any = VisionLanguagePipeline(*tiny_llava(), accelerator="early_exit", layers=1, num_draft_tokens=3)
    pipe.set_accelerator("early_exit", layers=1, num_draft_tokens=3, length="fixed")
    alone = outputs_alone(pipe)
    for found, single in zip(outputs_of(pipe), alone, strict=True):
        assert found.tokens == single.tokens
        assert found.stats.acceptance_rate == single.stats.acceptance_rate


def test_what_is_chosen_gives_most_tokens_per_layer() -> None:
    """Compared with the expected tokens of every pair, counted path by path; no draft if none is faster."""

    def worth(rate: float, exit: int, length: int) -> float:
        ends = [rate**count * (1 - rate) * (count + 1) for count in range(length)]
        return (sum(ends) + rate**length * (length + 1)) / (length * (exit + 2.5) + 32.5)

    generator = torch.Generator().manual_seed(0)
    chosen = set()
    for _ in range(40):
        table = dict(zip((3, 11, 22), torch.rand(3, generator=generator).sort().values.tolist(), strict=True))
        pairs = {(exit, length): worth(table[exit], exit, length) for exit in table for length in range(9)}
        found = best_exit(table, 8, 30, 2.5)
        assert pairs[found] == pytest.approx(max(pairs.values()))
        chosen.add(found)
    assert len(chosen) > 8
    assert best_exit({15: 0.4, 28: 0.9}, 6, 30, 8.0)[1] == 0, "a late exit costs as much as it saves"


@pytest.mark.parametrize(("rates", "expected"), [((0.9, 0.95), 8), ((0.1, 0.6), 24)])
def test_exits_are_tried_and_then_judged_by_what_was_accepted(
    rates: tuple[float, float], expected: int
) -> None:
    """An exit after a quarter of the layers and one after three quarters are chosen by their drafts."""
    model = ExitRates((8, 24), 32, 0.5)
    assert model[8] == model[24] == 0.5
    generator, chosen = torch.Generator().manual_seed(1), []
    for _ in range(400):
        exit, length = model.choose(6)
        hits = torch.rand(length, generator=generator) < rates[exit == 24]
        right = int(hits.long().cumprod(0).sum())
        model.record(exit, right, right < length) if length else None
        chosen.append((exit, length))
    late = chosen[200:]
    if expected == 8:
        assert sum(exit == 8 and length > 2 for exit, length in late) > 160
    else:
        assert sum(length == 0 for _, length in late) > 160
    assert {exit for exit, _ in late} == {8, 24}


def test_what_has_no_such_exit_is_refused() -> None:
    for bad in (0, 2.5, "some", True):
        with pytest.raises(InputError, match="layers"):
            EarlyExitDrafter(bad)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"layers.*between 1 and 4"):
        EarlyExitDrafter(5).fit(target())
    with pytest.raises(InputError, match="recurrent"):
        EarlyExitDrafter().fit(CausalTarget(tiny_qwen3_5()))


def test_two_threads_share_a_model_whose_layers_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(test_threads.MODELS, "early exit", (partial(tiny_llama, layers=4), "early_exit"))
    test_threads.test_two_threads_decode_with_one_model_and_run_it_plainly("early exit")


@pytest.mark.parametrize("layers", [1, "auto"])
def test_the_contract_of_drafters_is_kept(layers: int | str) -> None:
    def build(length: int, dtype: torch.dtype) -> Drafter:
        return EarlyExitDrafter(layers, length).fit(llama() if dtype == torch.float32 else precise())

    check_greedy_output(build)
    check_sampled_output(build, 8)
