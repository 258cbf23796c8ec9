"""Text models: the same greedy output as `generate` on every layout of the cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mmspec.accelerator import Accelerator
from mmspec.accelerators import build_accelerator
from mmspec.core.canvas import Stopping
from mmspec.targets import CausalTarget
from tests.targets.loop import decode, generate, oracle
from tests.tiny_models import TEXT_MODELS, tiny_llama

NEW_TOKENS = 40
VOCABULARY = 64
LENGTHS = [1, 5, 20]
# the soft cap of Gemma 2 exists in eager attention alone
BACKENDS = [(name, "eager" if name == "gemma2" else "sdpa") for name in TEXT_MODELS]
BACKENDS += [(name, "eager") for name in ("llama", "qwen2_mixed_sliding")]


def prompt(length: int, seed: int = 0) -> dict[str, Any]:
    ids = torch.randint(1, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(seed + length))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def accelerators(inputs: list[dict[str, Any]], references: list[list[int]]) -> list[Accelerator]:
    return [
        build_accelerator("none"),
        build_accelerator("copy", min_match=1),
        *(oracle(inputs, references, 4, VOCABULARY, corruption) for corruption in (0.0, 0.3)),
    ]


@pytest.mark.parametrize(("name", "attention"), BACKENDS)
@pytest.mark.every(3)
def test_ragged_batch_gives_what_generate_gives_for_each_row(name: str, attention: str) -> None:
    model = TEXT_MODELS[name]()
    model.set_attn_implementation(attention)
    inputs = [prompt(length) for length in LENGTHS]
    references = [generate(model, row, NEW_TOKENS) for row in inputs]
    for accelerator in accelerators(inputs, references):
        run = decode(CausalTarget(model), accelerator, inputs, Stopping(NEW_TOKENS))
        assert run.outputs == references, accelerator


def test_output_that_outgrows_the_buffers() -> None:
    model = tiny_llama()
    inputs = [prompt(250), prompt(3)]
    references = [generate(model, row, 300) for row in inputs]
    run = decode(CausalTarget(model), oracle(inputs, references, 4, VOCABULARY, 0.3), inputs, Stopping(300))
    assert run.outputs == references
