"""Prompts and media in every form; batches; the output object."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import set_seed

from mmspec.pipelines import MMSpecPipeline, VisionLanguagePipeline
from tests.media.files import encoded
from tests.tiny_models import VISION_LANGUAGE_FAMILIES, tiny_clip, tiny_image, user_message

IMAGE = tiny_image()
SHORT: dict[str, Any] = {"max_new_tokens": 8}


@pytest.fixture(scope="module")
def qwen(checkpoints: Path) -> Any:
    return MMSpecPipeline.from_pretrained(checkpoints / "qwen2_5_vl")


def reference(pipe: VisionLanguagePipeline, messages: list[dict[str, Any]], **keywords: Any) -> list[int]:
    """Output of transformers alone for the messages."""
    inputs = pipe.processor.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )
    output = pipe.model.generate(**inputs, do_sample=False, **{**SHORT, **keywords})
    return list(output[0, inputs["input_ids"].shape[1] :].tolist())


def test_every_form_of_an_image_gives_one_answer(llava: VisionLanguagePipeline, tmp_path: Path) -> None:
    wanted = reference(llava, user_message("describe the picture", [IMAGE]))
    path = tmp_path / "image.png"
    IMAGE.save(path)
    forms: list[Any] = [path, str(path), IMAGE, np.asarray(IMAGE), encoded(IMAGE, "PNG"), [IMAGE], (path,)]
    for form in forms:
        assert llava("describe the picture", images=form, **SHORT).tokens == [wanted], type(form)


def test_every_form_of_a_prompt_gives_one_answer(llava: VisionLanguagePipeline) -> None:
    text = "describe the picture"
    parts = [{"type": "image"}, {"type": "text", "text": text}]
    inline = [{"type": "image", "image": IMAGE}, {"type": "text", "text": text}]
    raw = llava.processor.apply_chat_template(
        [{"role": "user", "content": parts}], tokenize=False, add_generation_prompt=True
    )
    wanted = reference(llava, user_message(text, [IMAGE]))
    calls: list[tuple[object, dict[str, Any]]] = [
        (text, {"images": IMAGE}),
        ([text], {"images": [IMAGE]}),
        ([text], {"images": [[IMAGE]]}),
        ([{"role": "user", "content": parts}], {"images": IMAGE}),
        ([{"role": "user", "content": inline}], {}),
        ([[{"role": "user", "content": inline}]], {}),
        ([{"role": "user", "content": text}], {"images": [IMAGE]}),
        (raw, {"images": IMAGE, "apply_chat_template": False}),
        ([raw], {"images": [IMAGE], "apply_chat_template": False}),
    ]
    before = repr(calls)
    for prompt, keywords in calls:
        assert llava(prompt, **keywords, **SHORT).tokens == [wanted], prompt
    assert repr(calls) == before, "messages of the caller are left as they were"


def test_several_turns_keep_their_images_in_order(qwen: VisionLanguagePipeline) -> None:
    one, two, three = (tiny_image(i) for i in range(3))
    answer = {"role": "assistant", "content": [{"type": "text", "text": "a red circle"}]}
    first, last = user_message("describe the picture", [one]), user_message("and then", [two, three])
    bare = [{"role": "user", "content": [{"type": "image"}] * 2 + [{"type": "text", "text": "and then"}]}]
    wanted = reference(qwen, [*first, answer, *last])
    assert qwen([*first, answer, *last], **SHORT).tokens == [wanted]
    assert qwen([*first, answer, *bare], images=[two, three], **SHORT).tokens == [wanted]
    assert qwen([*first, answer, *bare], images=[three, two], **SHORT).tokens != [wanted]


def test_videos_come_as_frames_in_lists_and_arrays(qwen: VisionLanguagePipeline) -> None:
    clip = tiny_clip()
    frames = [Image.fromarray(frame) for frame in clip]
    wanted = qwen("describe the video", videos=clip, **SHORT).tokens
    for form in (frames, [clip], torch.from_numpy(clip)):
        assert qwen("describe the video", videos=form, **SHORT).tokens == wanted
    batch = qwen(["describe the video", "red"], videos=[clip, None], **SHORT)
    assert batch.tokens == [wanted[0], qwen("red", **SHORT).tokens[0]]
    two = qwen("describe", videos=[clip, tiny_clip(1)], **SHORT)
    inline = [{"type": "video", "video": tiny_clip(i)} for i in range(2)]
    assert qwen([{"role": "user", "content": [*inline, {"type": "text", "text": "describe"}]}],
                **SHORT).tokens == two.tokens  # fmt: skip


SEEDS = [5, 7, 5, 2**64 - 1]
PROMPTS = ["describe the picture", "red", "what colour is the large circle", "a blue star"]
IMAGES = [IMAGE, None, [tiny_image(1), tiny_image(2)], tiny_image(3)]


@pytest.mark.parametrize(
    ("family", "sampling"), [("llava", {}), ("qwen2_5_vl", {"temperature": 0.8, "top_p": 0.9})]
)
def test_rows_of_a_batch_equal_their_single_calls_in_any_order(family: str, sampling: Any) -> None:
    model, processor = VISION_LANGUAGE_FAMILIES[family]()
    pipe = VisionLanguagePipeline(model.double(), processor)
    singles = [
        pipe(prompt, images=images, seed=seed, **sampling, **SHORT).tokens[0]
        for prompt, images, seed in zip(PROMPTS, IMAGES, SEEDS, strict=True)
    ]
    order = [3, 1, 0, 2]
    prompts, images, seeds = ([given[i] for i in order] for given in (PROMPTS, IMAGES, SEEDS))
    output = pipe(prompts, images=images, seed=seeds, **sampling, **SHORT)
    assert output.tokens == [singles[i] for i in order]
    assert str(output).startswith(output.text[0]) and "(+3 more)" in str(output)


def test_seeds_and_generators_say_the_same(text: Any) -> None:
    call = {"apply_chat_template": False, "do_sample": True, **SHORT}
    by_seed = text(["red", "blue"], seed=[3, 4], **call)
    generators = [torch.Generator().manual_seed(3), torch.Generator().manual_seed(4)]
    assert text(["red", "blue"], generator=generators, **call).tokens == by_seed.tokens
    assert text("red", generator=generators[0], **call).tokens == text("red", seed=3, **call).tokens
    assert text("red", seed=3, **call).tokens != text("red", seed=4, **call).tokens
    same = text(["red", "red"], seed=3, **call)
    assert same.tokens[0] == text("red", seed=3, **call).tokens[0] and same.tokens[0] != same.tokens[1]
    assert text("red", **call).tokens != text("red", **call).tokens  # no seed, no repetition
    assert text("red", seed=3, return_dict=False, **call) == (text("red", seed=3, **call).text,)


def drawn_in_a_running_batch(pipe: Any, prompt: str, **settings: Any) -> Any:
    with pipe.running_batch(rows=1) as batch:
        batch.enter(prompt, **settings)
        return [update.tokens for _ in range(8) for update in batch.step()]


@pytest.mark.parametrize(
    "draw",
    [
        lambda pipe, *asked, **how: pipe(*asked, **how).tokens,
        lambda pipe, *asked, **how: list(pipe.stream(*asked, **how)),
        lambda pipe, *asked, **how: [output.tokens for output in pipe.watch(*asked, **how)],
        drawn_in_a_running_batch,
    ],
    ids=["call", "stream", "watch", "running batch"],
)
def test_without_a_seed_of_its_own_a_call_is_repeated_by_that_of_transformers(text: Any, draw: Any) -> None:
    def after(seed: int) -> Any:
        set_seed(seed)
        return draw(text, "red", apply_chat_template=False, temperature=1.5, max_new_tokens=8)

    assert after(7) == after(7) != after(8)


def test_a_call_that_draws_no_seed_leaves_global_state_alone(text: Any) -> None:
    state = torch.random.get_rng_state()
    text("red", apply_chat_template=False, do_sample=True, seed=3, **SHORT)
    text("red", apply_chat_template=False, do_sample=False, **SHORT)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    deltas = text.stream("red", apply_chat_template=False, **SHORT)
    next(deltas)
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    deltas.close()


@pytest.mark.parametrize(
    ("family", "asked"),
    [("llava", {}), ("qwen2_5_vl", {"guidance_scale": 2.0, "negative_prompt": "blue"})],
)
def test_images_of_a_prompt_are_processed_once(
    family: str, asked: dict[str, Any], checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe: Any = MMSpecPipeline.from_pretrained(checkpoints / family, accelerator="none")
    call: dict[str, Any] = {"images": [IMAGE, IMAGE], **SHORT, **asked}
    wanted = pipe("red", **call)
    # without the caching copy, the images of each text would be processed again
    monkeypatch.setattr("mmspec.pipelines.vision_language.read_once", lambda processor: processor)
    assert pipe("red", **call).tokens == wanted.tokens
    monkeypatch.undo()
    calls = []
    kind = type(pipe.processor.image_processor)
    process = kind.__call__
    monkeypatch.setattr(kind, "__call__", lambda *args, **kwargs: calls.append(1) or process(*args, **kwargs))
    pipe.set_accelerator("draft_model", drafter=checkpoints / "draft")  # it reads the text alone
    assert pipe("red", **call).tokens == wanted.tokens
    assert calls == [1]
