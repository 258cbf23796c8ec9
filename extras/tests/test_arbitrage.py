"""Arbitrage: outputs are those of a loop over steps with two models and no cache."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from mmspec.accelerators import build_accelerator
from mmspec.errors import InputError
from tests.contracts.checks import PROMPTS, llama
from tests.contracts.running import decode, generate
from tests.contracts.test_drafters import neighbour

TOKENS, LONGEST = 24, 5
ENDS = (7, 21, 40, 63, 3, 11, 30, 50)


def next_token(model: PreTrainedModel, text: list[int]) -> int:
    return int(model(torch.tensor([text])).logits[0, -1].argmax())


@torch.inference_mode()
def written_by_steps(prompt: list[int], advantage: float) -> list[int]:
    small, large, text = neighbour(torch.float32).model, llama().model, list(prompt)
    text.append(next_token(large, text))  # with the prefill
    while len(text) < len(prompt) + TOKENS:
        step = list[int]()
        while len(step) < LONGEST and (not step or step[-1] not in ENDS):
            step.append(next_token(small, [*text, *step]))
        said = large(torch.tensor([text + step])).logits[0, len(text) - 1 : -1].log_softmax(-1)
        margin = said.amax(-1) - said.gather(1, torch.tensor(step)[:, None])[:, 0]
        if margin.mean() <= advantage:
            text += [*step, next_token(large, text + step)]
            continue
        for _ in range(LONGEST):
            text.append(next_token(large, text))
            if text[-1] in ENDS:
                break
    return text[len(prompt) :][:TOKENS]


@pytest.mark.parametrize("advantage", [0.0, 0.5, 1000.0])
def test_outputs_are_those_of_a_loop_over_steps(advantage: float) -> None:
    options = {"num_draft_tokens": LONGEST, "step_ends": ENDS, "advantage": advantage}
    made = build_accelerator("arbitrage", neighbour(torch.float32), **options).fit(llama())
    run = decode(llama(), PROMPTS, made.drafter, made.rule, max_new_tokens=TOKENS)
    assert run.outputs == [written_by_steps(list(prompt), advantage) for prompt in PROMPTS]
    plain = [generate(llama().model, prompt, TOKENS) for prompt in PROMPTS]
    assert (run.outputs == plain) == (advantage == 0) and run.stats.acceptance_length > 1
    assert made.exactness == "lossy"


def test_bad_options_are_refused() -> None:
    for name, value in (("step_ends", (-1,)), ("advantage", -1.0), ("num_draft_tokens", 600)):
        with pytest.raises(InputError, match=name):
            build_accelerator("arbitrage", neighbour(torch.float32), **{name: value})
    with pytest.raises(InputError, match="below 64"):
        build_accelerator("arbitrage", neighbour(torch.float32), step_ends=(64,)).fit(llama())
