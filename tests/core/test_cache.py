"""The ragged cache: its contents, masks and growth, and the models that it does not support."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PaliGemmaConfig, PaliGemmaForConditionalGeneration

from mmspec.core import cache as cache_module
from mmspec.core.canvas import Canvas
from mmspec.errors import UnsupportedModelError
from mmspec.methods.draft_model.drafter import DraftModelDrafter
from mmspec.targets import CausalTarget
from tests.contracts import checks, edge_checks
from tests.contracts.checks import PROMPTS, VOCABULARY
from tests.contracts.running import Recorder, decode, generate
from tests.tiny_models import REFUSED_TEXT_MODELS, randomise, tiny_llama


def test_after_every_round_the_cache_equals_a_fresh_prefill() -> None:
    checks.cache_equals_a_fresh_prefill()


def test_logits_of_a_tree_are_those_of_its_paths_under_sdpa_and_eager() -> None:
    checks.tree_logits_are_path_logits()


def test_every_prompt_of_a_batch_is_read_as_the_beginning() -> None:
    """PaliGemma has bidirectional attention in the first part of a prompt, while the cache is empty."""
    text = dict(vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2)
    text |= dict(num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    vision = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    config = PaliGemmaConfig(
        text_config=text, vision_config=vision | dict(image_size=28), image_token_index=VOCABULARY - 1
    )
    model = randomise(PaliGemmaForConditionalGeneration(config), seed=3)
    rows = [{"input_ids": torch.tensor([list(prompt)])} for prompt in PROMPTS]
    for row in rows:
        row["token_type_ids"] = (torch.arange(row["input_ids"].shape[1]) > 3).long()[None]
    logits = CausalTarget(model).prefill(rows, 64)[1].logits
    for row, read in zip(rows, logits, strict=True):
        assert (
            read - model(**row).logits[0, -1]
        ).abs().max() < 1e-4  # rounding: 1e-5; with causal attention: 0.04


def test_a_path_longer_than_the_window_is_measured_in_tokens() -> None:
    checks.sliding_identity_on_trees()


@pytest.mark.parametrize("name", REFUSED_TEXT_MODELS)
def test_recurrent_models_are_refused_before_any_forward(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = REFUSED_TEXT_MODELS[name]()

    def forward(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("no forward may run")

    monkeypatch.setattr(model, "forward", forward)
    with pytest.raises(UnsupportedModelError, match="cannot restore after a rejection"):
        CausalTarget(model)


def test_attention_that_cannot_be_masked_is_refused_with_what_to_do() -> None:
    model = tiny_llama()
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(UnsupportedModelError, match="sdpa"):
        CausalTarget(model)


def test_a_cache_that_must_grow_does_so_in_blocks_without_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft model's cache starts at the size of its prompts and grows with them."""
    monkeypatch.setattr(cache_module, "CAPACITY_BLOCK", 16)
    target, small = CausalTarget(tiny_llama()), Recorder(tiny_llama())
    expected = [generate(target.model, prompt, 64) for prompt in PROMPTS]
    capacities: list[int] = []

    def watch(canvas: Canvas) -> None:
        if hasattr(small, "state"):  # from the first draft on
            capacities.append(small.state.cache.plan.capacity)

    run = decode(target, PROMPTS, DraftModelDrafter(small, 4), max_new_tokens=64, watch=watch)
    assert run.outputs == expected and run.stats.acceptance_length > 4.5, (
        "a copy of the target is always right"
    )
    assert capacities == sorted(capacities) and len(set(capacities)) >= 4
    assert all(capacity % 16 == 0 for capacity in capacities)


def test_a_finished_row_never_writes_into_its_neighbour() -> None:
    edge_checks.finished_rows_leave_the_others_alone()
