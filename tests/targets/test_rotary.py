"""Rotary frequencies that change with the length: each row equals a single run of `generate`.

`generate` stores the lengths of its calls in the model, which affects later prompts, so the expected output
comes from a new model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
)

import mmspec
from mmspec.accelerators import build_accelerator
from mmspec.core.canvas import Stopping
from mmspec.errors import UnsupportedModelError
from mmspec.targets import adapt
from tests.targets.loop import decode, generate, oracle
from tests.tiny_models import encode, randomise, tiny_images, tiny_llava, tiny_qwen2_vl, user_message

CHANGE, NEW, V = 32, 24, 64
TEXT: dict[str, Any] = dict(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=V, intermediate_size=32,
    num_key_value_heads=1, head_dim=16, pad_token_id=0, bos_token_id=None, eos_token_id=None,
)  # fmt: skip
DYNAMIC: dict[str, Any] = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 8.0}
LONG: dict[str, Any] = {
    "rope_type": "longrope", "rope_theta": 1e4, "factor": 16.0, "original_max_position_embeddings": CHANGE,
    "short_factor": [1.0] * 8, "long_factor": [1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0],
}  # fmt: skip
BY_LAYER = {"full_attention": DYNAMIC, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}


def llama(rope: Mapping[str, Any], longest: int) -> PreTrainedModel:
    config = LlamaConfig(**TEXT, max_position_embeddings=longest, rope_parameters=dict(rope))
    return randomise(LlamaForCausalLM(config), seed=1)


def gemma3() -> PreTrainedModel:
    kinds = ["sliding_attention", "full_attention"]
    config = Gemma3TextConfig(
        **TEXT, max_position_embeddings=CHANGE, layer_types=kinds, sliding_window=12, rope_parameters=BY_LAYER
    )
    return randomise(Gemma3ForCausalLM(config), seed=1)


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "dynamic": lambda: llama(DYNAMIC, CHANGE),
    "longrope": lambda: llama(LONG, 16 * CHANGE),
    "by layer": gemma3,
}


def prompt(length: int) -> dict[str, Any]:
    ids = torch.randint(1, V, (1, length), generator=torch.Generator().manual_seed(length))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def due(model: PreTrainedModel, inputs: Mapping[str, Any]) -> list[int]:
    return generate(copy.deepcopy(model), inputs, NEW)


#: Below the change, at it, across it, and beyond it from the start.
ROWS = [prompt(length) for length in (5, 9, 20, CHANGE - 1, CHANGE, CHANGE + 1, 40)]


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.every(3)
def test_every_row_goes_across_as_it_does_alone(kind: str) -> None:
    model = MODELS[kind]()
    answers = [due(model, row) for row in ROWS]
    target = adapt(model)
    for row, answer in zip(ROWS, answers, strict=True):
        for drafts in (build_accelerator("none"), oracle([row], [answer], 4, V, 0.3)):
            assert decode(target, drafts, [row], Stopping(NEW)).outputs == [answer]
    for drafts in (build_accelerator("none"), build_accelerator("copy"), oracle(ROWS, answers, 4, V, 0.3)):
        assert decode(target, drafts, ROWS, Stopping(NEW)).outputs == answers


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.every(3)
def test_the_model_is_left_as_it_was(kind: str) -> None:
    """The lengths of a call do not affect later calls of mmspec or of transformers."""
    model = MODELS[kind]()
    answers = [due(model, row) for row in ROWS[-3:]]
    (kept,) = [dict(part.named_buffers()) for part in model.modules() if hasattr(part, "rope_type")]
    kept = {name: value.clone() for name, value in kept.items()}
    for _ in range(2):
        assert decode(adapt(model), build_accelerator("copy"), ROWS[-3:], Stopping(NEW)).outputs == answers
    (after,) = [dict(part.named_buffers()) for part in model.modules() if hasattr(part, "rope_type")]
    assert kind == "longrope" or all(torch.equal(kept[name], after[name]) for name in kept)
    assert generate(model, ROWS[-1], NEW) == answers[-1]


@pytest.mark.parametrize("family", ["llava", "qwen2_vl"])
def test_prompts_with_images_go_across(family: str) -> None:
    """The frequencies are in a config inside of the model's; M-RoPE counts less than its tokens."""
    made, processor = {"llava": tiny_llava, "qwen2_vl": tiny_qwen2_vl}[family]()
    asked = [user_message("what is there ?", tiny_images()[:count]) for count in (1, 2)]
    rows = [dict(encode(processor, each)) for each in asked]
    config = copy.deepcopy(made.config)
    text = config.get_text_config(decoder=True)
    text.max_position_embeddings = max(row["input_ids"].shape[1] for row in rows) + (
        4 if family == "llava" else -8
    )
    text.rope_parameters = {**text.rope_parameters, **DYNAMIC}
    model = type(made)(config).eval()
    model.load_state_dict(made.state_dict())
    model.generation_config.eos_token_id = None
    answers = [due(model, row) for row in rows]
    vocabulary = config.get_text_config(decoder=True).vocab_size
    drafts = oracle(rows, answers, 4, vocabulary, 0.3)
    assert decode(adapt(model), drafts, rows, Stopping(NEW)).outputs == answers
    assert answers != [generate(made, row, NEW) for row in rows], "these frequencies do change"


def phi3() -> PreTrainedModel:
    config = Phi3Config(
        **TEXT,
        max_position_embeddings=16 * CHANGE,
        rope_parameters=LONG,
        original_max_position_embeddings=CHANGE,
    )
    return randomise(Phi3ForCausalLM(config), seed=1)


def test_a_model_that_reads_all_of_its_text_again_there_is_refused_before_its_first_forward() -> None:
    model = phi3()
    for length, new in ((5, NEW), (CHANGE + 1, NEW), (20, CHANGE - 20 + 1)):
        row, wanted = prompt(length), dict(do_sample=False, max_new_tokens=new)
        answer = copy.deepcopy(model).generate(**row, **wanted)
        assert torch.equal(model.generate(**row, **wanted, custom_generate=mmspec.accelerate("copy")), answer)
    forwards: list[Any] = []
    model.register_forward_pre_hook(lambda *given: forwards.append(given))
    with pytest.raises(UnsupportedModelError, match=r"change at 32 tokens.*20 tokens and 14 new"):
        model.generate(**prompt(20), max_new_tokens=14, custom_generate=mmspec.accelerate("none"))
    assert not forwards
    wanted = {"max_new_tokens": 20, "do_sample": False}
    answer = copy.deepcopy(model).generate(**prompt(20), **wanted)
    assert torch.equal(mmspec.enable(model).generate(**prompt(20), **wanted), answer)
    assert mmspec.summary(model)[0].calls == 0
