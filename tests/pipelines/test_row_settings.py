"""Settings with one value for each prompt, which gives what it gives alone; numbers of NumPy as settings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mmspec
from mmspec import accelerators
from mmspec.core.random_stream import RandomStream
from mmspec.errors import InputError
from mmspec.pipelines import ImagePipeline
from mmspec.validation import is_integer, plain_numbers, require_number
from tests.bad_inputs.refusals import no_forward
from tests.tiny_models.llamagen import tiny_llamagen, tiny_vq

SEEDS = [3, 9, 4]
PROMPTS = ["red", "what colour is the large circle", "a blue star"]
SETTINGS: dict[str, list[Any]] = {
    "temperature": [0.0, 0.8, 1.4],
    "top_k": [0, 20, 7],
    "top_p": [1.0, 0.9, 1.0],
    "min_p": [0.0, 0.0, 0.02],
}
GUIDED = SETTINGS | {"guidance_scale": [2.0, 1.0, 3.0]}


def calls_alone(settings: Mapping[str, list[Any]]) -> list[dict[str, Any]]:
    """Keywords of each prompt's own call."""
    return [
        {"seed": seed, **{name: values[row] for name, values in settings.items()}}
        for row, seed in enumerate(SEEDS)
    ]


@pytest.mark.parametrize(("accelerator", "settings"), [("copy", SETTINGS), ("draft_model", GUIDED)])
def test_text(accelerator: str, settings: dict[str, list[Any]], text: Any, checkpoints: Path) -> None:
    options: dict[str, Any] = {}
    if accelerator == "draft_model":
        options = {
            "drafter": checkpoints / "draft",
            "sampling": "sampled",
            "acceptance": "speculative_sampling",
        }
    text.set_accelerator(accelerator, **options)
    shared: dict[str, Any] = {"apply_chat_template": False, "max_new_tokens": 8}
    if settings is GUIDED:
        shared["negative_prompt"] = "green"
    wanted = [
        text(prompt, **call, **shared).tokens[0]
        for prompt, call in zip(PROMPTS, calls_alone(settings), strict=True)
    ]
    assert text(PROMPTS, seed=SEEDS, **settings, **shared).tokens == wanted
    assert text(PROMPTS, seed=SEEDS, temperature=0.8, **shared).tokens != wanted


def test_sampling_is_turned_on_and_off_for_all(text: Any) -> None:
    shared: dict[str, Any] = {"apply_chat_template": False, "max_new_tokens": 8}
    greedy = text(PROMPTS, **shared).tokens
    assert text(PROMPTS, temperature=[0.0] * 3, **shared).tokens == greedy
    assert text(PROMPTS, temperature=SETTINGS["temperature"], do_sample=False, **shared).tokens == greedy
    sampled = text(PROMPTS, temperature=SETTINGS["temperature"], seed=1, **shared).tokens
    assert sampled[0] == greedy[0] and sampled != greedy
    for name, values in GUIDED.items():
        with pytest.raises(InputError, match=f"{name}.*one for each of the 2 prompts"), no_forward():
            text(PROMPTS[:2], **{name: values}, **shared)


@pytest.fixture(scope="module")
def classes() -> Any:
    pipe: Any = ImagePipeline(tiny_llamagen("class"), vq=tiny_vq())
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.mark.parametrize(
    ("accelerator", "options"),
    [
        ("zipar", {"zipar_window": 2}),
        ("sjd", {"window": 8, "acceptance": "lantern", "delta": 0.3}),
    ],
)
def test_images(accelerator: str, options: dict[str, Any], classes: Any) -> None:
    classes.set_accelerator(accelerator, **options)
    shared: dict[str, Any] = {"output_type": "latent", "num_images_per_prompt": 2}
    wanted = [
        row
        for label, call in enumerate(calls_alone(GUIDED))
        for row in classes(class_labels=label, **call, **shared).tokens
    ]
    asked: dict[str, Any] = {"class_labels": [0, 1, 2], "seed": SEEDS, **shared}
    assert classes(**asked, **GUIDED).tokens == wanted
    assert classes(**asked, **GUIDED, batch_size=4).tokens == wanted  # 4 images, then the last prompt's two
    with pytest.raises(InputError, match="top_k.*one for each of the 3 prompts"), no_forward():
        classes(**asked, top_k=[1, 2])


NUMBERS: dict[str, Any] = {
    "max_new_tokens": 12,
    "temperature": 0.75,
    "top_k": 9,
    "top_p": 0.5,
    "min_p": 0.0625,
    "seed": 5,
    "guidance_scale": 1.5,
    "repetition_penalty": 1.25,
    "no_repeat_ngram_size": 3,
    "suppress_tokens": [7, 8],
    "eos_token_id": [9, 10],
    "max_time": 500.0,
    "bad_words_ids": [[3, 4]],
}


def of_numpy(value: Any) -> Any:
    if isinstance(value, list):
        return [of_numpy(item) for item in value]
    return (np.int64 if isinstance(value, int) else np.float32)(value)


@pytest.mark.parametrize("convert", [of_numpy, np.array], ids=["numbers", "arrays of no dimension"])
def test_settings_of_a_call_may_be_numbers_of_numpy(convert: Any, text: Any) -> None:
    call = {"apply_chat_template": False, "negative_prompt": "a"}
    wanted = text("the red", **call, **NUMBERS)
    output = text("the red", **call, **{name: convert(value) for name, value in NUMBERS.items()})
    assert output.tokens == wanted.tokens
    rows: dict[str, Any] = {"temperature": [0.5, 1.0], "seed": [1, 2]}
    call = {"prompt": ["a", "b"], "apply_chat_template": False, "max_new_tokens": 4}
    arrays = {name: np.array(values) for name, values in rows.items()}
    assert text(**call, **arrays).tokens == text(**call, **rows).tokens


def test_options_of_accelerators_and_seeds_may_be_numbers_of_numpy(text: Any) -> None:
    assert accelerators.sjd(window=np.int64(16)).drafter.window == 16
    assert accelerators.copy(num_draft_tokens=np.int32(4)).drafter.max_nodes == 5
    made: Any = mmspec.accelerate("copy", seed=np.int64(3), num_draft_tokens=np.array(4))  # type: ignore[arg-type]
    ids = torch.tensor([[5, 6, 7, 5, 6]])
    how: dict[str, Any] = {"max_new_tokens": 5, "do_sample": True, "pad_token_id": 0}
    wanted = text.model.generate(ids, **how, custom_generate=mmspec.accelerate("copy", seed=3))
    assert torch.equal(text.model.generate(ids, **how, custom_generate=made), wanted)
    keys = RandomStream.from_seed([3, 4], 2).keys
    assert torch.equal(RandomStream.from_seed(np.array([3, 4]), 2).keys, keys)  # type: ignore[arg-type]
    with text.running_batch(rows=np.int64(2)) as batch:
        assert batch.free == 2


def test_truth_values_and_words_are_no_numbers(text: Any) -> None:
    for value in (np.True_, True, np.str_("8"), np.array("8"), np.array([1, 2])):
        assert not is_integer(value)
        with pytest.raises(InputError):
            require_number("x", value, 0, 9, "a number")
        with pytest.raises(InputError, match="max_new_tokens"):
            text("a", apply_chat_template=False, max_new_tokens=value)
    require_number("x", np.float32(0.5), 0, 9, "a number")
    with pytest.raises(InputError):
        require_number("x", np.float32("nan"), 0, 9, "a number")
    assert plain_numbers({(np.int64(1),): [np.float64(0.5)]}) == {(1,): [0.5]}
