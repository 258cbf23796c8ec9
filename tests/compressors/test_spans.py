"""Every image and frame of every family is found, with as many boxes as it has placeholders."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mmspec.visual_tokens.spans import find_images
from mmspec.visual_tokens.tokens import nowhere, raster
from tests.tiny_models import (
    HAS_VIDEO,
    VISION_LANGUAGE_FAMILIES,
    encode,
    tiny_clip,
    tiny_image,
    tiny_images,
    user_message,
)

IMAGES = tiny_images()
AREA_OF = {"llava_next": 2.0, "llava_onevision": 2.0}  # a base view and its tiles


@pytest.fixture(scope="module", params=list(VISION_LANGUAGE_FAMILIES))
def family(request: pytest.FixtureRequest) -> tuple[str, Any, Any]:
    model, processor = VISION_LANGUAGE_FAMILIES[request.param]()
    return request.param, model, processor


def placeholders(config: Any, ids: list[int]) -> list[int]:
    names = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")
    known = {getattr(config, name, None) for name in names}
    return [index for index, token in enumerate(ids) if token in known]


def area(boxes: torch.Tensor) -> float:
    return float((boxes[:, 2:] - boxes[:, :2]).prod(-1).sum())


def test_every_placeholder_belongs_to_one_image(family: tuple[str, Any, Any]) -> None:
    for count in (0, 1, 3):
        check_placeholders(*family, count)


def check_placeholders(name: str, model: Any, processor: Any, count: int) -> None:
    message = user_message("what is there ?", IMAGES[1 : 1 + count])
    inputs = encode(processor, message)
    spans = find_images(model.config, inputs)
    covered = [index for span in spans for index in range(span.start, span.stop)]
    assert covered == placeholders(model.config, inputs["input_ids"][0].tolist())
    if name not in ("smolvlm", "idefics3"):  # each tile of theirs is an image
        assert len(spans) == count
    tiled = name == "llava_onevision" and count > 1
    for span in spans:
        assert area(span.boxes) == pytest.approx(1.0 if tiled else AREA_OF.get(name, 1.0), abs=1e-5)
        assert (span.boxes >= 0).all() and (span.boxes <= 1 + 1e-6).all()


def test_adjacent_images_are_told_apart(family: tuple[str, Any, Any]) -> None:
    """Without a token between two images, their placeholders are one run."""
    name, model, processor = family
    inputs = dict(encode(processor, user_message("what is there ?", IMAGES[1:3])))
    two = find_images(model.config, inputs)
    ids = inputs["input_ids"][0].tolist()
    visual = placeholders(model.config, ids)
    inputs["input_ids"] = torch.tensor([[1, 5, *(ids[index] for index in visual), 6]])
    adjacent = find_images(model.config, inputs)
    if name in ("smolvlm", "idefics3"):
        assert len(adjacent) == 1, "their inputs do not tell"
    else:
        assert [len(span.boxes) for span in adjacent] == [len(span.boxes) for span in two]


def test_frames_of_a_clip_are_images(family: tuple[str, Any, Any]) -> None:
    name, model, processor = family
    if name not in HAS_VIDEO:
        pytest.skip("no clips")
    inputs = encode(processor, user_message("what is there ?", videos=[tiny_clip(frames=4)]))
    spans = find_images(model.config, inputs)
    covered = [index for span in spans for index in range(span.start, span.stop)]
    assert covered == placeholders(model.config, inputs["input_ids"][0].tolist())
    steps = int(inputs["video_grid_thw"][0, 0]) if "video_grid_thw" in inputs else 4
    if name != "smolvlm":
        assert len(spans) == steps
    assert all(area(span.boxes) == pytest.approx(1.0) for span in spans)


def test_a_dynamic_resolution_gives_its_own_grid() -> None:
    model, processor = VISION_LANGUAGE_FAMILIES["qwen2_5_vl"]()
    inputs = encode(processor, user_message("what is there ?", [tiny_image(0, (112, 56))]))
    _, height, width = inputs["image_grid_thw"][0].tolist()
    (span,) = find_images(model.config, inputs)
    assert height != width and torch.equal(span.boxes, raster(height // 2, width // 2))


def test_newlines_and_class_tokens_lie_nowhere() -> None:
    model, processor = VISION_LANGUAGE_FAMILIES["llava_next"]()
    inputs = encode(processor, user_message("what is there ?", [tiny_image(0, (56, 28))]))
    (span,) = find_images(model.config, inputs)
    expected = [raster(2, 2)]
    for row in raster(2, 4).view(2, 4, 4):
        expected += [row, nowhere(1)]
    assert torch.equal(span.boxes, torch.cat(expected))
    model, processor = VISION_LANGUAGE_FAMILIES["video_llava"]()
    inputs = encode(processor, user_message("what is there ?", videos=[tiny_clip()]))
    for span in find_images(model.config, inputs):
        assert torch.equal(span.boxes, torch.cat([nowhere(1), raster(2, 2)]))
