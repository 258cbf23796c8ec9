"""Drafters of images: data from files and scenes, and trained heads."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoModel

from mmspec.core.draft import DraftKind, Tree
from mmspec.errors import InputError, MediaError
from mmspec.methods.eagle.loss import positions_of
from mmspec.training.data import images as image_data
from mmspec.training.data.images import ImageFile
from mmspec.training.data.scenes import SceneImages, scene_data
from mmspec.training.drafter import train_drafter
from mmspec.training.losses.base import read
from mmspec.training.recipes import RECIPES
from reference.image import save_image_model
from reference.image_model import (
    SHAPES_BY_SIZE,
    build_caption_tokenizer,
    build_text_encoder,
    build_transformer,
)
from reference.vq import build_vq, save_vq
from tests.tiny_models import randomise


@pytest.fixture(scope="module")
def image_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny models of images of 8 x 8 cells with random weights, given a caption and given a class."""
    root, shape = tmp_path_factory.mktemp("images"), replace(SHAPES_BY_SIZE["tiny"], grid=8)
    tokenizer = build_caption_tokenizer()
    torch.manual_seed(0)
    save_vq(build_vq("tiny"), root / "vq", {})
    for condition in ("caption", "class"):
        transformer = randomise(build_transformer(shape, condition), seed=2)
        encoder = build_text_encoder(shape, tokenizer) if condition == "caption" else None
        words = tokenizer if condition == "caption" else None
        save_image_model(transformer, encoder, words, root / condition, {}, vq=root / "vq")  # type: ignore[arg-type]
    return {condition: root / condition for condition in ("caption", "class")}


@pytest.fixture
def short_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode six tokens of a prompt alone."""
    images = image_data.LlamaGenImages
    whole = images.trial_of
    monkeypatch.setattr(images, "trial_of", lambda *rows: replace(whole(*rows), new_tokens=6))


@pytest.mark.parametrize(
    ("condition", "method"),
    [
        *(("caption", name) for name in ("dflash", "eagle")),
        *(("class", name) for name in ("eagle3", "flash", "cjd")),
    ],
)
@pytest.mark.every(3)
def test_a_drafter_of_images(
    condition: str, method: str, image_folders: dict[str, Path], short_trials: None, tmp_path: Path
) -> None:
    losses: list[float] = []
    how: dict[str, Any] = {"steps": 12, "batch_size": 2, "on_step": lambda step, loss: losses.append(loss)}
    out = train_drafter(image_folders[condition], tmp_path / "out", scene_data, method=method, **how)
    assert losses[-1] < losses[0]
    record = json.loads((out / "training.json").read_text())
    assert record["stages"][0]["acceptance"] >= 1 and record["method"] == method
    tensors = load_file(out / "model.safetensors").values()
    assert {tensor.dtype for tensor in tensors if tensor.is_floating_point()} == {torch.float16}
    head = AutoModel.from_pretrained(out)
    assert type(head) is RECIPES[method].head and head.dtype == torch.float32 and head.config.vocabulary == 64


@pytest.mark.parametrize(("condition", "asked"), [("caption", "a red ring"), ("class", 7)])
@pytest.mark.every(2)
def test_images_of_a_file(
    condition: str,
    asked: str | int,
    image_folders: dict[str, Path],
    short_trials: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Any size of image, paths beside the file; equal steps give equal rows."""
    name = "prompt" if condition == "caption" else "class"
    for index in range(4):
        Image.new("RGB", (50 + 30 * index, 80), (index, 90, 200)).save(tmp_path / f"{index}.png")
    lines = [json.dumps({"image": f"{index}.png", name: asked}) for index in range(4)]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join([*lines, ""]))
    target = image_data.open_llamagen(image_folders[condition], torch.device("cpu"))
    data = ImageFile(target, image_folders[condition], 3, 0, file)
    examples, again = data.batch(1, 0).examples, data.batch(1, 0).examples
    for one, other in zip(examples, again, strict=True):
        assert torch.equal(one.inputs["input_ids"], other.inputs["input_ids"])
        assert one.inputs["input_ids"].shape[1] == one.answer + 64
    train_drafter(image_folders[condition], tmp_path / "out", data=file, steps=1, batch_size=1)
    (tmp_path / "0.png").write_bytes((tmp_path / "0.png").read_bytes()[:60])  # of the two that are drawn
    data = ImageFile(target, image_folders[condition], 3, 0, file)
    skipping = [data.batch(step, 0).examples for step in range(2)]
    assert list(data.damaged.found) == ["data, line 1"] and "0.png" in data.left_out["damaged"][0]
    again = ImageFile(target, image_folders[condition], 3, 0, file).batch(1, 0).examples
    for one, other in zip(skipping[1], again, strict=True):
        assert torch.equal(one.inputs["input_ids"], other.inputs["input_ids"])
    (tmp_path / "1.png").write_bytes(b"")
    with pytest.raises(MediaError, match="a row with an image that can be read"):
        ImageFile(target, image_folders[condition], 3, 0, file).batch(0, 0)
    Image.new("RGB", (8, 8)).save(tmp_path / "0.png")
    there = {"image": "0.png"}
    for wrong in (None, [], there, {"image": "9.png", name: asked}, {**there, name: asked, "negative": "a"}):
        file.write_text("\n".join([*lines, "{" if wrong is None else json.dumps(wrong)]))
        with pytest.raises(InputError, match="line 5"):
            ImageFile(target, image_folders[condition], 3, 0, file)
    file.write_text("\n".join(lines[:2]))
    monkeypatch.setattr("mmspec.training.data.sources.open_llamagen", None)  # weights must not be read
    with pytest.raises(InputError, match="data must have more than the 2 rows that are held out"):
        train_drafter(image_folders[condition], tmp_path / "few", data=file, steps=1)


def test_examples_of_images_are_prompt_and_codes(image_folders: dict[str, Path]) -> None:
    llamagen = image_data.open_llamagen(image_folders["caption"], torch.device("cpu"))
    data = SceneImages(llamagen, image_folders["caption"], batch_size=24, seed=3)
    examples = data.batch(5, 0).examples
    assert [e.inputs["input_ids"].tolist() for e in examples] == [
        e.inputs["input_ids"].tolist() for e in data.batch(5, 0).examples
    ]
    null = llamagen.model.model.cls_embedding.uncond_embedding
    dropped = 0
    for example in examples:
        ids, features = example.inputs["input_ids"][0], example.inputs["caption_features"][0]
        assert len(ids) == example.answer + 64 and len(features) == example.answer
        assert (ids[: example.answer] == 64).all() and (ids[example.answer :] < 64).all()
        dropped += torch.equal(features, null[-len(features) :])
    assert 0 < dropped < 10, "about a tenth is shown without its caption"


@pytest.mark.parametrize("condition", ["caption", "class"])
def test_the_teacher_reads_an_image_as_decoding_does(condition: str, image_folders: dict[str, Path]) -> None:
    """The states of prompt and image tokens equal those of decoding, for captions of any length."""
    llamagen = image_data.open_llamagen(image_folders[condition], torch.device("cpu"))
    data = SceneImages(llamagen, image_folders[condition], batch_size=3, seed=0)
    examples = data.batch(0, 0).examples
    reading, positions = read(llamagen, examples, (0, -1)), positions_of(llamagen, examples)
    for row, example in enumerate(examples):
        ids, start = example.inputs["input_ids"], example.answer
        prompt = {name: value for name, value in example.inputs.items() if name != "position_ids"}
        state, output = llamagen.prefill([{**prompt, "input_ids": ids[:, :start]}], ids.shape[1], (0, -1))
        after = llamagen.score(state, Tree.chain(ids[:, start:], DraftKind.POINT))
        state.close()
        for tap, ours in reading.taps.items():
            decoded = torch.cat([output.taps[tap][0], after.taps[tap]], 1)[0]
            assert torch.allclose(ours[row, : ids.shape[1]], decoded, atol=1e-5)
        first = llamagen.config.prefix_length
        assert positions[row, start : ids.shape[1]].tolist() == list(range(first, first + 64))
        assert reading.learnt[row].nonzero()[:, 0].tolist() == list(range(start, ids.shape[1]))
