"""Settings with one value per prompt, equal to single calls; NumPy numbers as settings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from mmspec.errors import InputError
from mmspec.pipelines import ImagePipeline
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
