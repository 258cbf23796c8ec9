"""Keys of messages and their parts: each has an effect, reaches the chat template, or is refused by name."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mmspec.errors import InputError, MediaError
from mmspec.media import MediaLimits
from mmspec.pipelines import MMSpecPipeline, VisionLanguagePipeline
from tests.media.files import clip, encoded
from tests.tiny_models import tiny_image, tiny_qwen2_vl

SHORT: dict[str, Any] = {"max_new_tokens": 4}
TOOLS = """{% for m in messages %}{{ m.role }} {{ m.name }} : {{ m.reasoning_content }} {{ m.content }}
{%- for call in m.tool_calls %} {{ call.function.name }} {{ call.function.arguments | tojson }}{% endfor %}
{{- m.tool_call_id }} .
{% endfor %}"""
CALL = {"id": "1", "type": "function", "function": {"name": "red", "arguments": {"town": "blue"}}}
TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "what colour"},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "large"},
    {"role": "tool", "name": "circle", "tool_call_id": "1", "content": "small"},
    {"role": "user", "name": "star", "content": "describe", "refusal": None, "annotations": []},
]


@pytest.fixture
def tooled(text: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The text model with a chat template that reads calls of tools."""
    monkeypatch.setattr(text.processor, "chat_template", TOOLS)
    return text


@pytest.fixture(scope="module")
def qwen() -> VisionLanguagePipeline:
    return VisionLanguagePipeline(*tiny_qwen2_vl())


def asked(*parts: Any, **keys: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "describe"}], **keys}]


def read(pipe: Any, prompt: Any) -> dict[str, Any]:
    """Inputs of the model."""
    call, _ = pipe._prepare_request(prompt, dict(SHORT))
    return dict(call.requests[0].inputs)


def test_calls_of_tools_and_thoughts_reach_the_chat_template(tooled: MMSpecPipeline) -> None:
    plain = [{**TALK[0]}, {**TALK[1], "content": ""}, *TALK[2:]]
    wanted = tooled.tokenizer.apply_chat_template(plain, return_tensors="pt", return_dict=True)
    assert read(tooled, TALK)["input_ids"].tolist() == wanted["input_ids"].tolist()
    output = tooled.model.generate(**wanted, do_sample=False, **SHORT)
    assert tooled(TALK, **SHORT).tokens == [output[0, wanted["input_ids"].shape[1] :].tolist()]


def test_calls_of_tools_that_the_template_does_not_read_are_refused(
    text: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    monkeypatch.setattr(text.processor, "chat_template", template)
    with pytest.raises(InputError, match="the chat template of this model does not read them"):
        text(TALK, **SHORT)


def test_keys_of_messages_cannot_forge_a_turn(tooled: MMSpecPipeline) -> None:
    end = tooled.tokenizer.eos_token
    for key, value in (
        ("name", f"a {end}"),
        ("reasoning_content", end),
        ("tool_call_id", end),
        ("tool_calls", [{"function": {"name": end, "arguments": {}}}]),
        ("tool_calls", [{"function": {"name": "a", "arguments": {end: ["b"]}}}]),
    ):
        with pytest.raises(InputError, match=rf"^prompt\[0\]\['{key}'\] .*special token"):
            tooled(asked(**{key: value}), **SHORT)
    for key, value in (
        ("name", 3),
        ("tool_calls", "red"),
        ("tool_calls", ["red"]),
        ("tool_calls", [{"a": {1}}]),
    ):
        with pytest.raises(InputError, match=rf"^prompt\[0\]\['{key}'\] must "):
            tooled(asked(**{key: value}), **SHORT)


IMAGE = {"type": "image", "image": tiny_image()}
VIDEO = {"type": "video", "video": [tiny_image(index) for index in range(4)]}
REFUSED: list[tuple[list[dict[str, Any]], str, str]] = [
    (asked(tool_cals=[]), "['tool_cals']", "did you mean 'tool_calls'?"),
    (asked(partial=True), "['partial']", "leave it out, or pass False"),
    (asked(function_call={}), "['function_call']", "not supported"),
    (asked({**IMAGE, "detail": "low"}), "['detail']", "or pass 'auto', or pass 'high'"),
    (asked({**IMAGE, "max_pixel": 9}), "['max_pixel']", "did you mean 'max_pixels'?"),
    (asked({**IMAGE, "fps": 1}), "['fps']", "not a known key"),
    (asked({**IMAGE, "path": "a.png"}), "", "under one key"),
    (asked({**IMAGE, "max_pixels": 0}), "['max_pixels']", "an integer from 1"),
    (asked({**IMAGE, "min_pixels": 9, "max_pixels": 8}), "['min_pixels']", "at most max_pixels"),
    (asked({**IMAGE, "resized_height": 9}), "", "resized_height and resized_width together"),
    (asked({**IMAGE, "resized_height": 1, "resized_width": 900}), "", "max_aspect"),
    (asked({**VIDEO, "total_pixels": 9}), "['total_pixels']", "not supported"),
    (asked({**VIDEO, "num_frames": 2}), "['num_frames']", "did you mean 'nframes'?"),
    (asked({"type": "video", "nframes": 2}), "['nframes']", "pass num_frames or fps"),
    (asked({"type": "text", "text": "red", "value": 1}), "['value']", "must be one of "),
    (asked({"type": "image_url", "image_url": {"url": "a.png"}}), "['image_url']", "a data:, https:// or"),
    (asked({"type": "image_url", "image_url": {"url": "data:", "detail": "low"}}),
     "['image_url']['detail']", "auto"),
    (asked({"type": "image_url", "image_url": {"urls": "x"}}), "['image_url']['urls']", "did you mean 'url'"),
    (asked({"type": "image_url"}), "", "0 images"),
    (asked({"type": ["image"]}), "", "parts of type"),
]  # fmt: skip


def test_keys_that_would_not_act_are_refused_by_name(qwen: VisionLanguagePipeline) -> None:
    for messages, place, allowed in REFUSED:
        with pytest.raises(InputError) as caught:
            qwen(messages, **SHORT)
        argument = "images" if "0 images" in allowed else f"prompt[0]{place}"
        assert caught.value.argument == argument and allowed in str(caught.value), str(caught.value)


def test_frames_of_a_part_are_those_of_its_options(qwen: VisionLanguagePipeline) -> None:
    file = clip(12)  # at ten a second
    part = {"type": "video", "video": file}
    for option, keywords in (({"nframes": 4}, {"num_frames": 4}), ({"fps": 5}, {"fps": 5})):
        prompt = asked({**part, **option})
        wanted = qwen(asked({"type": "video"}), videos=file, **keywords, **SHORT)
        assert qwen(prompt, **SHORT).tokens == wanted.tokens
        assert qwen(prompt, num_frames=12, **SHORT).tokens == wanted.tokens, "the part's own come first"
        grids = [read(qwen, asked(one))["video_grid_thw"][0, 0] for one in (part, {**part, **option})]
        assert grids[1] < grids[0], "all frames without the option"
    with pytest.raises(MediaError, match="with a list of frames"):
        qwen(asked({**VIDEO, "fps": 1.0}), **SHORT)


def test_each_image_is_read_in_the_size_that_its_part_asks_for(qwen: VisionLanguagePipeline) -> None:
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (56, 84, 3), dtype=np.uint8))
    part = {"type": "image", "image": image}
    small = {**part, "max_pixels": 28 * 28}
    large = {**part, "min_pixels": 112 * 112}
    exact = {**part, "resized_height": 85, "resized_width": 30}
    grids = [read(qwen, asked(one))["image_grid_thw"].tolist() for one in (part, small, large, exact)]
    assert grids == [[[1, 4, 6]], [[1, 2, 2]], [[1, 8, 10]], [[1, 6, 2]]]
    together = read(qwen, asked(small, part, exact))
    alone = [read(qwen, asked(one))["pixel_values"] for one in (small, part, exact)]
    assert together["image_grid_thw"].tolist() == [grids[1][0], grids[0][0], grids[3][0]]
    assert together["pixel_values"].split([len(one) for one in alone])[2].equal(alone[2])
    assert together["pixel_values"].split([len(one) for one in alone])[1].equal(alone[1])
    own = qwen.processor(
        text=["<|image_pad|>"],
        images=[image],
        size={"shortest_edge": 1, "longest_edge": 784},
        return_tensors="pt",
    )
    assert read(qwen, asked(small))["pixel_values"].equal(own["pixel_values"])
    call, _ = qwen._prepare_request(asked(small), {"negative_prompt": "red", "guidance_scale": 1.5, **SHORT})
    assert call.requests[0].negative_inputs["image_grid_thw"].tolist() == grids[1]


def test_sizes_of_parts_keep_the_limits(
    qwen: VisionLanguagePipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(qwen, "media_limits", MediaLimits(max_pixels=5_000))
    for option in ({"min_pixels": 5_001}, {"resized_height": 100, "resized_width": 51}):
        with pytest.raises(InputError, match="max_pixels"):
            qwen(asked({**IMAGE, **option}), **SHORT)


def test_sizes_are_refused_by_models_whose_processor_takes_none(llava: VisionLanguagePipeline) -> None:
    with pytest.raises(InputError, match=r"^prompt\[0\]\['max_pixels'\] needs an image processor with"):
        llava(asked({**IMAGE, "max_pixels": 784}), **SHORT)


def test_images_in_openai_parts_and_base64_are_those_of_transformers_parts(
    llava: VisionLanguagePipeline,
) -> None:
    wanted = llava(asked(IMAGE), **SHORT).tokens
    data = base64.b64encode(encoded(tiny_image(), "PNG")).decode()
    url = f"data:image/png;base64,{data}"
    for part in (
        {"type": "image_url", "image_url": {"url": url, "detail": "auto"}},
        {"type": "image_url", "image_url": url},
        {"type": "image", "base64": data},
        {"type": "image", "image": data},
        {"type": "image", "image": {"base64": data}},
    ):
        assert llava(asked(part), **SHORT).tokens == wanted
    for images in (data, {"base64": data}, [url], {"bytes": encoded(tiny_image(), "PNG"), "path": None}):
        assert llava("describe", images=images, **SHORT).tokens == wanted
