"""`pipe.compile()`: the same outputs, with any accelerator, batch and device; failures are named.

Most tests trace with torch.compile and run the traced graphs as they are: generating C++ takes half a minute.
"""

from __future__ import annotations

import logging
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from mmspec.pipelines import VisionLanguagePipeline
from mmspec.targets import steps
from tests.tiny_models import VISION_LANGUAGE_FAMILIES, tiny_image

PROMPTS = ["what is there ?", "which colour is it ?"]
SHORT: dict[str, Any] = {"max_new_tokens": 10}


@pytest.fixture(autouse=True)
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(steps.torch, "compile", partial(torch.compile, backend="eager"))


def fresh() -> VisionLanguagePipeline:
    return VisionLanguagePipeline(*VISION_LANGUAGE_FAMILIES["llava"](), accelerator="copy")


def answers(pipe: Any, rows: int) -> list[list[int]]:
    return pipe(PROMPTS[:rows], images=[tiny_image()] * rows, **SHORT).tokens


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def test_answers_stay_the_same_and_later_calls_compile_nothing_new(checkpoints: Path) -> None:
    pipe = fresh()
    expected = [answers(pipe, rows) for rows in (1, 2)]
    assert pipe.compile(batch_sizes=(2,)) is pipe
    assert graphs() > 0
    assert not counters["graph_break"]
    assert [answers(pipe, rows) for rows in (2, 1)] == expected[::-1]
    for length in (3, 9, 17):
        pipe(PROMPTS[0] * length, max_new_tokens=5)
    known = graphs()
    for length in (3, 17, 5, 12):
        pipe(PROMPTS[0] * length, max_new_tokens=5)
    assert graphs() == known
    pipe.set_accelerator("none")
    pipe.to("cpu")
    assert pipe.target.steps is not None
    assert answers(pipe, 1) == expected[0]


def test_what_the_compiler_cannot_do_is_said_and_runs_as_before(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no C++ compiler here")

    monkeypatch.setattr(steps.torch, "compile", partial(torch.compile, backend=refuse))
    pipe = fresh()
    expected = answers(pipe, 1)
    with caplog.at_level(logging.WARNING, "mmspec"):
        pipe.compile()
    assert "LlavaForConditionalGeneration runs without torch.compile" in caplog.text
    assert "no C++ compiler here" in caplog.text
    assert answers(pipe, 1) == expected


@pytest.mark.slow
def test_generated_code_gives_the_same_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    pipe = fresh()
    expected = answers(pipe, 1)
    assert answers(pipe.compile(), 1) == expected


@pytest.mark.skipif("recompile_limit" not in signature(torch.compile).parameters, reason="needs torch 2.12")
def test_more_forms_than_torch_keeps_by_itself_are_compiled() -> None:
    step = steps.CompiledForward("a model", lambda parts, x: x * len(parts))
    assert [step([0] * count, torch.ones(1)).item() for count in range(12)] == list(range(12))
    assert graphs() == 12
