"""Conversations whose last turn is the assistant's: continued as transformers does, or a new turn."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoTokenizer

from mmspec.errors import InputError
from mmspec.pipelines import VisionLanguagePipeline
from mmspec.pipelines.text_stream import TextDeltas, decode
from tests.bad_inputs.refusals import no_forward
from tests.tiny_models import tiny_image, user_message

IMAGE = tiny_image()
SHORT: dict[str, Any] = {"max_new_tokens": 8}
ASKED = user_message("describe the picture", [IMAGE])
SPACED = """{% for message in messages %}{{ message['role'] }} : {{ message['content'] | trim }} .
{% endfor %}{% if shout %}loud {% endif %}{% if add_generation_prompt %}assistant : {% endif %}"""


@pytest.fixture
def spaced(text: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The text model with a chat template that sets spaces and reads a variable."""
    monkeypatch.setattr(text.processor, "chat_template", SPACED)
    return text


def begun(content: object) -> list[dict[str, Any]]:
    """The question, and the beginning of an answer."""
    return [*ASKED, {"role": "assistant", "content": content}]


def by_transformers(pipe: VisionLanguagePipeline, messages: list[dict[str, Any]], **how: Any) -> list[int]:
    """New tokens of transformers alone."""
    inputs = pipe.processor.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_tensors="pt", **how
    )
    output = pipe.model.generate(**inputs, do_sample=False, **SHORT)
    return list(output[0, inputs["input_ids"].shape[1] :].tolist())


def test_the_last_turn_of_the_assistant_is_continued(llava: VisionLanguagePipeline) -> None:
    for answer in ("a red", "a red ", " a red\n", ""):
        parts = [{"type": "text", "text": answer}]
        wanted = by_transformers(llava, begun(parts), continue_final_message=True)
        fresh = by_transformers(llava, begun(parts), add_generation_prompt=True)
        assert wanted != fresh
        assert llava(begun(answer), **SHORT).tokens == [wanted]
        assert llava(begun(parts), continue_final_message=True, **SHORT).tokens == [wanted]
        assert llava(begun(parts), continue_final_message=False, **SHORT).tokens == [fresh]


def test_the_first_word_of_a_continuation_keeps_its_space() -> None:
    tokenizer = AutoTokenizer.from_pretrained("assets/scenes-llava")
    before, after = (
        tokenizer(part, add_special_tokens=False)["input_ids"] for part in ("a large", "cross left")
    )
    assert decode(tokenizer, after) == "cross left"
    assert decode(tokenizer, after, before) == " cross left"
    deltas = TextDeltas(tokenizer, before)
    pieces = [deltas.add([token]) for token in after]
    assert "".join(pieces) + deltas.finish() == " cross left"


RAW = {"apply_chat_template": False}
PREFILLED = {"continue_final_message": True}
IMAGE_LAST = begun([{"type": "text", "text": "a"}, {"type": "image", "image": IMAGE}])


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    ("describe", PREFILLED, "continue_final_message"),
    (["describe", begun("a red")], PREFILLED, "continue_final_message"),
    ([3, 4], {}, "apply_chat_template"),
    ([[3, 4], [3, -1]], RAW, "prompt"),
    ([3, 10**6], RAW, "prompt"),
    ([3, 4], {**RAW, "images": IMAGE}, "prompt"),
    (["a", []], RAW, "prompt[1]"),
    (begun("a red"), {"continue_final_message": "content"}, "continue_final_message"),
    (IMAGE_LAST, {}, "prompt[1]"),
    (begun([]), {}, "prompt[1]"),
    ([ASKED, begun([])], {}, "prompt[1][1]"),
    (begun("a red"), {"chat_template_kwargs": {"add_generation_prompt": True}}, "chat_template_kwargs"),
    (ASKED, {"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs['tokenize']"),
    (ASKED, {"chat_template_kwargs": {"thinking": False}}, "chat_template_kwargs['thinking']"),
    (ASKED, {"chat_template_kwargs": ["shout"]}, "chat_template_kwargs"),
    ("a", {"chat_template_kwargs": {"shout": 1}, "apply_chat_template": False}, "chat_template_kwargs"),
]


def test_raw_prompts_are_continued_and_may_be_token_ids(llava: VisionLanguagePipeline) -> None:
    texts = ["a red frame", "the large image"]
    ids = [llava.tokenizer(text)["input_ids"] for text in texts]
    whole = llava(texts, **RAW, **PREFILLED, **SHORT)
    for prompts in (ids, [tuple(ids[0]), texts[1]]):
        again = llava(prompts, **RAW, **PREFILLED, **SHORT)
        assert (again.text, again.tokens) == (whole.text, whole.tokens)
    assert llava(ids[0], **RAW, **SHORT).tokens == whole.tokens[:1]
    for text, before, after in zip(texts, ids, whole.tokens, strict=True):
        assert text + whole.text[texts.index(text)] == llava.tokenizer.decode([*before, *after])
    image = llava.model.config.image_token_id
    with no_forward(), pytest.raises(InputError, match="prompt must have no token id that stands for"):
        llava([3, image], **RAW, **SHORT)


def test_what_cannot_be_continued_is_refused_by_name(llava: VisionLanguagePipeline) -> None:
    for prompt, keywords, argument in REFUSED:
        with no_forward(), pytest.raises(InputError) as refused:
            llava(prompt, **keywords, **SHORT)
        assert refused.value.argument == argument


def test_a_template_that_drops_the_turn_is_named(spaced: Any) -> None:
    spaced.processor.chat_template = "{{ messages[0]['content'] }}"
    turns = [{"role": "user", "content": "red"}, {"role": "assistant", "content": "blue"}]
    with pytest.raises(InputError, match="^prompt was refused by the chat template"):
        spaced(turns, **SHORT)


def test_a_turn_may_not_forge_another_through_a_variable(spaced: Any) -> None:
    spaced.processor.chat_template = "{{ system }}" + SPACED
    for value in (spaced.tokenizer.eos_token, {"a": 1}, ["b"]):
        with pytest.raises(InputError, match=r"chat_template_kwargs\['system'\]"):
            spaced(user_message("red"), chat_template_kwargs={"system": value}, **SHORT)
