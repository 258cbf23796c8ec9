"""The autoregressive part of GLM-Image gives the tokens of `generate`, with positions by output index."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import mmspec
from mmspec.accelerators import build_accelerator
from mmspec.core.canvas import Stopping
from mmspec.families.glm_image.target import GlmImageTarget
from mmspec.targets import adapt
from tests.targets import loop
from tests.tiny_models.glm_image import CODES, glm_image_inputs, tiny_glm_image

CASES = {
    "text to image": glm_image_inputs(4, 6),
    "higher than wide": glm_image_inputs(5, 2, preview=(3, 1), words=4, seed=1),
    "image to image": glm_image_inputs(3, 4, preview=None, seed=2),
}
LENGTHS = {"text to image": 31, "higher than wide": 14, "image to image": 13}
LONGEST = max(LENGTHS.values())


@functools.cache
def target() -> GlmImageTarget:
    made = adapt(tiny_glm_image())
    assert isinstance(made, GlmImageTarget)
    return made


@functools.cache
def expected(case: str) -> list[int]:
    """Return the tokens up to the end mark; `generate` has no positions after it."""
    inputs = CASES[case]
    how: dict[str, Any] = {"max_new_tokens": LENGTHS[case], "do_sample": False, "eos_token_id": None}
    return target().model.generate(**inputs, **how)[0, inputs["input_ids"].shape[1] :].tolist()


def test_rows_draw_what_generate_draws() -> None:
    """Batches with and without previews, also after the end of shorter rows."""
    accelerators = [build_accelerator(name) for name in ("none", "copy")]
    inputs, known = list(CASES.values()), [expected(case) + [0] * LONGEST for case in CASES]
    accelerators += [loop.oracle(inputs, known, 5, 128, corruption) for corruption in (0.0, 0.3, 1.0)]
    for accelerator in accelerators:
        run = loop.decode(target(), accelerator, list(CASES.values()), Stopping(LONGEST))
        for case, output in zip(CASES, run.outputs, strict=True):
            assert output[: LENGTHS[case]] == expected(case), (accelerator.name, case)


@pytest.mark.parametrize("case", CASES)
def test_the_layout_is_the_preview_and_the_image(case: str) -> None:
    """The layout has as many tokens as the model has positions, without the end mark, which is not forced."""
    layout = target().layout_for(CASES[case])
    target().prefill([CASES[case]], 64)
    assert (
        layout.length == LENGTHS[case] - 1 == target().model.model._cached_decode_position_ids.shape[-1] - 1
    )
    sides = [(grid.rows, grid.columns) for grid in layout.grids]
    assert (
        sides
        == {
            "text to image": [(2, 3), (4, 6)],
            "higher than wide": [(3, 1), (5, 2)],
            "image to image": [(3, 4)],
        }[case]
    )
    assert layout.codebook_size == CODES


@pytest.mark.parametrize(
    ("name", "options", "case"),
    [
        ("copy", {}, "higher than wide"),
        ("sjd", {"window": 6}, "text to image"),
        ("gsd", {"window": 6, "delta": 0.0}, "image to image"),
    ],
)
def test_generate_is_accelerated(name: str, options: dict[str, Any], case: str) -> None:
    how: dict[str, Any] = {"max_new_tokens": LENGTHS[case], "do_sample": False, "eos_token_id": None}
    method = mmspec.accelerate(name, **options)
    drawn = target().model.generate(**CASES[case], **how, custom_generate=method)
    assert drawn[0, CASES[case]["input_ids"].shape[1] :].tolist() == expected(case)


def test_another_request_changes_nothing() -> None:
    """The module stores the table of positions of the last prompt."""
    first = loop.GreedyRun(target(), build_accelerator("none"), [CASES["text to image"]], Stopping(31))
    rounds = iter(first)
    for _ in range(5):
        next(rounds)
    expected.__wrapped__("image to image")
    target().model.generate(**CASES["higher than wide"], max_new_tokens=3)
    for _ in rounds:
        pass
    assert first.outputs == [expected("text to image")]


def test_rows_that_move_keep_their_positions() -> None:
    accelerator = build_accelerator("none").fit(target())
    made = target()
    batches = []
    for case in CASES:
        state, _ = made.prefill([CASES[case]], 64)
        batches.append(state)
    joined = batches[0].joined(batches[1], (1, 1)).joined(batches[2], (2, 1))
    assert joined.table.shape[0] == 3 and accelerator.drafter is not None
    for row, state in enumerate(batches):
        alone = joined.part([row])
        kept = state.table.shape[1]
        assert torch.equal(alone.table[:, :kept], state.table)
        assert (alone.table[:, kept:] == state.table[:, -1:]).all()
        assert alone.starts.tolist() == [CASES[list(CASES)[row]]["input_ids"].shape[1]]
