"""`model.generate(..., custom_generate=mmspec.accelerate(...))` equals `model.generate(...)`.

The rows of the table of holes in transformers' own assisted decoding are tests here that read "equal".
"""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    PreTrainedModel,
)

import mmspec
from mmspec.errors import InputError, MMSpecError
from mmspec.pipelines.generate_inputs import split_rows
from mmspec.targets import CausalTarget
from tests.methods import eagle_checks
from tests.pipelines.byte_level import byte_level_tokenizer
from tests.tiny_models import (
    VISION_LANGUAGE_FAMILIES,
    encode,
    tiny_image,
    tiny_images,
    tiny_llama,
    tiny_qwen3_5_vl,
    user_message,
)
from tests.versions import IMAGES_REACH_THE_LOOP

TOKENIZER = byte_level_tokenizer()
VOCABULARY = 300
NEW = 40


def method(name: str, **options: Any) -> Any:
    """A fresh function for custom_generate."""
    if name == "draft_model":
        options |= {"drafter": tiny_llama(vocab=VOCABULARY), "num_draft_tokens": 20}
    elif name == "copy":
        options |= {"num_draft_tokens": 20}
    return mmspec.accelerate(name, **options)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_llama(vocab=VOCABULARY)


def prompts(*texts: str) -> dict[str, torch.Tensor]:
    """Prompts, padded on the left."""
    return dict(TOKENIZER(list(texts), return_tensors="pt", padding=True, padding_side="left"))


ONE = prompts("the red thé the red")
TWO = prompts("the red thé the red", "blue")


def both(model: PreTrainedModel, name: str, inputs: dict[str, Any], **keywords: Any) -> torch.Tensor:
    """Assert that accelerated and plain generate agree; return the output."""
    keywords = {"max_new_tokens": NEW, **keywords}
    wanted = model.generate(**inputs, **keywords)
    function = method(name)
    got = model.generate(**inputs, custom_generate=function, **keywords)
    assert torch.equal(got, wanted), (got, wanted)
    assert function.stats.accelerator == name
    return got


@pytest.mark.parametrize("name", ["copy", "draft_model"])
def test_greedy_is_equal_alone_and_in_a_padded_batch(model: PreTrainedModel, name: str) -> None:
    both(model, name, ONE)
    both(model, name, prompts("a", "the red", "thé thé thé", "blue blue"), max_new_tokens=25)
    told = model.generate(**TWO, custom_generate=method(name), return_dict_in_generate=True, max_new_tokens=9)
    assert torch.equal(told.sequences, both(model, name, TWO, max_new_tokens=9))


def test_an_accelerated_call_prints_and_warns_nothing(
    model: PreTrainedModel, capsys: Any, caplog: pytest.LogCaptureFixture
) -> None:
    function = method("copy")
    keywords: dict[str, Any] = {"max_new_tokens": 12, "pad_token_id": 1, "custom_generate": function}
    with warnings.catch_warnings(), caplog.at_level(logging.WARNING):
        warnings.simplefilter("error")
        model.generate(**ONE, do_sample=False, repetition_penalty=1.1, **keywords)
        model.generate(**TWO, do_sample=True, top_k=5, **keywords)
    assert capsys.readouterr() == ("", "")
    assert caplog.text == ""


def test_sampling_is_reproducible_by_seed_and_by_torch(model: PreTrainedModel) -> None:
    keywords: dict[str, Any] = {"max_new_tokens": 16, "do_sample": True, "temperature": 1.5, "top_k": 0}

    def sample(seed: int | None, manual: int | None) -> list[list[int]]:
        if manual is not None:
            torch.manual_seed(manual)
        return model.generate(**TWO, custom_generate=method("draft_model", seed=seed), **keywords).tolist()  # type: ignore[no-any-return]

    assert sample(3, None) == sample(3, None) != sample(4, None)
    assert sample(None, 3) == sample(None, 3) != sample(None, 4)
    plain = model.generate(**TWO, custom_generate=mmspec.accelerate("none", seed=3), **keywords)
    assert sample(3, None) == plain.tolist()


def test_a_head_in_a_folder_is_loaded_for_the_model_that_is_decoded(tmp_path: Path) -> None:
    model = tiny_llama()
    head = eagle_checks.head_for(CausalTarget(model))
    head.save_pretrained(tmp_path / "head")
    ids = torch.tensor([[1, 5, 6, 7, 5, 6]])
    settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 16, "do_sample": False}
    wanted = model.generate(ids, **settings)
    by_object: Any = mmspec.accelerate("eagle", drafter=head, depth=2, top_k=2)
    assert torch.equal(model.generate(ids, **settings, custom_generate=by_object), wanted)
    for name, options in (("eagle", {"depth": 2, "top_k": 2}), ("eagle:depth=2:top_k=2", {})):
        by_folder: Any = mmspec.accelerate(name, drafter=tmp_path / "head", **options)
        for kind in (model, model.double()):
            again = kind.generate(ids, **settings, custom_generate=by_folder)
            assert torch.equal(again, wanted) and by_folder.stats.drafted == by_object.stats.drafted
        model.float()
    for given, match in (
        ({}, "^drafter must be the folder or hub id of a head .*got None"),
        (
            {"drafter": tmp_path / "heed"},
            "^drafter must be a folder with a checkpoint; did you mean .*/head'.*; got",
        ),
        ({"drafter": tmp_path / "head", "dept": 2}, "did you mean 'depth'"),
    ):
        with pytest.raises(MMSpecError, match=match):
            mmspec.accelerate("eagle", **given)


@pytest.mark.skipif(IMAGES_REACH_THE_LOOP, reason="generate does not encode images before 5.23")
@pytest.mark.parametrize("build", [*list(VISION_LANGUAGE_FAMILIES.values())[::2], tiny_qwen3_5_vl])
def test_rows_of_a_padded_batch_get_their_own_images(build: Any) -> None:
    """Two images, none, one; by what `generate` has encoded."""
    model, processor = build()
    images = tiny_images()
    asked = [
        user_message("what is there ?", images[:2]),
        user_message("which colour is the circle ?", images[2:]),
    ]
    asked.insert(1, user_message("which ?", []))
    inputs = encode(processor, *asked)
    assert len(inputs["input_ids"]) == 3 and not inputs["attention_mask"].all()
    wanted = model.generate(**inputs, max_new_tokens=16)
    assert len({tuple(row.tolist()) for row in wanted[:, -16:]}) == 3
    assert torch.equal(model.generate(**inputs, max_new_tokens=16, custom_generate=method("copy")), wanted)


def test_what_cannot_be_done_is_named(model: PreTrainedModel) -> None:
    drafter: Any
    for name, drafter, match in (
        ("draft_model", None, "^drafter must be a loaded draft model, .*got None"),
        ("draft_model", "some/folder", "loaded draft model"),
        ("copi", None, "did you mean 'copy'"),
        ("copy", model, "uses no draft model"),
    ):
        with pytest.raises(InputError, match=match):
            mmspec.accelerate(name, drafter=drafter)
    with pytest.raises(InputError, match="inputs_embeds"):
        embedded = {"inputs_embeds": model.get_input_embeddings()(ONE["input_ids"])}
        model.generate(**embedded, max_new_tokens=4, custom_generate=method("none"))
    vlm, processor = VISION_LANGUAGE_FAMILIES["llava"]()
    inputs = encode(processor, *[user_message("red", [tiny_image(i)]) for i in range(2)])
    more = {"custom_generate": method("copy"), "max_new_tokens": 4}
    with pytest.raises(InputError, match="as many placeholders"):
        wrong = inputs["input_ids"].clone()
        wrong[0, (wrong[0] == vlm.config.image_token_id).nonzero()[0]] = 5
        encoded = vlm.get_image_features(inputs["pixel_values"], return_dict=True)
        split_rows(vlm.config, wrong, {"mm_encoder_outputs": {"image": encoded}})
    with pytest.raises(InputError, match="one row at a time"):
        split_rows(vlm.config, inputs["input_ids"], {"image_sizes": torch.ones(3, 2)})
    if IMAGES_REACH_THE_LOOP:
        with pytest.raises(InputError, match="one row at a time.*pixel_values"):
            vlm.generate(**inputs, **more)
    else:
        assert len(vlm.generate(**inputs, **more)) == 2
