"""Conversations with chat templates that render a turn differently if other turns follow, like Qwen3's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mmspec.errors import InputError
from mmspec.pipelines import VisionLanguagePipeline
from mmspec.targets import CausalTarget, VisionLanguageTarget
from mmspec.training.data.conversations import (
    Conversation,
    ConversationReader,
    ConversationRows,
    check_written,
    message,
    sequences,
)
from mmspec.training.data.sequences import TrainingExample
from mmspec.visual_tokens.spans import find_images
from tests.pipelines.byte_level import byte_level_tokenizer
from tests.tiny_models import VISION_LANGUAGE_FAMILIES, tiny_images, tiny_llama

# thoughts before the last question are dropped; the reply to the last question has an empty block of them
THINKING = """
    {%- set seen = namespace(last=-1) %}
    {%- for message in messages %}
        {%- if message.role == 'user' %}{%- set seen.last = loop.index0 %}{%- endif %}
    {%- endfor %}
    {%- for message in messages %}{{ message.role + ':' }}
        {%- set said = message.content.split('</think>') %}
        {%- if message.role == 'assistant' and loop.index0 > seen.last %}
            {{- '<think>' + (said[0].split('<think>')[-1] if said | length > 1 else '') + '</think>' }}
        {%- endif %}
        {{- said[-1] + '<|end|>' }}
    {%- endfor %}
    {%- if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"""
OPENED = THINKING.replace("{{ 'assistant:' }}", "{{ 'assistant:<think>' }}")  # as Qwen3.5's
DROPPING = """
    {%- for message in messages %}{{ message.role + ':' + message.content.split('</think>')[-1] + '<|end|>' }}
    {%- endfor %}{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"""
EMPTY = "<think></think>"
OF_PARTS = """
    {%- for message in messages %}{{ message.role + ' ' }}
        {%- if message.role == 'assistant' and loop.last %}{{ 'no ' }}{% endif %}
        {%- for part in message.content %}{{ 'IMAGE ' if part.type == 'image' else part.text + ' ' }}
        {%- endfor %}
    {%- endfor %}
    {%- if add_generation_prompt %}{{ 'assistant ' }}{% endif %}"""


def talk(*replies: str, where: str = "data") -> Conversation:
    """A conversation with those replies of the assistant's."""
    turns = [(message("user", f"ask {n}"), message("assistant", each)) for n, each in enumerate(replies)]
    return Conversation(tuple(each for turn in turns for each in turn), (), where)


def reader(template: str) -> ConversationReader:
    tokenizer = byte_level_tokenizer()
    tokenizer.chat_template = template
    return ConversationReader(CausalTarget(tiny_llama(vocab=len(tokenizer))), tokenizer)


def learnt(read: ConversationReader, said: Conversation, turns: list[int]) -> tuple[str, str]:
    """Return the text before the first learnt token, and the learnt text."""
    made = read.example(said, turns)
    ids = made.inputs["input_ids"][0]
    return read.tokenizer.decode(ids[: made.answer]), read.tokenizer.decode(ids[made.learnt])


@pytest.mark.parametrize("template", [THINKING, OPENED])
def test_each_reply_is_learnt_after_its_prompt_as_decoding_has_it(template: str) -> None:
    read, said = reader(template), talk("<think>deep</think>one", "two")
    pipe = VisionLanguagePipeline(read.target.model, read.tokenizer)
    found = sequences(said, read.tokenizer)
    assert [turns for _, turns in found] == [[1], [3]]
    replies = ["<think>deep</think>one<|end|>", "<think></think>two<|end|>"]
    for (part, turns), reply in zip(found, replies, strict=True):
        asked = [{"role": each["role"], "content": each["content"][0]["text"]} for each in part.messages[:-1]]
        (request,) = pipe._prepare(asked, {"max_new_tokens": 1}).requests
        prompt = read.tokenizer.decode(request.inputs["input_ids"][0])
        assert learnt(read, part, turns) == (prompt, reply.removeprefix("<think>" * (template == OPENED)))
    assert "deep" not in prompt


def test_a_reply_is_learnt_with_the_images_that_its_prompt_shows() -> None:
    model, processor = VISION_LANGUAGE_FAMILIES["llava"]()
    processor.chat_template = OF_PARTS.replace("IMAGE", processor.image_token)
    read = ConversationReader(VisionLanguageTarget(model.requires_grad_(False)), processor)
    said = replace(talk("red", "blue"), images=tuple(tiny_images(3)))
    turns = (message("user", "the circle", 2), said.messages[1], message("user", "and", 1), said.messages[3])
    said = replace(said, messages=turns)
    for place, (images, reply) in enumerate([(2, "no red"), (3, "no blue")]):
        part, learns = sequences(said, processor)[place]
        made = read.example(part, learns)
        assert len(find_images(read.target.config, made.inputs)) == images
        assert learnt_text(read, made).split() == reply.split()
    data = ConversationRows(read, [said] * 6, 4, 0)
    counts = [
        len(find_images(read.target.config, each.inputs))
        for step in range(3)
        for each in data.batch(step, 0).examples
    ]
    assert {*counts} == {2, 3}


def test_steps_draw_one_reply_of_a_row_and_a_resumed_run_draws_the_same() -> None:
    read = reader(THINKING)
    rows = [talk("one", "two" * 9)] * 6
    short = len(read.example(rows[0].until(2), [1]).learnt)
    for longest, lasts in ((None, {"one", "two" * 9}), (short, {"one"})):
        data = ConversationRows(read, rows, 3, 0, max_length=longest)
        texts = [[learnt_text(read, one) for one in data.batch(step, 0).examples] for step in range(4)]
        assert {text for step in texts for text in step} == {f"{EMPTY}{last}<|end|>" for last in lasts}
        fresh = ConversationRows(read, rows, 3, 0, max_length=longest)
        assert [learnt_text(read, one) for one in fresh.batch(3, 0).examples] == texts[3]


def learnt_text(read: ConversationReader, made: TrainingExample) -> str:
    text: str = read.tokenizer.decode(made.inputs["input_ids"][0][made.learnt])
    return text


def test_every_row_is_checked_by_its_own_words_before_training() -> None:
    """Rows of the same turns differ in what a template makes of them."""
    tokenizer = byte_level_tokenizer()
    tokenizer.chat_template = DROPPING
    rows = [talk("one", where=f"data, line {line}") for line in range(1, 9)]
    check_written(rows, tokenizer)
    rows[4] = talk("<think>deep</think>one", where="data, line 5")
    with pytest.raises(InputError, match=r"data, line 5 must .*text of the assistant; got '<think>deep"):
        check_written(rows, tokenizer)
    rows[6] = talk("<think>dark</think>one", where="data, line 7")
    with pytest.raises(
        InputError, match=r"data, line 5 must .*; data, line 7 must .*; got '2 rows that cannot be used'"
    ):
        check_written(rows, tokenizer)
    tokenizer.chat_template = "{{ messages[0].content + 1 }}" + THINKING
    with pytest.raises(InputError, match=r"data, line 1 must .*, which raised: can only conc"):
        check_written(rows[:1], tokenizer)
    tokenizer.chat_template = DROPPING.replace("'<|end|>'", "''")
    with pytest.raises(InputError, match=r"data, line 3 must have an assistant reply"):
        check_written([talk("", where="data, line 3")], tokenizer)
