"""ImagePipeline: its arguments, its outputs, and that accelerators draw the same images."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mmspec.errors import MMSpecError, NumericalError, PipelineBusyError
from mmspec.pipelines import (
    ImageOutput,
    ImagePipeline,
    MMSpecPipeline,
    VisionLanguagePipeline,
    image_generation,
)
from tests.tiny_models import tiny_llama, tiny_tokenizer
from tests.tiny_models.llamagen import CODES, GRID, STRIDE, save_llamagen

CELLS, SIDE = GRID**2, GRID * STRIDE
PROMPTS = ["a red circle", "two small blue squares left of a star"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("image")
    for condition in ("class", "caption"):
        save_llamagen(base / condition, condition)
    return base


def load(folder: Path, accelerator: str = "none", **options: Any) -> Any:
    pipe = MMSpecPipeline.from_pretrained(folder, accelerator=accelerator, **options)
    assert isinstance(pipe, ImagePipeline)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="module")
def classes(folders: Path) -> Any:
    return load(folders / "class")


@pytest.fixture(scope="module")
def captions(folders: Path) -> Any:
    return load(folders / "caption")


@pytest.fixture(autouse=True)
def plain(classes: Any, captions: Any) -> Any:
    yield
    for pipe in (classes, captions):
        pipe.set_accelerator("none")


def test_a_model_that_only_draws_does_not_answer_and_the_reverse(folders: Path, tmp_path: Path) -> None:
    tiny_llama(vocab=128).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    part: dict[str, Any]
    for kind, folder, part, match in (
        (
            VisionLanguagePipeline,
            folders / "class",
            {},
            "'llamagen' generate images only; load them with MMSpecPipeline",
        ),
        (ImagePipeline, tmp_path, {}, "model type 'llama' generates no discrete image tokens"),
        (MMSpecPipeline, tmp_path, {"vq": tmp_path}, "^vq must be None; .*no such part"),
        (
            MMSpecPipeline,
            folders / "class",
            {"text_encoder": tmp_path},
            "^text_encoder .*no such part",
        ),
    ):
        with pytest.raises(MMSpecError, match=match):
            kind.from_pretrained(folder, **part)


def test_every_output_type_is_the_same_image(classes: Any) -> None:
    asked: dict[str, Any] = {"class_labels": [0, 3], "seed": 5}
    codes = classes(**asked, output_type="latent").images
    assert codes.shape == (2, GRID, GRID)
    assert 0 <= int(codes.min()) <= int(codes.max()) < CODES
    output = classes(**asked)
    assert codes.flatten(1).tolist() == output.tokens
    pixels = classes.target.decode_tokens(codes.flatten(1)) / 2 + 0.5
    tensor = classes(**asked, output_type="pt").images
    assert tensor.shape == (2, 3, SIDE, SIDE)
    torch.testing.assert_close(tensor, pixels)
    array = classes(**asked, output_type="np").images
    assert np.array_equal(array, tensor.permute(0, 2, 3, 1).numpy())
    for image, values in zip(output.images, array, strict=True):
        assert isinstance(image, Image.Image)
        assert np.array_equal(np.asarray(image), (values * 255).round().astype(np.uint8))
    assert (codes[0] != codes[1]).any()
    assert classes(**asked, return_dict=False)[0][0].tobytes() == output.images[0].tobytes()
    assert output.finish_reasons == ["length", "length"]
    assert output.stats.nfe == [CELLS, CELLS]
    assert str(output).startswith(f"2 images of {SIDE}x{SIDE} pixels, {CELLS}.0 forward passes each")


def test_seeds_of_a_list_give_what_single_calls_give(captions: Any) -> None:
    wanted = [captions(prompt, seed=seed).tokens[0] for prompt, seed in zip(PROMPTS, (3, 9), strict=True)]
    assert captions(PROMPTS, seed=[3, 9]).tokens == wanted
    generators = [torch.Generator().manual_seed(seed) for seed in (3, 9)]
    assert captions(PROMPTS, generator=generators).tokens == wanted
    assert captions(PROMPTS, seed=3).tokens[0] == wanted[0]
    assert captions(PROMPTS, seed=3).tokens[1] != wanted[1]
    firsts = captions(PROMPTS[0], seed=[3, 9, 4], num_images_per_prompt=3)  # one seed per image
    assert firsts.tokens == [captions(PROMPTS[0], seed=seed).tokens[0] for seed in (3, 9, 4)]


def test_what_was_published_counts_where_the_folder_says_nothing(folders: Path, tmp_path: Path) -> None:
    silent = Path(shutil.copytree(folders / "class", tmp_path / "silent"))
    (silent / "generation_config.json").unlink()
    pipe = load(silent)
    asked: dict[str, Any] = {"class_labels": 0, "seed": 4}
    published = pipe(**asked, guidance_scale=4.0, top_k=2000).tokens
    assert pipe(**asked).tokens == published
    assert load(folders / "class")(**asked).tokens != published


def test_the_callback_sees_every_round_and_may_look(classes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    classes.set_accelerator("sjd", window=4)
    decoded: list[int] = []
    original = type(classes.target).decode_tokens

    def counted(self: Any, codes: torch.Tensor, *rest: Any) -> torch.Tensor:
        decoded.append(len(codes))
        return original(self, codes, *rest)

    monkeypatch.setattr(type(classes.target), "decode_tokens", counted)
    monkeypatch.setattr(image_generation, "PIXELS_AT_ONCE", SIDE**2)
    seen: list[tuple[int, int]] = []
    previews: list[Image.Image] = []

    def look(pipe: object, step: int, committed: int, kwargs: dict[str, Any]) -> dict[str, Any]:
        assert pipe is classes
        assert kwargs["rows"] == range(2)
        assert committed == sum(map(len, kwargs["tokens"]))
        seen.append((step, committed))
        if not previews and min(map(len, kwargs["tokens"])) >= 2 * GRID:
            assert decoded == []  # no pixels are decoded before they are requested
            previews.extend(kwargs["preview"]())
            assert decoded == [1, 1]  # in parts of bounded size
        return kwargs

    output = classes(class_labels=[0, 1], seed=1, callback_on_step_end=look)
    assert [step for step, _ in seen] == list(range(output.stats.target_forwards))
    assert seen[-1][1] == 2 * CELLS
    grey = np.asarray(previews[0])[-STRIDE:]  # the last row of cells
    assert (np.abs(grey.astype(int) - 128) <= 1).all()
    drawn = np.asarray(previews[0])[:STRIDE]
    assert len(np.unique(drawn.reshape(-1, 3), axis=0)) > STRIDE


def test_an_interrupted_image_is_grey_where_nothing_was_drawn(classes: Any) -> None:
    def stop(pipe: Any, step: int, committed: int, kwargs: dict[str, Any]) -> None:
        if len(kwargs["tokens"][0]) == 2 * GRID and kwargs["rows"].start == 1:
            pipe.interrupt()

    asked: dict[str, Any] = {"class_labels": [0, 1, 2], "seed": 3, "batch_size": 1}
    whole = classes(**asked)
    cut = classes(**asked, callback_on_step_end=stop)
    assert cut.finish_reasons == ["length", "interrupted", "interrupted"]
    assert cut.tokens == [whole.tokens[0], whole.tokens[1][: 2 * GRID], []]
    assert cut.images[0].tobytes() == whole.images[0].tobytes()
    assert np.asarray(cut.images[2]).std() == 0
    codes = classes(**asked, callback_on_step_end=stop, output_type="latent").images
    assert (codes[1, 2:] == -1).all() and (codes[1, :2] >= 0).all()


def test_a_call_from_its_own_callback_is_refused_and_the_error_names_the_callback(classes: Any) -> None:
    def again(pipe: Any, *arguments: object) -> None:
        pipe(class_labels=0)

    with pytest.raises(PipelineBusyError) as caught:
        classes(class_labels=0, callback_on_step_end=again)
    assert caught.value.__notes__ == ["raised by callback_on_step_end: function"]
    assert len(classes(class_labels=0).tokens[0]) == CELLS


def test_a_failed_image_leaves_the_others_whole(folders: Path) -> None:
    pipe = load(folders / "class")
    wanted = pipe(class_labels=[0, 3, 2], seed=1)
    with torch.no_grad():
        pipe.model.model.cls_embedding.embedding_table.weight[3] = torch.nan
    with pytest.raises(NumericalError, match="row 1, output token 0") as caught:
        pipe(class_labels=[0, 3, 2], seed=1, batch_size=1)
    output = caught.value.output
    assert isinstance(output, ImageOutput) and caught.value.row == 1
    assert output.finish_reasons == ["length", "error", "length"]
    assert output.tokens == [wanted.tokens[0], [], wanted.tokens[2]]
    assert output.images[2].tobytes() == wanted.images[2].tobytes()
