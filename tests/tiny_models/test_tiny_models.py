"""Greedy outputs of the tiny models are varied and have no near-ties; identity tests need both."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.tiny_models import (
    HAS_VIDEO,
    HYBRID_TEXT_MODELS,
    TEXT_MODELS,
    VISION_LANGUAGE_FAMILIES,
    encode,
    tiny_clip,
    tiny_images,
    tiny_lm,
    tiny_lm_v8,
    user_message,
)

NEW_TOKENS = 64
QUESTION = "what is there ?"
IMAGES = tiny_images()


def greedy(model: PreTrainedModel, inputs: dict[str, Any]) -> tuple[list[list[int]], float]:
    """The new tokens of each row, and the smallest gap between the two best logits at any step."""
    out = model.generate(
        **inputs, do_sample=False, max_new_tokens=NEW_TOKENS, return_dict_in_generate=True, output_logits=True
    )
    first, second = torch.stack(out.logits).topk(2).values.unbind(-1)
    return out.sequences[:, inputs["input_ids"].shape[1] :].tolist(), (first - second).min().item()


def conversations(family: str) -> dict[str, list[dict[str, Any]]]:
    """The requests that every family is tested with."""
    cases = {
        "one": user_message(QUESTION, IMAGES[:1]),
        "other": user_message(QUESTION, IMAGES[3:]),
        "two": user_message(QUESTION, IMAGES[1:3]),
        "none": user_message(QUESTION),
    }
    if family in HAS_VIDEO:
        cases["video"] = user_message(QUESTION, videos=[tiny_clip()])
        cases["other video"] = user_message(QUESTION, videos=[tiny_clip(1)])
    return cases


@pytest.mark.parametrize("name", TEXT_MODELS | HYBRID_TEXT_MODELS)
@pytest.mark.every(6)
def test_text_models_are_varied_and_decided(name: str) -> None:
    model = (TEXT_MODELS | HYBRID_TEXT_MODELS)[name]()
    for length in (1, 20):
        ids = torch.arange(1, length + 1)[None]
        (tokens,), gap = greedy(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
        assert len(tokens) == NEW_TOKENS and len(set(tokens)) >= 8
        assert gap > 1e-4


def test_distribution_models_have_the_entropy_they_promise() -> None:
    for model, nats in ((tiny_lm_v8(), 1.5), (tiny_lm(), 2.0)):
        generator = torch.Generator().manual_seed(1)
        context = torch.randint(model.config.vocab_size, (64, 10), generator=generator)
        logits = model(context).logits
        assert logits.dtype == torch.float64
        entropy = torch.distributions.Categorical(logits=logits).entropy().mean().item()
        assert entropy == pytest.approx(nats, abs=0.1)


@pytest.mark.parametrize("family", VISION_LANGUAGE_FAMILIES)
@pytest.mark.every(5)
def test_families_are_varied_and_decided(family: str) -> None:
    model, processor = VISION_LANGUAGE_FAMILIES[family]()
    outputs = {}
    for case, messages in conversations(family).items():
        (tokens,), gap = greedy(model, encode(processor, messages))
        assert len(tokens) == NEW_TOKENS and len(set(tokens)) >= 8, case
        assert gap > 1e-4, case
        outputs[case] = tokens
    assert len(set(map(tuple, outputs.values()))) == len(outputs), (
        "the output must depend on the image and clip"
    )

    cases = ["one", "two", "none"]
    rows, _ = greedy(model, encode(processor, *(conversations(family)[case] for case in cases)))
    assert rows == [outputs[case] for case in cases]
