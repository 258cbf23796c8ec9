"""Calls of a pipeline sample on the kernels, and give what torch gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from PIL import Image

from mmspec.scenes import render, sample_scene
from tests.kernels.test_reached_relaxed import draw, launches, pipeline

SAMPLED, WARPED = "sample_triton", "warp_triton"


def describe() -> tuple[list[list[int]], Any]:
    image = Image.fromarray(render(sample_scene(21_001)))
    output = pipeline("scenes-llava")(
        "describe the picture.", images=image, max_new_tokens=4, temperature=0.8, top_k=20, top_p=0.9, seed=3
    )
    return output.tokens, output.stats


def image() -> tuple[list[list[int]], Any]:
    return draw(rounds=3)


@pytest.mark.parametrize(
    ("name", "accelerator", "options", "call", "launcher"),
    [
        ("scenes-llamagen", "none", {}, image, SAMPLED),
        ("scenes-llamagen", "sjd", {"window": 4}, image, WARPED),
        ("scenes-llava", "none", {}, describe, SAMPLED),
    ],
)
def test_calls_sample_on_the_kernels(
    name: str,
    accelerator: str,
    options: dict[str, Any],
    call: Callable[[], tuple[list[list[int]], Any]],
    launcher: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = {}
    for backend in ("torch", "triton"):
        monkeypatch.setenv("MMSPEC_BACKEND", backend)
        pipeline(name).set_accelerator(accelerator, **options)
        with monkeypatch.context() as patch:
            calls = launches(patch, "sampling_triton", launcher)
            found[backend] = call()
        assert bool(calls) == (backend == "triton")
    (kernel, judged), (twin, expected) = found["triton"], found["torch"]
    assert kernel == twin and any(map(len, kernel))
    assert judged.acceptance_length == expected.acceptance_length
