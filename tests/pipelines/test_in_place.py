"""`mmspec.enable(model_or_pipe)`: equal texts and images, from objects that stay intact."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from transformers import pipeline

import mmspec
from mmspec.accelerators import build_accelerator
from mmspec.errors import InputError
from tests.methods import mtp_checks
from tests.tiny_models import (
    HYBRID_TEXT_MODELS,
    encode,
    tiny_images,
    tiny_llama,
    tiny_llava,
    tiny_qwen3_5_vl,
    user_message,
)
from tests.tiny_models.glm_image import tiny_glm_pipeline
from tests.versions import IMAGES_REACH_THE_LOOP

FAMILIES = {"llava": tiny_llava, "qwen3_5": tiny_qwen3_5_vl}
NEW = 20


def batch(processor: Any) -> dict[str, Any]:
    """Two images, none, one; where `generate` cannot tell the images of rows apart, two alone."""
    images = tiny_images()
    asked = [user_message("what is there ?", images[:2]), user_message("which ?", [])]
    if IMAGES_REACH_THE_LOOP:
        return dict(encode(processor, asked[0]))
    return dict(encode(processor, *asked, user_message("which colour is the circle ?", images[2:])))


def test_a_model_of_recurrent_layers_alone_says_the_same_words() -> None:
    """Its cache, which `generate` makes, does not count tokens."""
    model, ids = HYBRID_TEXT_MODELS["mamba2"](), torch.tensor([[1, 2, 3, 4, 1, 2, 3, 4]])
    asked = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW, "do_sample": False}
    wanted = model.generate(ids, **asked)
    mmspec.enable(model, "copy")
    assert torch.equal(model.generate(ids, **asked), wanted)
    (told,) = mmspec.summary(model)
    assert told.calls == 1


@pytest.mark.parametrize(("family", "accelerator"), [("llava", "none"), ("qwen3_5", "copy")])
def test_a_model_says_the_same_words(family: str, accelerator: str) -> None:
    model, processor = FAMILIES[family]()
    inputs = batch(processor)
    wanted = model.generate(**inputs, max_new_tokens=NEW)
    kept = dict(vars(model))
    assert mmspec.enable(model, accelerator) is model
    for count in (1, 2):
        assert torch.equal(model.generate(**inputs, max_new_tokens=NEW), wanted)
        (told,) = mmspec.summary(model)
        assert (told.calls, told.tokens) == (count, count * len(wanted) * NEW)
        assert told.forwards > 0 and told.last is not None and told.last.accelerator == accelerator
        assert told.name == type(model).__name__ and told.exactness == "exact"
        assert f"{count} calls, {told.tokens} tokens" in str(told)
    mmspec.enable(model, build_accelerator("copy", num_draft_tokens=4))  # takes the place of the first
    assert calls(model) == 0 and mmspec.summary(model)[0].accelerator == "copy"
    assert mmspec.disable(model) is model
    assert dict(vars(model)) == kept
    assert torch.equal(model.generate(**inputs, max_new_tokens=NEW), wanted)


class Pipeline:
    """The parts of a diffusers pipeline that `enable` uses."""

    def __init__(self, **components: Any) -> None:
        self.components = components


def draw(pipe: Any, prompt: Any = "a red circle") -> np.ndarray:
    """An image [n, 64, 64, 3] of a GlmImagePipeline."""
    how: dict[str, Any] = {"height": 64, "width": 64, "num_inference_steps": 2, "output_type": "np"}
    made: np.ndarray = pipe(prompt, generator=torch.Generator().manual_seed(3), **how).images
    return made


@pytest.fixture
def drawing() -> Any:
    pipe = tiny_glm_pipeline()
    pipe.set_progress_bar_config(disable=True)
    return pipe


def test_a_pipeline_of_diffusers_draws_the_same_images(drawing: Any) -> None:
    """Greedily: images that are sampled are tested with the model itself."""
    encoder = drawing.vision_language_encoder
    encoder.generation_config.top_k = 1
    kept, untouched = dict(vars(encoder)), draw(drawing)
    mmspec.enable(drawing, "sjd", window=8)
    assert np.array_equal(draw(drawing), untouched)
    (told,) = mmspec.summary(drawing)
    assert told.name == "vision_language_encoder" and told.calls == 1 and told.exactness == "exact"
    mmspec.disable(drawing)
    assert {name: value for name, value in vars(encoder).items() if value is not kept.get(name)} == {}


def test_what_stood_there_before_comes_back() -> None:
    model = tiny_llama()
    calls: list[Any] = []
    plain = model.generate

    def own(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs)
        return plain(*args, **kwargs)

    model.generate = own
    wanted = plain(torch.tensor([[1, 2, 3]]), max_new_tokens=8)
    mmspec.enable(model, "copy")
    assert torch.equal(model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=8), wanted)
    assert len(calls) == 1 and mmspec.summary(model)[0].calls == 1
    mmspec.disable(model)
    assert model.generate is own


def test_a_failure_in_the_middle_changes_nothing() -> None:
    """The second model's head does not fit. The first model is unchanged, and can be enabled alone."""
    first, second = tiny_llama(), tiny_llama(hidden=64)
    pipe = Pipeline(first=first, second=second)
    head = mtp_checks.head_for(mtp_checks.CausalTarget(first))
    with pytest.raises(InputError, match="hidden size is 64"):
        mmspec.enable(pipe, "mtp", drafter=head)
    assert all("generate" not in vars(model) for model in (first, second))
    with pytest.raises(InputError, match="did you mean 'copy'"):
        mmspec.enable(pipe, "copi")
    mmspec.enable(first, "copy")
    assert first.generate(torch.tensor([[1, 2]]), max_new_tokens=4).shape == (1, 6)


class Int8Linear(torch.nn.Module):
    """Weights of eight bits, as in bitsandbytes and torchao: there is no floating-point weight."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.scale = linear.weight.abs().amax(1, keepdim=True) / 127
        self.codes = (linear.weight / self.scale).round().to(torch.int8)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(hidden, self.codes * self.scale)


def test_quantised_weights_are_used_as_they_are() -> None:
    model, processor = tiny_qwen3_5_vl()
    for name, part in list(model.named_modules()):
        if isinstance(part, torch.nn.Linear):
            model.set_submodule(name, Int8Linear(part))
    inputs = batch(processor)
    wanted = model.generate(**inputs, max_new_tokens=NEW)
    mmspec.enable(model, "copy")
    assert torch.equal(model.generate(**inputs, max_new_tokens=NEW), wanted)


# Copies and wrappers

IDS = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 5, 6]])


def words(model: Any, **more: Any) -> torch.Tensor:
    said: torch.Tensor = model.generate(input_ids=IDS, max_new_tokens=12, do_sample=False, **more)
    return said


def calls(model: Any) -> int:
    return sum(told.calls for told in mmspec.summary(model))


def test_a_deep_copy_is_an_enabled_model_of_its_own() -> None:
    """Reference models in reinforcement learning and averages of weights are such copies."""
    first, other = tiny_llama(), tiny_llama(seed=5)
    mmspec.enable(first, "copy")
    words(first)
    twin = copy.deepcopy(first)
    assert calls(twin) == 0
    twin.load_state_dict(other.state_dict())
    assert torch.equal(words(twin), words(other)) and not torch.equal(words(twin), words(first))
    assert (calls(first), calls(twin)) == (2, 2)
    mmspec.disable(first)
    assert torch.equal(words(twin.double()), words(other.double())) and calls(twin) == 3
    with pytest.raises(InputError, match=r"mmspec\.enable"):
        mmspec.summary(first)


def test_what_is_saved_of_an_enabled_model_is_a_plain_one() -> None:
    model = mmspec.enable(tiny_llama(), "copy")
    loaded = pickle.loads(pickle.dumps(model))
    with pytest.raises(InputError, match=r"mmspec\.enable"):
        mmspec.disable(loaded)
    assert torch.equal(words(loaded), words(model)) and calls(model) == 1
    mmspec.enable(loaded)
    assert torch.equal(words(loaded), words(model)) and calls(loaded) == 1


class Wrapper(torch.nn.Module):
    """A wrapper with a `module`, as DDP and FSDP are."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module


def test_the_model_in_a_wrapper_is_found() -> None:
    model = tiny_llama()
    wanted, wrapped = words(model), Wrapper(torch.compile(model))
    assert mmspec.enable(wrapped, "copy") is wrapped
    assert torch.equal(words(model), wanted)
    assert calls(wrapped) == calls(model) == 1
    mmspec.disable(wrapped)
    with pytest.raises(InputError, match=r"mmspec\.enable"):
        mmspec.disable(model)


def test_a_pipeline_of_transformers_is_enabled() -> None:
    model, processor = tiny_llava()
    pipe = pipeline("image-text-to-text", model=model, processor=processor)
    asked = {"text": user_message("what is there ?", tiny_images()[:1]), "max_new_tokens": 8}
    wanted = pipe(**asked)
    mmspec.enable(pipe, "copy")
    assert pipe(**asked) == wanted and calls(pipe) == calls(model) == 1
    mmspec.disable(pipe)
    assert pipe(**asked) == wanted


# PEFT: the wrapper's `generate` calls that of the model inside


def test_a_model_with_adapters_is_enabled() -> None:
    peft = pytest.importorskip("peft")
    model = tiny_llama()
    config = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
    torch.manual_seed(0)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(**config)).eval()
    wrapped.add_adapter("second", peft.LoraConfig(**config))
    wanted = words(wrapped)
    assert not torch.equal(wanted, words(tiny_llama()))
    assert mmspec.enable(wrapped, "copy") is wrapped
    assert torch.equal(words(wrapped), wanted) and calls(wrapped) == calls(model) == 1
    wrapped.set_adapter("second")
    plain = copy.deepcopy(wrapped)
    mmspec.disable(plain)
    assert torch.equal(words(wrapped), words(plain)) and not torch.equal(words(plain), wanted)
    each = {"input_ids": IDS.repeat(2, 1), "max_new_tokens": 12, "adapter_names": ["default", "second"]}
    assert torch.equal(wrapped.generate(**each), plain.generate(**each)) and calls(wrapped) == 2
