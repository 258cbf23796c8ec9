"""Encoder-decoders: the output of `generate`, for rows with encoder states of different lengths."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationMixin, PreTrainedModel

from mmspec.accelerators import build_accelerator
from mmspec.core.canvas import Canvas, Stopping
from mmspec.core.draft import DraftKind, Tree
from mmspec.core.interfaces import Request
from mmspec.core.loop import speculate
from mmspec.core.random_stream import RandomStream
from mmspec.core.sampling import Sampler
from mmspec.core.statistics import DecodingStats
from mmspec.targets import adapt
from mmspec.targets.encoder_decoder import EncoderDecoderTarget, prompt_of
from tests.targets.loop import decode, oracle
from tests.tiny_models.encoder_decoder import (
    ENCODER_DECODERS,
    VOCABULARY,
    encoder_inputs_of,
)

NEW_TOKENS = 40


def prefixed(model: PreTrainedModel, inputs: Mapping[str, Tensor], seed: int) -> dict[str, Any]:
    """The prompt of a row, whose decoder begins with `seed` tokens after the start token."""
    prompt = prompt_of(model, inputs)
    more = torch.randint(4, VOCABULARY, (1, seed), generator=torch.Generator().manual_seed(seed))
    return prompt | {"input_ids": torch.cat([prompt["input_ids"], more], 1)}


def generated(model: PreTrainedModel, inputs: Mapping[str, Tensor], tokens: Tensor) -> list[int]:
    """The greedy tokens of `generate` after the given ones; Whisper's own would drop the first."""
    how = dict(decoder_input_ids=tokens, do_sample=False, max_new_tokens=NEW_TOKENS)
    output = GenerationMixin.generate(model, **inputs, **how)
    return output[0, tokens.shape[1] :].tolist()


@pytest.fixture(params=ENCODER_DECODERS)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return ENCODER_DECODERS[request.param]()


@torch.inference_mode()
def rows_of(model: PreTrainedModel) -> tuple[list[dict[str, Any]], list[list[int]]]:
    """Three prompts, whose sounds and texts differ in length, and their outputs by `generate`."""
    inputs = [encoder_inputs_of(model, seed) for seed in (0, 1, 2)]
    prompts = [prefixed(model, row, seed) for seed, row in enumerate(inputs)]
    answers = [
        generated(model, row, prompt["input_ids"]) for row, prompt in zip(inputs, prompts, strict=True)
    ]
    assert len({tuple(answer) for answer in answers}) == 3
    return prompts, answers


def test_ragged_batch_gives_what_generate_gives_for_each_row(model: PreTrainedModel) -> None:
    prompts, answers = rows_of(model)
    target = adapt(model)
    assert isinstance(target, EncoderDecoderTarget)
    methods = [build_accelerator("none"), build_accelerator("copy", min_match=1)]
    methods += [oracle(prompts, answers, 4, VOCABULARY, corruption) for corruption in (0.0, 0.3)]
    for accelerator in methods:
        assert decode(target, accelerator, prompts, Stopping(NEW_TOKENS)).outputs == answers


def test_output_depends_on_the_encoder_and_reads_it_once(model: PreTrainedModel) -> None:
    prompts, answers = rows_of(model)
    same = [prompt | {"input_ids": prompts[0]["input_ids"]} for prompt in prompts]
    calls: list[int] = []
    handle = model.get_encoder().register_forward_hook(lambda *_: calls.append(1))
    run = decode(adapt(model), build_accelerator("none"), same, Stopping(NEW_TOKENS))
    handle.remove()
    assert len(calls) == 3
    assert run.outputs[0] == answers[0] and len({tuple(row) for row in run.outputs}) == 3


def test_rows_that_enter_leave_and_are_overwritten_keep_their_encoder_states(model: PreTrainedModel) -> None:
    """Scores of one more token after rows have moved are those of the row alone."""
    target, tokens = adapt(model), torch.tensor([[7]])
    prompts, _ = rows_of(model)

    def state(rows: list[int]) -> Any:
        return target.prefill([prompts[row] for row in rows], 16)[0]

    def scores(moved: Any) -> Tensor:
        draft = Tree.chain(tokens.expand(moved.cache.rows, 1), DraftKind.POINT)
        return target.score(moved, draft).logits[:, 0]

    alone = torch.cat([scores(state([row])) for row in range(3)])
    assert not torch.allclose(alone[0], alone[1], atol=1e-2)
    joined = state([0]).joined(state([2, 1]), (1, 2))
    torch.testing.assert_close(scores(joined), alone[[0, 2, 1]])
    left = joined.part([2, 0], 3)
    torch.testing.assert_close(scores(left), alone[[1, 0]])
    torch.testing.assert_close(scores(left.overwritten([0], state([2]), (2, 1))), alone[[2, 0]])
    torch.testing.assert_close(scores(left.joined(state([1]), (2, 1)).part([2, 1], 3)), alone[[1, 0]])


def test_sampled_rows_are_those_of_the_row_alone_and_of_plain_decoding(model: PreTrainedModel) -> None:
    prompts, _ = rows_of(model)
    target = adapt(model)

    def sampled(rows: list[int], name: str) -> list[list[int]]:
        requests = [Request(prompts[row]) for row in rows]
        stats = DecodingStats()
        canvas = Canvas([each.prompt_tokens for each in requests], Stopping(20), stats, target.device)
        random = RandomStream.from_seed([5 + row for row in rows], len(rows))
        accelerator = build_accelerator(name, **({"min_match": 1} if name == "copy" else {}))
        sampler = Sampler(temperature=0.8, top_p=0.95)
        for _ in speculate(target, accelerator.decoder, sampler, requests, canvas, random):
            pass
        return canvas.outputs()

    plain = sampled([0, 1, 2], "none")
    assert [sampled([row], "none")[0] for row in range(3)] == plain
    assert sampled([0, 1, 2], "copy") == plain
