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


def test_rows_that_end_inside_a_block_leave_their_neighbours_alone() -> None:
    """Row 0 is cut by the limit inside a draft at the end of its buffer (256), and row 1 goes on."""
    model = tiny_llama()
    depth, new_tokens = 12, 45
    inputs = [prompt(256 - new_tokens - (2 * depth + 1)), prompt(30)]
    beyond = [generate(model, row, new_tokens + depth) for row in inputs]
    drafts = [beyond[0], [(token + 1) % VOCABULARY for token in beyond[1]]]
    run = decode(CausalTarget(model), oracle(inputs, drafts, depth, VOCABULARY), inputs, Stopping(new_tokens))
    assert run.outputs == [row[:new_tokens] for row in beyond]
    assert run.stats.rounds[0] < run.stats.rounds[1]


def test_rows_that_meet_an_end_token_inside_a_block_stop_there() -> None:
    model = tiny_llama()
    inputs = [prompt(length) for length in LENGTHS]
    references = [generate(model, row, NEW_TOKENS) for row in inputs]
    ends = references[1][20]
    cut = [row[: row.index(ends) + 1] if ends in row else row for row in references]
    assert len({len(row) for row in cut}) > 1
    for accelerator in accelerators(inputs, references):
        run = decode(CausalTarget(model), accelerator, inputs, Stopping(NEW_TOKENS, frozenset({ends})))
        assert run.outputs == cut, accelerator
        assert run.stats.new_tokens == [len(row) for row in cut]


def test_output_that_outgrows_the_buffers() -> None:
    model = tiny_llama()
    inputs = [prompt(250), prompt(3)]
    references = [generate(model, row, 300) for row in inputs]
    run = decode(CausalTarget(model), oracle(inputs, references, 4, VOCABULARY, 0.3), inputs, Stopping(300))
    assert run.outputs == references
