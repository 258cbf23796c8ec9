"""What ImagePipeline refuses: by name, in few words, before any forward of any model."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.utils import logging

from mmspec.errors import CheckpointError, InputError, UnknownArgumentError, UnsupportedModelError
from mmspec.pipelines import ImagePipeline, MMSpecPipeline, VisionLanguagePipeline
from tests.bad_inputs.refusals import no_forward
from tests.tiny_models import tiny_llama, tiny_tokenizer
from tests.tiny_models.llamagen import (
    CODES,
    GRID,
    STRIDE,
    save_llamagen,
    tiny_llamagen,
    tiny_text_encoder,
    tiny_vq,
)

NAN = float("nan")
SIDE = GRID * STRIDE


@pytest.fixture(scope="module", autouse=True)
def quiet() -> None:
    logging.set_verbosity_error()


@pytest.fixture(scope="module")
def classes() -> ImagePipeline:
    return ImagePipeline(tiny_llamagen("class"), vq=tiny_vq())


@pytest.fixture(scope="module")
def captions() -> ImagePipeline:
    parts: dict[str, Any] = {"vq": tiny_vq(), "text_encoder": tiny_text_encoder()}
    return ImagePipeline(tiny_llamagen("caption"), tiny_tokenizer(), **parts)


CLASS_CALLS: list[tuple[dict[str, Any], str, str]] = [
    ({}, "class_labels", "0 to 4"),
    ({"prompt": "red", "class_labels": 1}, "class_labels", "not both"),
    ({"prompt": "red"}, "prompt", "class_labels"),
    ({"class_labels": []}, "class_labels", "0 to 4"),
    *[({"class_labels": value}, "class_labels[0]", "0 to 4") for value in (-1, 5, 1.5, "1", True)],
    ({"class_labels": [0, 9]}, "class_labels[1]", "0 to 4"),
    ({"class_labels": 1, "negative_prompt": "red"}, "negative_prompt", "classes"),
]
TEXT_CALLS: list[tuple[dict[str, Any], str, str]] = [
    ({}, "prompt", "a text"),
    ({"class_labels": 1}, "prompt", "text"),
    ({"prompt": ""}, "prompt", "at least one token"),
    ({"prompt": []}, "prompt", "at least one text"),
    *[({"prompt": value}, "prompt", "a string") for value in (5, b"red", {"a": 1})],
    ({"prompt": ["red", None]}, "prompt[1]", "a string"),
    ({"prompt": "red\0"}, "prompt", "NUL"),
    ({"prompt": "\ud800"}, "prompt", "Unicode"),
    ({"prompt": "red", "negative_prompt": ["a", "b"]}, "negative_prompt", "1 prompts"),
    ({"prompt": ["red", "blue"], "negative_prompt": ["a", 5]}, "negative_prompt[1]", "a string"),
    *[({"prompt": "red", "guidance_scale": value}, "guidance_scale", "0 to 10000")
      for value in (-3, NAN, "2", 1e6)],
    *[({"prompt": "red", "temperature": value}, "temperature", "0 (greedy)")
      for value in (-1, 1e-9, NAN, "1")],
    *[({"prompt": "red", "top_k": value}, "top_k", "a positive integer") for value in (-1, 1.5, "5")],
    *[({"prompt": "red", "top_p": value}, "top_p", "above 0, at most 1") for value in (0, 1.1, NAN)],
    *[({"prompt": "red", "seed": value}, "seed", "") for value in (-1, 2**64, "5", 1.5, True, [1, 2], [])],
    ({"prompt": ["red", "blue", "a"], "seed": [1, 2], "num_images_per_prompt": 2}, "seed", "3 prompts, or 6"),
    ({"prompt": "red", "generator": 5}, "generator", "torch.Generator"),
    ({"prompt": "red", "generator": [torch.Generator()] * 2}, "generator", "torch.Generator"),
    ({"prompt": "red", "generator": torch.Generator(), "seed": 1}, "seed", "or generator"),
    *[({"prompt": "red", "num_images_per_prompt": value}, "num_images_per_prompt", "1 to 10,000")
      for value in (0, -1, 1.5, "2", True, 10**6)],
    *[({"prompt": "red", "batch_size": value}, "batch_size", "1 to 10,000") for value in (0, -1, 1.5)],
    ({"prompt": "red", "output_type": "jpg"}, "output_type", "allowed: latent"),
    ({"prompt": "red", "output_type": "latents"}, "output_type", "did you mean 'latent'?"),
    ({"prompt": "red", "output_type": 5}, "output_type", "allowed: latent"),
    *[({"prompt": "red", "height": value}, "height", "pixels") for value in (0, -8, 1.5, "64")],
    ({"prompt": "red", "height": SIDE + 1}, "height, width", f"{SIDE} x {SIDE}"),
    ({"prompt": "red", "width": 10**9}, "height, width", f"{SIDE} x {SIDE}"),
    ({"prompt": "red", "callback_on_step_end": 5}, "callback_on_step_end", "a function"),
]  # fmt: skip


def refused(pipe: ImagePipeline, call: dict[str, Any], argument: str, fragment: str) -> None:
    with pytest.raises(InputError) as caught, no_forward():
        pipe(**call)
    assert caught.value.argument == argument
    assert fragment in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(("call", "argument", "fragment"), CLASS_CALLS, ids=lambda value: repr(value)[:40])
def test_calls_that_a_model_of_classes_refuses(
    call: dict[str, Any], argument: str, fragment: str, classes: ImagePipeline
) -> None:
    refused(classes, call, argument, fragment)


@pytest.mark.parametrize(("call", "argument", "fragment"), TEXT_CALLS, ids=lambda value: repr(value)[:40])
def test_calls_that_a_model_of_captions_refuses(
    call: dict[str, Any], argument: str, fragment: str, captions: ImagePipeline
) -> None:
    refused(captions, call, argument, fragment)


@pytest.mark.parametrize(
    ("keyword", "near"),
    [("guidance", "guidance_scale"), ("num_images", "num_images_per_prompt"), ("seeds", "seed")],
)
def test_an_unknown_keyword_is_refused_with_the_nearest(
    keyword: str, near: str, captions: ImagePipeline
) -> None:
    with pytest.raises(UnknownArgumentError, match=f"did you mean '{near}'"), no_forward():
        captions("red", **{keyword: 5})


@pytest.mark.parametrize("window", [0, -1, 1.5, "8", GRID**2 + 1, 200])
def test_a_window_that_no_picture_has_is_refused(window: object, classes: ImagePipeline) -> None:
    with pytest.raises(InputError, match="window: got"), no_forward():
        classes.set_accelerator("sjd", window=window)


@pytest.mark.parametrize("name", ["gsd", "lantern"])
@pytest.mark.parametrize("delta", [-0.1, 1.1, NAN, "0.1", True])
def test_a_bound_that_is_no_total_variation_is_refused(
    name: str, delta: object, classes: ImagePipeline
) -> None:
    with pytest.raises(InputError, match="delta: got"), no_forward():
        classes.set_accelerator(name, window=8, delta=delta)


def test_a_refused_accelerator_leaves_the_old_one(classes: ImagePipeline) -> None:
    before = classes.accelerator
    with pytest.raises(InputError):
        classes.set_accelerator("sjd", window=0)
    assert classes.accelerator is before


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llamagen(tmp_path_factory.mktemp("sound") / "caption", "caption")


def edit(file: str, change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        weights = load_file(folder / file)
        change(weights)
        save_file(weights, folder / file, metadata={"format": "pt"})

    return damage


ROOT, VQ = "model.safetensors", "vq/diffusion_pytorch_model.safetensors"
ENCODER, RAW = "text_encoder/model.safetensors", "vq/raw_codebook.safetensors"
SPARE = {"spare.weight": torch.ones(2)}
DAMAGES: dict[str, tuple[Callable[[Path], object], str, tuple[str, ...]]] = {
    "missing key": (
        edit(ROOT, lambda w: w.pop("model.norm.weight")),
        "model", ("missing keys: model.norm.weight",)),
    "surplus key": (
        edit(ROOT, lambda w: w.update(SPARE)),
        "model", ("unknown keys: spare.weight",)),
    "missing key of the image tokenizer": (
        edit(VQ, lambda w: w.pop("quant_conv.bias")),
        "vq", ("missing", "quant_conv.bias")),
    "surplus key of the image tokenizer": (
        edit(VQ, lambda w: w.update(SPARE)),
        "vq", ("unknown", "spare.weight")),
    "NaN in the image tokenizer": (
        edit(VQ, lambda w: w["quant_conv.bias"].fill_(NAN)),
        "vq", ("NaN", "quant_conv.bias")),
    "missing key of the text encoder": (
        edit(ENCODER, lambda w: w.pop("encoder.final_layer_norm.weight")),
        "text_encoder", ("final_layer_norm",)),
    "surplus key of the text encoder": (
        edit(ENCODER, lambda w: w.update(SPARE)),
        "text_encoder", ("spare.weight",)),
    "no image tokenizer": (
        lambda f: shutil.rmtree(f / "vq"),
        "vq", ("vq=...",)),
    "no text encoder": (
        lambda f: shutil.rmtree(f / "text_encoder"),
        "text_encoder", ("text_encoder=...",)),
    "no tokenizer of words": (
        lambda f: shutil.rmtree(f / "tokenizer"),
        "text_encoder", ("tokenizer",)),
    "cut weights": (
        lambda f: (f / VQ).write_bytes((f / VQ).read_bytes()[:500]),
        "vq", ()),
    "another codebook": (
        lambda f: (shutil.rmtree(f / "vq"), tiny_vq(codes=CODES + 1).save_pretrained(f / "vq")),
        "vq", (f"{CODES + 1} entries", str(CODES))),
    "another raw codebook": (
        edit(RAW, lambda w: w.update(codebook=torch.ones(7, 4))),
        "codebook", ("7 vectors",)),
    "a raw codebook under another name": (
        edit(RAW, lambda w: w.update(book=w.pop("codebook"))),
        "vq", ("raw_codebook",)),
    "captions of another width": (
        lambda f: tiny_text_encoder(width=32).save_pretrained(f / "text_encoder"),
        "text_encoder", ("width 32", "width 16")),
    "a text encoder of fewer words": (
        lambda f: tiny_text_encoder(words=64).save_pretrained(f / "text_encoder"),
        "tokenizer", ("64 tokens",)),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_folder_is_refused(name: str, sound: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(sound, tmp_path / "damaged"))
    damage, argument, fragments = DAMAGES[name]
    damage(folder)
    with pytest.raises(CheckpointError) as caught, no_forward():
        MMSpecPipeline.from_pretrained(folder)
    assert caught.value.argument == argument
    for fragment in fragments:
        assert fragment in str(caught.value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_a_model_that_only_draws_does_not_answer(sound: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="ImagePipeline"):
        VisionLanguagePipeline.from_pretrained(sound)


def test_a_model_that_only_answers_does_not_draw(tmp_path: Path) -> None:
    tiny_llama(vocab=128).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="model type 'llama' draws no pictures"):
        ImagePipeline.from_pretrained(tmp_path)
    with pytest.raises(InputError, match="vq: got .*no such part"):
        MMSpecPipeline.from_pretrained(tmp_path, vq=tmp_path)


def test_a_model_of_classes_takes_no_text_encoder(tmp_path: Path) -> None:
    folder = save_llamagen(tmp_path / "class", "class")
    with pytest.raises(InputError, match="text_encoder: got .*no such part"):
        MMSpecPipeline.from_pretrained(folder, text_encoder=folder)
