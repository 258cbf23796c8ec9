"""The fixtures keep their promises: fast, varied, without near-ties, loadable as ordinary checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor, PreTrainedModel

from tests.tiny_models import (
    HAS_VIDEO,
    HYBRID_TEXT_MODELS,
    REFUSED_TEXT_MODELS,
    TEXT_MODELS,
    VISION_LANGUAGE_FAMILIES,
    encode,
    save_family,
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
        **inputs,
        do_sample=False,
        max_new_tokens=NEW_TOKENS,
        return_dict_in_generate=True,
        output_logits=True,
    )
    best = torch.stack(out.logits).topk(2).values
    return out.sequences[:, inputs["input_ids"].shape[1] :].tolist(), (
        best[..., 0] - best[..., 1]
    ).min().item()


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
def test_text_models_are_varied_and_decided(name: str) -> None:
    model = (TEXT_MODELS | HYBRID_TEXT_MODELS)[name]()
    for length in (1, 5, 20):
        ids = torch.arange(1, length + 1)[None]
        (tokens,), gap = greedy(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
        assert len(tokens) == NEW_TOKENS and len(set(tokens)) >= 8
        assert gap > 1e-4


@pytest.mark.parametrize("name", REFUSED_TEXT_MODELS)
def test_refused_models_run_under_generate(name: str) -> None:
    ids = torch.arange(1, 6)[None]
    out = REFUSED_TEXT_MODELS[name]().generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=4
    )
    assert out.shape == (1, 9)


@pytest.mark.parametrize(
    ("build", "nats"),
    [(tiny_lm_v8, 1.5), (lambda: tiny_lm_v8(layers=2), 1.5), (tiny_lm, 2.0)],
    ids=["v8", "v8-two-layers", "v64"],
)
def test_distribution_models_have_the_entropy_they_promise(
    build: Callable[[], PreTrainedModel], nats: float
) -> None:
    model = build()
    context = torch.randint(model.config.vocab_size, (64, 10), generator=torch.Generator().manual_seed(1))
    logits = model(context).logits
    assert logits.dtype == torch.float64
    assert torch.distributions.Categorical(logits=logits).entropy().mean().item() == pytest.approx(
        nats, abs=0.1
    )


@pytest.mark.parametrize("family", VISION_LANGUAGE_FAMILIES)
def test_families_are_fast_varied_and_decided(family: str) -> None:
    start = time.process_time()
    model, processor = VISION_LANGUAGE_FAMILIES[family]()
    assert time.process_time() - start < 1
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


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "idefics3"])
def test_saved_families_load_through_the_auto_classes(family: str, tmp_path: Path) -> None:
    model, processor = VISION_LANGUAGE_FAMILIES[family]()
    folder = save_family(family, tmp_path)
    loaded, loaded_processor = (
        AutoModelForImageTextToText.from_pretrained(folder),
        AutoProcessor.from_pretrained(folder),
    )
    assert type(loaded) is type(model) and type(loaded_processor) is type(processor)
    for messages in conversations(family).values():
        inputs, reloaded = encode(processor, messages), encode(loaded_processor, messages)
        assert inputs.keys() == reloaded.keys()
        same_backend = type(loaded_processor.image_processor) is type(processor.image_processor)
        for key, value in inputs.items():
            # The auto class may load the image processor's PIL backend, which resizes by Lanczos where
            # torchvision before 0.27 falls back to bicubic: two of 255 levels, 2 / 255 apart in [-1, 1].
            assert value.shape == reloaded[key].shape
            allowed = 4.1 / 255 if value.is_floating_point() and not same_backend else 0.0
            assert (value.double() - reloaded[key].double()).abs().max() <= allowed
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name]), name
