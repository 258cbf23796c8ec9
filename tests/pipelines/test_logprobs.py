"""Log-probabilities of output tokens, against a forward pass over the whole text; counting penalties."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

from mmspec import MMSpecPipeline
from mmspec.core.logprobs import TokenLogprob
from mmspec.errors import InputError
from tests.bad_inputs.refusals import no_forward

PROMPTS = ["red", "what colour is the large circle", "a blue star"]
SHARED: dict[str, Any] = {"apply_chat_template": False, "max_new_tokens": 12}


def expected_logprobs(pipe: Any, prompt: str, tokens: list[int]) -> torch.Tensor:
    """[N, V] of the model alone, for each output token."""
    before = pipe.tokenizer(prompt)["input_ids"]
    with torch.no_grad():
        logits = pipe.model(input_ids=torch.tensor([[*before, *tokens]])).logits[0]
    return logits[len(before) - 1 : -1].float().log_softmax(-1)


@pytest.fixture(params=["none", "copy", "draft_model"])
def drafting(request: pytest.FixtureRequest, text: MMSpecPipeline, checkpoints: Path) -> Any:
    own = {"drafter": checkpoints / "draft"} if request.param == "draft_model" else {}
    text.set_accelerator(request.param, **own)
    return text


@pytest.mark.parametrize(
    "settings",
    [{}, {"temperature": 1.3, "seed": 3, "top_p": 0.9}, {"repetition_penalty": 1.4, "stop_strings": "e"}],
)
def test_they_are_those_of_the_model_at_every_token(drafting: Any, settings: dict[str, Any]) -> None:
    output = drafting(PROMPTS, logprobs=3, **settings, **SHARED)
    assert output.tokens == drafting(PROMPTS, **settings, **SHARED).tokens
    for prompt, tokens, found in zip(PROMPTS, output.tokens, output.logprobs, strict=True):
        expected = expected_logprobs(drafting, prompt, tokens)
        assert [each.token for each in found] == tokens
        own = expected.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor([each.logprob for each in found]), own, rtol=0, atol=1e-4)
        top = torch.tensor([[value for _, value in each.top] for each in found])
        torch.testing.assert_close(top, expected.topk(3).values, rtol=0, atol=1e-4)
        ids = torch.tensor([[token for token, _ in each.top] for each in found])
        torch.testing.assert_close(expected.gather(1, ids), top, rtol=0, atol=1e-4)


def test_no_alternatives_and_more_than_the_vocabulary(text: MMSpecPipeline) -> None:
    alone = text(PROMPTS[0], logprobs=0, **SHARED).logprobs[0]
    assert all(isinstance(each, TokenLogprob) and each.top == [] for each in alone)
    every = text(PROMPTS[0], logprobs=1000, **SHARED).logprobs[0]
    assert {len(each.top) for each in every} == {128}
    assert text(PROMPTS[0], **SHARED).logprobs == [[]]


def test_they_are_those_of_guided_logits(text: MMSpecPipeline) -> None:
    settings = {"guidance_scale": 2.0, "negative_prompt": "green", **SHARED}
    output = text(PROMPTS[0], logprobs=1, **settings)
    own, other = (expected_logprobs(text, prompt, output.tokens[0]) for prompt in (PROMPTS[0], "green"))
    expected = (other + 2.0 * (own - other)).log_softmax(-1).gather(1, torch.tensor(output.tokens).T)[:, 0]
    found = torch.tensor([each.logprob for each in output.logprobs[0]])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("value", [-1, 1.5, True, "all"])
def test_other_values_are_refused(text: MMSpecPipeline, value: object) -> None:
    with pytest.raises(InputError, match="logprobs must be an integer of at least 0"), no_forward():
        text(PROMPTS[0], logprobs=value, **SHARED)


class Counting(LogitsProcessor):
    """The penalties as OpenAI defines them, for `generate`."""

    def __init__(self, presence: float, frequency: float, prompt: int) -> None:
        self.presence, self.frequency, self.prompt = presence, frequency, prompt

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        output = input_ids[0, self.prompt :].tolist()
        for token in set(output):
            scores[0, token] -= self.presence + output.count(token) * self.frequency
        return scores


@pytest.mark.every(3)
@pytest.mark.parametrize("penalties", [(1.5, 0.0), (0.0, 0.7), (-0.4, 1.1)])
def test_counting_penalties_equal_generate(drafting: Any, penalties: tuple[float, float]) -> None:
    presence, frequency = penalties
    shared = {**SHARED, "max_new_tokens": 24}
    given = {"presence_penalty": presence, "frequency_penalty": frequency}
    tokens = drafting(PROMPTS, **given, **shared).tokens
    assert tokens != drafting(PROMPTS, **shared).tokens
    for prompt, found in zip(PROMPTS, tokens, strict=True):
        ids = drafting.tokenizer(prompt, return_tensors="pt")["input_ids"]
        mine = LogitsProcessorList([Counting(presence, frequency, ids.shape[1])])
        whole = drafting.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=24,
            do_sample=False,
            logits_processor=mine,
        )
        assert whole[0, ids.shape[1] :].tolist() == found


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])
@pytest.mark.parametrize("value", [2.5, float("nan"), "much"])
def test_penalties_out_of_range_are_refused(text: MMSpecPipeline, name: str, value: object) -> None:
    with pytest.raises(InputError, match=f"{name} must be between -2 and 2"), no_forward():
        text(PROMPTS[0], **{name: value}, **SHARED)
