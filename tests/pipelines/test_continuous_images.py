"""ContinuousImagePipeline: its arguments, its outputs, its accelerators, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mmspec.errors import CheckpointError, InputError, UnsupportedModelError
from mmspec.families.mar.modeling import MARConfig, MARForImageGeneration
from mmspec.families.mar.target import MARTarget
from mmspec.pipelines import ContinuousImagePipeline, ImagePipeline, MMSpecPipeline
from tests.tiny_models.continuous import (
    CLASSES,
    SIDE,
    SIZE,
    autoencoder,
    folder_of,
    mar,
    nextstep,
    save,
)

PROMPTS = ["a red circle", "two small blue squares left of a star"]
FEW: dict[str, Any] = {"num_inference_steps": 4, "guidance_scale": 2.0, "seed": 3, "output_type": "latent"}
CELLS, PIXELS = SIDE**2, SIDE * 2


def load(kind: str, accelerator: str | None = None, **options: Any) -> Any:
    pipe = MMSpecPipeline.from_pretrained(folder_of(kind), accelerator=accelerator, **options)
    assert isinstance(pipe, ContinuousImagePipeline)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="module")
def words() -> Any:
    return load("nextstep")


@pytest.fixture(scope="module")
def classes() -> Any:
    return load("mar")


@pytest.fixture(autouse=True)
def plain(words: Any, classes: Any) -> Any:
    yield
    for pipe in (words, classes):
        pipe.set_accelerator("none")


def asked_of(pipe: Any) -> dict[str, Any]:
    return {"class_labels": [0, 3]} if pipe.target.any_order else {"prompt": PROMPTS}


@pytest.fixture(params=["words", "classes"])
def pipe(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


def test_every_output_type_is_the_same_image(pipe: Any) -> None:
    asked = asked_of(pipe)
    latents = pipe(**asked, **FEW).images
    assert latents.shape == (2, SIZE, SIDE, SIDE) and latents.isfinite().all()
    settings = {**FEW, "output_type": "pt"}
    output = pipe(**asked, **settings)
    with torch.no_grad():
        expected = pipe.vae.decode(latents / pipe.vae.config.scaling_factor).sample
    torch.testing.assert_close(output.images, (expected / 2 + 0.5).clamp(0, 1), atol=1e-5, rtol=1e-4)
    array = pipe(**asked, **{**FEW, "output_type": "np"}).images
    assert array.shape == (2, PIXELS, PIXELS, 3)
    np.testing.assert_allclose(array.transpose(0, 3, 1, 2), output.images.numpy(), atol=1e-6)
    images = pipe(**asked, **{**FEW, "output_type": "pil"}).images
    assert [image.size for image in images] == [(PIXELS, PIXELS)] * 2
    assert [row.shape for row in output.tokens] == [(CELLS, SIZE)] * 2
    assert output.finish_reasons == ["length"] * 2 and "2 images" in str(output)


def test_rows_have_settings_of_their_own(pipe: Any) -> None:
    asked = asked_of(pipe)
    (name, values), *_ = asked.items()
    mixed = {**FEW, "guidance_scale": [1.0, 3.0], "temperature": [1.0, 0.5], "seed": [3, 3]}
    together = pipe(**asked, **mixed, guidance_schedule="rising").images
    for index in range(2):
        own = {key: value[index] if isinstance(value, list) else value for key, value in mixed.items()}
        alone = pipe(**{name: values[index]}, **own, guidance_schedule="rising").images[0]
        torch.testing.assert_close(alone, together[index], atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("shared_noise", {"tolerance": 1e-4, "window": 4}),
        ("draft_model", {"sampling": "coupled", "tolerance": 1e-4}),
    ],
)
def test_shared_noise_draws_the_images_of_plain_decoding(words: Any, name: str, options: Any) -> None:
    expected = words(PROMPTS, **FEW).images
    drafter = {"drafter": folder_of("nextstep")} if name == "draft_model" else {}
    words.set_accelerator(name, **drafter, **options)
    output = words(PROMPTS, **FEW)
    torch.testing.assert_close(output.images, expected, atol=2e-2, rtol=2e-2)
    assert output.stats.nfe_max < CELLS and output.stats.exactness == "approximate"
    assert output.stats.drift_max <= 1e-4 and output.stats.drift_places >= sum(output.stats.accepted)


@pytest.mark.parametrize("rule", [None, "last_step"])
def test_a_draft_model_is_exact_where_every_step_has_noise(words: Any, rule: str | None) -> None:
    options = {} if rule is None else {"acceptance": rule}
    words.set_accelerator("draft_model", drafter=folder_of("nextstep"), num_draft_tokens=3, **options)
    stats = words(PROMPTS, **FEW, last_step_noise=True).stats
    assert stats.exactness == "exact"
    assert stats.nfe_max < CELLS, "the target as its own draft"
    words.set_accelerator("draft_model", drafter=folder_of("nextstep-draft"), **options)
    assert sum(words(PROMPTS, **FEW, last_step_noise=True).stats.drafted) > 0


def test_plain_decoding_of_a_mar_is_the_published_order(classes: Any) -> None:
    asked = {"class_labels": [0, None], **FEW}
    expected = classes(**asked)
    classes.set_accelerator("masked")
    output = classes(**asked)
    assert torch.equal(output.images, expected.images)
    assert expected.stats.accelerator == "none" and output.stats.exactness == "exact"
    classes.set_accelerator("masked", iterations=4, order="checkerboard", last_steps=2)
    fast = classes(**asked).stats
    assert fast.nfe == [4, 4] and fast.exactness == "approximate"
    few = classes(**asked).images
    classes.set_accelerator("masked", iterations=4, order="checkerboard")
    assert not torch.equal(classes(**asked).images, few), "fewer steps at the end"


def test_previews_show_the_cells_that_are_decided(classes: Any) -> None:
    seen = []

    def watch(pipe: Any, step: int, committed: int, kwargs: dict[str, Any]) -> None:
        drawn = sum(int((~row[:, 0].isnan()).sum()) for row in kwargs["tokens"])
        seen.append((drawn, kwargs["preview"]()[0].size))
        if step == 3:
            pipe.interrupt()

    classes.set_accelerator("masked", iterations=8)
    output = classes(class_labels=[1], **FEW, callback_on_step_end=watch)
    assert output.finish_reasons == ["interrupted"]
    assert [size for _, size in seen] == [(PIXELS, PIXELS)] * 4
    counts = [drawn for drawn, _ in seen]
    assert counts == sorted(counts) and 0 < counts[-1] < CELLS
    assert output.images.isnan().any() and not output.images.isnan().all()


def test_a_folder_has_defaults_of_its_own(tmp_path: Path) -> None:
    folder = save(mar(), tmp_path / "mar", autoencoder())
    stored = {"guidance_scale": 1.5, "num_inference_steps": 7, "clip_sample_range": 4.0}
    (folder / "generation_config.json").write_text(json.dumps(stored))
    pipe: Any = MMSpecPipeline.from_pretrained(folder)
    described = pipe.sampling({})
    assert (described["guidance_scale"], described["num_inference_steps"]) == (1.5, 7)
    assert described["guidance_schedule"] == "rising", "as published"
    pipe.save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again/generation_config.json").read_text())["clip_sample_range"] == 4.0


def test_a_published_mar_is_decoded_with_its_own_guidance() -> None:
    """As the README.md of github.com/LTH14/mar has it; other models have that of mar_large."""
    for name, guidance_scale in {"mar_base": 2.9, "mar_large": 3.0, "mar_huge": 3.2}.items():
        with torch.device("meta"):
            target = MARTarget(MARForImageGeneration(MARConfig.from_size(name)))
        assert target.published == {"guidance_scale": guidance_scale, "guidance_schedule": "rising"}
    assert MARTarget(mar()).published["guidance_scale"] == 3.0


def test_code_in_a_published_folder_is_not_run(tmp_path: Path) -> None:
    folder = save(nextstep(), tmp_path / "published", autoencoder())
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "evil.Config", "AutoModel": "evil.Model"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text("raise SystemExit('it was run')")
    assert isinstance(MMSpecPipeline.from_pretrained(folder), ContinuousImagePipeline)


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("classes", {"prompt": "a cat"}, "class_labels"),
    ("words", {"class_labels": [1]}, "this model needs a text"),
    ("words", {}, "prompt"),
    ("classes", {}, f"0 to {CLASSES - 1}"),
    ("classes", {"class_labels": [CLASSES]}, f"0 to {CLASSES - 1}"),
    ("classes", {"class_labels": [1.5]}, f"0 to {CLASSES - 1}"),
    ("classes", {"class_labels": 1, "negative_prompt": "x"}, "None"),
    ("words", {"prompt": "red " * 60}, "at most"),
    ("words", {"prompt": "a", "num_inference_steps": 1}, "at least 2"),
    ("words", {"prompt": "a", "num_inference_steps": 2.5}, "integer"),
    ("words", {"prompt": "a", "temperature": 0.0}, "above 0"),
    ("words", {"prompt": "a", "guidance_scale": -1.0}, "guidance_scale"),
    ("words", {"prompt": "a", "guidance_schedule": "risin"}, "rising"),
    ("classes", {"class_labels": 1, "shift": 2.0}, "diffusion"),
    ("words", {"prompt": "a", "clip_sample_range": 1.0}, "flow"),
    ("words", {"prompt": "a", "last_step_noise": 0.5}, "True or False"),
    ("words", {"prompt": "a", "num_inference_step": 4}, "num_inference_steps"),
    ("words", {"prompt": "a", "top_k": 4}, "top_k"),
    ("words", {"prompt": "a", "guidance_scale": [1.0, 2.0]}, "guidance_scale"),
]


def test_bad_input_is_refused_before_any_forward(words: Any, classes: Any) -> None:
    for which, arguments, message in BAD:
        pipe = {"words": words, "classes": classes}[which]
        with pytest.raises(InputError, match=message):
            pipe(**{"num_inference_steps": 4, **arguments})
    for pipe in (words, classes):
        assert pipe(**{**asked_of(pipe), **FEW}).finish_reasons == ["length"] * 2, "nothing is lost"


def test_parts_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="vae"):
        MMSpecPipeline.from_pretrained(save(nextstep(), tmp_path / "bare"))
    folder = save(mar(), tmp_path / "other", autoencoder(channels=8))
    with pytest.raises(CheckpointError, match="8 channels"):
        MMSpecPipeline.from_pretrained(folder)
    autoencoder().save_pretrained(tmp_path / "vae")
    pipe = MMSpecPipeline.from_pretrained(tmp_path / "bare", vae=tmp_path / "vae")
    assert isinstance(pipe, ContinuousImagePipeline)
    with pytest.raises(InputError, match="no such part"):
        MMSpecPipeline.from_pretrained(folder_of("mar"), text_encoder=tmp_path / "vae")
    with pytest.raises(UnsupportedModelError, match="ContinuousImagePipeline"):
        ImagePipeline.from_pretrained(folder_of("mar"))
