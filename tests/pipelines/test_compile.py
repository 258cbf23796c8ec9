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

from mmspec.accelerators import trained_head
from mmspec.pipelines import ContinuousImagePipeline, ImagePipeline, MMSpecPipeline, VisionLanguagePipeline
from mmspec.targets import steps
from tests.methods.corrected_checks import head_for
from tests.tiny_models import VISION_LANGUAGE_FAMILIES, tiny_image, tiny_janus
from tests.tiny_models.continuous import folder_of

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


def test_answers_stay_the_same_with_any_accelerator_batch_and_after_moves(checkpoints: Path) -> None:
    pipe = fresh()
    expected = [answers(pipe, rows) for rows in (1, 2)]
    assert pipe.compile(batch_sizes=(1, 2)) is pipe
    assert graphs() > 0
    assert not counters["graph_break"]
    assert [answers(pipe, rows) for rows in (2, 1)] == expected[::-1]
    pipe.set_accelerator("none")
    pipe.to("cpu")
    assert pipe.target.steps is not None
    assert answers(pipe, 1) == expected[0]


@pytest.mark.slow
def test_a_draft_model_is_compiled_too(checkpoints: Path) -> None:
    draft = {"drafter": checkpoints / "draft", "num_draft_tokens": 2}
    pipe = MMSpecPipeline.from_pretrained(checkpoints / "text", accelerator="draft_model", **draft)
    expected = pipe(PROMPTS[0], apply_chat_template=False, **SHORT).tokens
    pipe.compile()
    assert pipe.accelerator.drafter.reader.steps is not None
    assert pipe(PROMPTS[0], apply_chat_template=False, **SHORT).tokens == expected


def test_later_calls_compile_nothing_new() -> None:
    pipe = fresh().compile()
    lengths = (3, 9, 17)
    for length in lengths:
        pipe(PROMPTS[0] * length, max_new_tokens=5)
    assert graphs() <= 3  # symbolic sizes that happen to be equal, or 1, are graphs of their own
    known = graphs()
    for length in (*lengths, 5, 12):
        pipe(PROMPTS[0] * length, max_new_tokens=5)
    assert graphs() == known


@pytest.mark.slow
def test_the_passes_of_a_corrector_are_compiled_too(caplog: pytest.LogCaptureFixture) -> None:
    pipe = ImagePipeline(*tiny_janus(), accelerator="none")
    pipe.set_progress_bar_config(disable=True)
    settings = {"seed": 3, "output_type": "latent"}
    expected = pipe("a red circle", **settings).tokens
    head = head_for(pipe.target)
    pipe.set_accelerator(trained_head("cjd", head, window=6, coupling="exact", front="2x2")).compile()
    assert isinstance(pipe.accelerator.drafter.draw, steps.CompiledForward) and graphs() > 0
    assert pipe("a red circle", **settings).tokens == expected
    assert not counters["graph_break"] and "without torch.compile" not in caplog.text


@pytest.mark.parametrize(
    ("kind", "asked", "method"),
    [
        ("nextstep", {"prompt": "a"}, {"accelerator": "none"}),
        ("mar", {"class_labels": 1}, {"accelerator": "masked", "iterations": 4}),
    ],
)
@pytest.mark.slow
def test_continuous_images_stay_the_same(kind: str, asked: dict[str, Any], method: dict[str, Any]) -> None:
    pipe = MMSpecPipeline.from_pretrained(folder_of(kind), **method)
    assert isinstance(pipe, ContinuousImagePipeline)
    pipe.set_progress_bar_config(disable=True)
    settings = {"num_inference_steps": 3, "guidance_scale": 2.0, "seed": 3, "output_type": "pt"}
    expected = pipe(**asked, **settings).images
    pipe.compile()
    assert graphs() > 0
    torch.testing.assert_close(pipe(**asked, **settings).images, expected, rtol=1e-4, atol=1e-4)


def test_hidden_states_are_read_from_compiled_forwards() -> None:
    """Hooks that were renewed with every call would be compiled with every call, and dropped in the end."""
    pipe = fresh()
    target = pipe.target
    target.compile()
    request = pipe._example(1).requests[0].inputs
    states = []
    for _ in range(2):
        state, read = target.prefill([request], 64, taps=(0, -1))
        assert set(read.taps) == {0, -1}
        states.append(state.hidden)
        state.close()
    assert states[0] is states[1]


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
