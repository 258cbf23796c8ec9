"""Every argument of `generate` has its effect, or is refused by name before the first forward pass.

Calls with `custom_generate=` are refused. An enabled model runs such calls without acceleration.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    DynamicCache,
    GenerationConfig,
    PreTrainedModel,
    StaticCache,
)

import mmspec
from mmspec.errors import InputError
from mmspec.pipelines import in_place
from mmspec.pipelines.generate_inputs import check_mask
from tests.pipelines.byte_level import byte_level_tokenizer
from tests.tiny_models import (
    encode,
    tiny_images,
    tiny_llama,
    tiny_mistral_sliding,
    tiny_qwen2_5_vl,
    tiny_qwen3_5,
    user_message,
)
from tests.versions import IMAGES_REACH_THE_LOOP

NEW = 16
ELSEWHERE = ("synced_gpus",)  # wants processes
TOKENIZER = byte_level_tokenizer()
IDS = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 5, 6]])
TWO = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8], [9, 9, 4, 9, 9, 4, 9, 9]])
L = IDS.shape[1]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    made = tiny_llama(vocab=300)
    made.generation_config.eos_token_id, made.generation_config.pad_token_id = None, 1
    return made


def tokens(output: Any) -> torch.Tensor:
    found: torch.Tensor = output if isinstance(output, torch.Tensor) else output.sequences
    return found


def as_before(model: PreTrainedModel, give: Callable[[], dict[str, Any]], calls: int) -> None:
    """Assert that an enabled model gives the tokens that it gave before, by so many accelerated calls."""
    wanted = tokens(model.generate(**give()))
    mmspec.enable(model, "copy")
    try:
        assert torch.equal(tokens(model.generate(**give())), wanted)
        assert mmspec.summary(model)[0].calls == calls
    finally:
        mmspec.disable(model)
    assert "generate" not in vars(model) and in_place.MARK not in vars(model)


def refused(model: PreTrainedModel, give: Callable[[], dict[str, Any]], name: str) -> None:
    """Assert that a call is refused by this name before any forward, and passed on where enabled."""
    call, forwards = give(), []
    hook = model.register_forward_pre_hook(lambda *_: forwards.append(1))
    with pytest.raises(InputError, match=name):
        model.generate(**call, custom_generate=mmspec.accelerate("copy"))
    hook.remove()
    assert not forwards
    if name not in ELSEWHERE:
        as_before(model, give, calls=0)


def filled(model: PreTrainedModel, kind: str) -> Any:
    """A cache of four tokens that nobody has read (soft prompts), or of the first four of the prompt."""
    if kind == "soft":
        cache, generator = DynamicCache(config=model.config), torch.Generator().manual_seed(3)
        for layer in range(model.config.num_hidden_layers):
            cache.update(*(torch.randn(1, 2, 4, 8, generator=generator) for _ in range(2)), layer)
        return cache
    cache = StaticCache(config=model.config, max_cache_len=64) if kind == "static" else DynamicCache()
    with torch.no_grad():
        model(IDS[:, :4], past_key_values=cache, use_cache=True)
    return cache


INPUTS: dict[str, tuple[Callable[[PreTrainedModel], dict[str, Any]], str]] = {
    "soft prompts": (
        lambda m: {"past_key_values": filled(m, "soft"), "attention_mask": torch.ones(1, L + 4).long()},
        "got 'DynamicCache of 4 tokens'",
    ),
    "a cache to go on from": (lambda m: {"past_key_values": filled(m, "read")}, "DynamicCache of 4 tokens"),
    "a static cache": (lambda m: {"past_key_values": filled(m, "static")}, "got 'StaticCache of 4 tokens'"),
    "a cache to be filled": (lambda m: {"past_key_values": DynamicCache()}, "got 'DynamicCache of 0 tokens'"),
    "positions": (lambda m: {"position_ids": torch.arange(L)[None] * 2}, "position_ids"),
    "positions from elsewhere": (lambda m: {"position_ids": torch.arange(L)[None] + 7}, "position_ids"),
    "embeddings": (lambda m: {"inputs_embeds": m.get_input_embeddings()(IDS) * 2}, "inputs_embeds"),
    "a mask of weights": (lambda m: {"attention_mask": torch.full((1, L), 2)}, "attention_mask"),
    "padding at the end": (lambda m: {"attention_mask": (torch.arange(L) < 9)[None]}, "attention_mask"),
    "no cache": (lambda m: {"use_cache": False}, "use_cache"),
    "chunks": (lambda m: {"prefill_chunk_size": 4}, "prefill_chunk_size"),
    "beams": (lambda m: {"num_beams": 2}, "num_beams"),
    "scores": (lambda m: {"output_scores": True, "return_dict_in_generate": True}, "output_scores"),
    "prompt lookup": (lambda m: {"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens"),
    "an assistant": (lambda m: {"assistant_model": copy.deepcopy(m)}, "assistant_model"),
    "processes": (lambda m: {"synced_gpus": True}, "synced_gpus"),
}  # fmt: skip
SAYS_NOTHING: dict[str, dict[str, Any]] = {
    "positions": {"position_ids": torch.arange(L)[None]},
    "a mask": {"attention_mask": torch.ones(1, L).long()},
    "a mask of booleans": {"attention_mask": torch.ones(1, L, dtype=torch.bool)},
    "a hole": {"attention_mask": (torch.arange(L) != 4).long()[None]},
    "padding": {"attention_mask": (torch.arange(L) > 2).long()[None]},
    "a cache": {"use_cache": True, "cache_implementation": "dynamic"},
    "logits": {"logits_to_keep": 3},
    "the default": {"labels": None},
}


def call_of(more: dict[str, Any]) -> dict[str, Any]:
    return {"input_ids": IDS, "max_new_tokens": NEW, "do_sample": False, **more}


def test_what_would_be_lost_is_refused_by_name_and_passed_on_in_place(model: PreTrainedModel) -> None:
    for make, name in INPUTS.values():
        refused(model, lambda: call_of(make(model)), name)  # noqa: B023


def test_what_says_nothing_new_is_accelerated(model: PreTrainedModel) -> None:
    for more in SAYS_NOTHING.values():
        as_before(model, lambda: call_of(more), calls=1)  # noqa: B023
    trained = copy.deepcopy(model)
    trained.generation_config.use_cache = False  # as after training
    as_before(trained, lambda: call_of({}), calls=1)


@pytest.mark.parametrize("build", [tiny_mistral_sliding, tiny_qwen3_5])
def test_holes_that_layers_count_are_refused(build: Any) -> None:
    counting = build()
    with pytest.raises(InputError, match="attention_mask .*inside a prompt"):
        check_mask(counting, IDS, torch.tensor([[1, 1, 0, 1, 1, 1, 1, 1, 1, 1]]))
    assert check_mask(counting, IDS, torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1, 1]])).sum() == 7


@pytest.mark.skipif(IMAGES_REACH_THE_LOOP, reason="generate does not make these positions before 5.23")
def test_positions_on_several_axes_that_are_the_callers() -> None:
    vlm, processor = tiny_qwen2_5_vl()
    asked = dict(encode(processor, user_message("what is there ?", tiny_images()[:1])))
    length = asked["input_ids"].shape[1]
    as_before(vlm, lambda: {**asked, "max_new_tokens": 8}, calls=1)
    linear = torch.arange(length)[None]
    refused(vlm, lambda: {**asked, "position_ids": linear, "max_new_tokens": 8}, "position_ids")
    falling = torch.stack([linear, linear, linear.flip(-1), linear])
    refused(vlm, lambda: {**asked, "position_ids": falling, "max_new_tokens": 8}, "position_ids")
    spread = torch.cat([linear[None], linear[None].expand(3, -1, -1) * 3])
    as_before(vlm, lambda: {**asked, "position_ids": spread, "max_new_tokens": 8}, calls=1)


def test_inputs_that_are_prepared_by_somebody_else_are_refused(model: PreTrainedModel) -> None:
    """An instance's own method, as PEFT puts it there, and that of a class outside of transformers."""
    louder = model.get_input_embeddings()(torch.tensor([[3, 4]]))

    def prompted(prepare: Any) -> Any:
        def prepare_inputs(*args: Any, **kwargs: Any) -> dict[str, Any]:
            inputs: dict[str, Any] = prepare(*args, **kwargs)
            if kwargs.get("is_first_iteration"):
                embedded = model.get_input_embeddings()(inputs.pop("input_ids"))
                inputs |= {"inputs_embeds": torch.cat([louder, embedded], 1), "position_ids": None}
            return inputs

        return prepare_inputs

    own = copy.deepcopy(model)
    own.prepare_inputs_for_generation = prompted(own.prepare_inputs_for_generation)
    refused(own, lambda: call_of({}), "prepare_inputs_for_generation")

    class Prompted(type(model)):  # type: ignore[misc]
        prepare_inputs_for_generation = prompted(type(model).prepare_inputs_for_generation)

    class Harmless(type(model)):  # type: ignore[misc]
        def prepare_inputs_for_generation(self, input_ids: Any, **kwargs: Any) -> Any:
            return super().prepare_inputs_for_generation(input_ids, **kwargs)

    made = {kind: kind(model.config).eval() for kind in (Prompted, Harmless)}
    for other in made.values():
        other.load_state_dict(model.state_dict())
        other.generation_config = model.generation_config
    as_before(made[Harmless], lambda: call_of({}), calls=1)
    refused(made[Prompted], lambda: call_of({}), "prepare_inputs_for_generation must leave")


# Streamers


class Rows:
    def __init__(self) -> None:
        self.got: list[list[int]] = []

    def put(self, value: torch.Tensor) -> None:
        assert value.device.type == "cpu"
        self.got.append(value.tolist())

    def end(self) -> None:
        self.got.append([])


def test_a_streamer_of_several_rows_gets_what_generate_gives_it(model: PreTrainedModel) -> None:
    """One of the rows ends early; the drafts of another are accepted more often."""
    padded = {"input_ids": TWO, "attention_mask": torch.tensor([[1] * 8, [0] * 3 + [1] * 5])}
    free = model.generate(**padded, max_new_tokens=NEW, do_sample=False)[:, TWO.shape[1] :]
    ends = next(token for token in free[0, 2:].tolist() if token not in free[1].tolist())
    for more in (
        {},
        {"eos_token_id": ends, "pad_token_id": 1},
        {"num_return_sequences": 2, "do_sample": True},
    ):
        call = {**padded, "max_new_tokens": NEW, "do_sample": False, "top_k": 1, **more}
        plain, fast = Rows(), Rows()
        output = model.generate(**call, streamer=plain)
        got = model.generate(**call, streamer=fast, custom_generate=mmspec.accelerate("copy"))
        assert torch.equal(got, output) and fast.got == plain.got and len(fast.got[1]) == len(output)


# What transformers does not send through a loop of others


def test_stop_strings_are_accelerated(model: PreTrainedModel) -> None:
    for ids, where in ((IDS, "config"), (TWO, "keywords")):
        free = model.generate(ids, max_new_tokens=NEW, do_sample=False)[0, ids.shape[1] :].tolist()
        text = next(word for token in free[3:] if (word := TOKENIZER.decode([token])).isascii() and word)
        settings = {"stop_strings": [text], "max_new_tokens": NEW, "eos_token_id": 299, "pad_token_id": 1}
        asked = {"generation_config": GenerationConfig(**settings)} if where == "config" else settings
        assert len(ids) > 1 or model.generate(ids, **asked, tokenizer=TOKENIZER).shape[1] < L + NEW
        as_before(model, lambda: {"input_ids": ids, "tokenizer": TOKENIZER, **asked}, calls=1)  # noqa: B023


def test_an_error_is_that_of_transformers(model: PreTrainedModel) -> None:
    mmspec.enable(model)
    for wrong in ({"max_new_token": 3}, {"input_ids": None}, {"num_beams": 2, "streamer": Rows()}):
        with pytest.raises(ValueError) as said:
            model.generate(**call_of(wrong))
        assert not isinstance(said.value, InputError)
    mmspec.disable(model)
