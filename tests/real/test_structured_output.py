"""SmolLM2-135M-Instruct answers 30 JSON schemas: valid, equal to plain decoding, in fewer forward passes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.structured_output import answer, is_valid, read_schemas
from mmspec.pipelines import MMSpecPipeline

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def pipe(smollm2_file: Path) -> Any:
    for package in ("llguidance", "jsonschema"):
        pytest.importorskip(package)
    return MMSpecPipeline.from_pretrained(smollm2_file, accelerator="none")


def test_every_answer_is_valid_and_equal_and_drafts_save_more_than_in_free_text(pipe: Any) -> None:
    cases, settings = read_schemas(), {"temperature": 0.0, "seed": 0}
    pipe.set_accelerator("none")
    plain = answer(pipe, cases, True, 6, max_new_tokens=96, **settings)
    pipe.set_accelerator("copy", length="fixed")
    found = answer(pipe, cases, True, 2, max_new_tokens=96, **settings)
    assert found.tokens == plain.tokens
    ended = [index for index, reason in enumerate(found.reasons) if reason == "eos"]
    assert len(ended) >= 28  # a number without bounds may go on to the last allowed token
    assert all(is_valid(found.texts[index], cases[index]) for index in ended)
    free = answer(pipe, cases[:6], False, 6, max_new_tokens=24, **settings)
    assert found.tokens_per_forward >= 1.5 * free.tokens_per_forward
