"""Bad prompts as data: rows 33 to 38."""

from __future__ import annotations

from typing import Any

from tests.bad_inputs.refusals import Bench, Row

SHORT: dict[str, Any] = {"max_new_tokens": 4}
KINDS = "a string, a list of chat messages, or a list of either"
PARTS = "parts of type 'text', 'image', 'video' or 'audio'"


def prompt(number: int, name: str, value: object, argument: str, *expected: str, **keywords: Any) -> Row:
    return Row(
        number, name, lambda bench: bench.vlm(value, **{**SHORT, **keywords}), argument, tuple(expected)
    )


def with_images(
    number: int, name: str, value: object, count: int, argument: str, *expected: str, **keywords: Any
) -> Row:
    def call(bench: Bench) -> object:
        return bench.vlm(value, images=[bench.image] * count, **{**SHORT, **keywords})

    return Row(number, name, call, argument, tuple(expected))


def turn(content: object, role: object = "user") -> list[dict[str, object]]:
    return [{"role": role, "content": content}]


RAW: dict[str, Any] = {"apply_chat_template": False}
IMAGE = {"type": "image"}
TEXT = {"type": "text", "text": "describe"}
LONG = "red " * 100_000
NOT_PROMPTS: list[object] = [None, 42, 1.5, b"red", {"role": "user", "content": "red"}, {1, 2}, object()]

PROMPTS = [
    prompt(33, "empty", "", "prompt", "some text, an image, a video or audio"),
    prompt(33, "whitespace in a batch", ["red", " "], "prompt[1]", "some text"),
    prompt(33, "empty templated prompt", "", "prompt", "at least one token", **RAW),
    *[
        prompt(33, f"prompt {type(value).__name__}", value, "prompt", KINDS)
        for value in NOT_PROMPTS
    ],
    prompt(33, "None in a batch", ["red", None], "prompt[1]", "got None", "a string or a list of chat"),
    prompt(33, "message without role", [{"content": "red"}], "prompt[0]", "'role' and 'content'"),
    prompt(33, "string between messages", [*turn("red"), "red"], "prompt[1]", "'role' and 'content'"),
    prompt(33, "content of None", turn(None), "prompt[0]['content']", "a string or a list of parts"),
    prompt(33, "part without type", turn([{"text": "red"}]), "prompt[0]", PARTS),
    prompt(33, "text part of None", turn([{"type": "text", "text": None}]), "prompt[0]", "a string"),
    prompt(33, "role is a number", turn("red", 5), "prompt[0]['role']", "a string"),
    Row(33, "image for a text model", lambda b: b.text("red", images=b.image, **RAW, **SHORT), "images",
        ("LlamaForCausalLM does not accept images",)),
    Row(33, "image in a message for a text model",
        lambda b: b.text(turn([{"type": "image", "image": b.image}]), **SHORT), "images",
        ("does not accept images",)),
    Row(33, "video for a model of images", lambda b: b.vlm("red", videos=[[b.image] * 2], **SHORT),
        "videos", ("does not accept videos",)),
    Row(33, "no chat template", lambda b: b.text("red", **SHORT), "apply_chat_template",
        ("no chat template",)),
    with_images(34, "more parts than images", turn([IMAGE, IMAGE, TEXT]), 1, "images", "got '1 images'",
             "one image for each image part"),
    prompt(34, "part without an image", turn([IMAGE, TEXT]), "images", "0 images"),
    with_images(34, "templated, none for an image", "user : red", 1, "images", "1 images", "<image>", ", 0",
             **RAW),
    Row(34, "one image for two prompts", lambda b: b.vlm(["a", "b"], images=b.image, **SHORT), "images",
        ("2 prompts",)),
    Row(34, "bad image in a row",
        lambda b: b.vlm(["a", "b"], images=[None, [b.image, 5]], **SHORT), "images[1]",
        ("class int",)),
    prompt(35, "placeholder", "what is <image> red", "prompt", "special token '<image>'",
           "apply_chat_template=False"),
    prompt(35, "end token", ["red", "red </s> blue"], "prompt[1]", "special token '</s>'"),
    prompt(35, "in a message", turn("red <image>"), "prompt[0]", "'<image>'"),
    prompt(35, "in the negative prompt", "red", "negative_prompt[0]", "'</s>'", negative_prompt="</s>",
           guidance_scale=2.0),
    prompt(36, "NUL", "red\0blue", "prompt", "not contain NUL"),
    prompt(36, "lone surrogate", "red \ud800", "prompt", "valid Unicode"),
    prompt(36, "NUL in a templated prompt", "a\0", "prompt", "not contain NUL", **RAW),
    prompt(36, "10^5 tokens", LONG, "prompt", "fewer than 1024 tokens"),
    prompt(36, "no room for the tokens asked for", "red " * 1000, "max_new_tokens", "positions",
           max_new_tokens=500),
    prompt(37, "empty stop string", "red", "stop_strings[0]", "not empty", stop_strings=""),
    prompt(37, "number as stop string", "red", "stop_strings[0]", "5", stop_strings=[5]),
    prompt(37, "10,000 stop strings", "red", "stop_strings", "10000 strings", "1 to 1,000",
           stop_strings=["a"] * 10_000),
    prompt(37, "no stop strings", "red", "stop_strings", "0 strings", stop_strings=[]),
    prompt(38, "negative prompts of another number", ["a", "b"], "negative_prompt", "each of the 2 prompts",
           negative_prompt=["a"], guidance_scale=2.0),
    prompt(38, "negative prompt of a number", "red", "negative_prompt", "one string",
           negative_prompt=5, guidance_scale=2.0),
    prompt(38, "number in the negative prompts", "red", "negative_prompt[0]", "a string",
           negative_prompt=[5], guidance_scale=2.0),
    prompt(38, "negative prompt over the positions", "red", "prompt", "fewer than 1024 tokens",
           negative_prompt="red " * 1024, guidance_scale=2.0),
]  # fmt: skip
