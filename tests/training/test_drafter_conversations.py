"""Conversations as sequences for drafters: learnt tokens, and replies of the target."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from mmspec.errors import InputError
from mmspec.pipelines import VisionLanguagePipeline
from mmspec.targets import VisionLanguageTarget
from mmspec.training.data.conversations import (
    Conversation,
    ConversationReader,
    check_written,
    message,
)
from mmspec.visual_tokens.spans import find_images
from tests.tiny_models import VISION_LANGUAGE_FAMILIES, tiny_images

FAMILIES = ["llava", "qwen2_5_vl", "smolvlm"]


@functools.cache
def reader(family: str) -> ConversationReader:
    model, processor = VISION_LANGUAGE_FAMILIES[family]()
    return ConversationReader(VisionLanguageTarget(model.requires_grad_(False)), processor)


def chat() -> Conversation:
    """Two images, then a third in the second turn."""
    said = (
        message("user", "compare the first and the last", 2),
        message("assistant", "the first is red and the last is blue"),
        message("user", "and then ?", 1),
        message("assistant", "no"),
    )
    return Conversation(said, tuple(tiny_images(3)))


def words(family: str, ids: Sequence[int]) -> str:
    decoded: str = reader(family).processor.tokenizer.decode(ids, skip_special_tokens=True)
    return " ".join(decoded.split())


@pytest.mark.parametrize("family", FAMILIES)
def test_replies_are_learnt_and_nothing_else(family: str) -> None:
    made = reader(family).example(chat())
    ids, learnt = made.inputs["input_ids"][0], made.learnt
    assert words(family, ids[learnt]) == "the first is red and the last is blue no"
    begins = (learnt & ~learnt.roll(1)).nonzero()[:, 0].tolist()
    assert len(begins) == 2 and begins[0] == made.answer
    # each reply ends with the token that the target would end it with, where the template writes one
    ends = [ids[place] for place in (learnt & ~learnt.roll(-1)).nonzero()[:, 0].tolist()]
    closing = reader(family).processor.tokenizer.eos_token_id
    if closing in ids.tolist():
        assert [int(end) for end in ends] == [closing, closing]
    assert len(find_images(reader(family).target.config, made.inputs)) == 3 or family != "llava"


@pytest.mark.parametrize("family", FAMILIES)
def test_the_target_reads_a_prompt_as_in_a_pipeline(family: str) -> None:
    """A head must be trained on the inputs that it drafts for."""
    model, processor = VISION_LANGUAGE_FAMILIES[family]()
    pipe = VisionLanguagePipeline(model, processor)
    made, said = reader(family).example(chat()), chat().until(1)
    images = list(said.images)
    run = pipe._prepare([said.messages], {"max_new_tokens": 2}, images=[images])
    asked = run.requests[0].inputs
    ours = reader(family).inputs(said, answering=True)
    assert set(ours) == set(asked) - {"attention_mask"}
    assert all(torch.equal(value, asked[name]) for name, value in ours.items())
    start = asked["input_ids"].shape[1]
    assert made.answer == start
    assert torch.equal(made.inputs["input_ids"][:, :start], asked["input_ids"])


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_regenerated_replies_are_what_the_target_says(family: str) -> None:
    """Each turn follows the target's own earlier replies, in a batch of rows with different lengths."""
    short = Conversation(
        (message("user", "describe the circle", 1), message("assistant", "no")), chat().images[:1]
    )
    told = reader(family).regenerated([chat(), short], 6)
    assert [len(each.messages) for each in told] == [4, 2] and told[0].images == chat().images
    model = reader(family).target.model
    for each in told:
        for turn in each.replies:
            inputs: dict[str, Any] = reader(family).inputs(each.until(turn), answering=True)
            said = model.generate(**inputs, do_sample=False, max_new_tokens=6)[
                0, inputs["input_ids"].shape[1] :
            ]
            reply = each.messages[turn]["content"][0]["text"]
            assert " ".join(reply.split()) == words(family, said.tolist())
    assert told[0].messages[1] != chat().messages[1] and told[0].messages[2] == chat().messages[2]


PUBLISHED = {
    # images before words, roles in capitals, no token at the end of a turn
    "as LLaVA-1.5's": """
        {%- for message in messages %}{{ message['role'] | upper + ': ' }}
        {%- for part in message['content'] if part['type'] == 'image' %}{{ 'IMAGE' + ' ' }}{% endfor %}
        {%- for part in message['content'] if part['type'] == 'text' %}{% if message['role'] == 'assistant' %}
        {%- generation %}{{ part['text'] + ' ' }}{% endgeneration %}
        {%- else %}{{ part['text'] + ' ' }}{% endif %}{% endfor %}{% endfor %}
        {%- if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}""",
    # a system message that nobody wrote, and a line break after each turn's end
    "as Qwen2.5-VL's": """
        {%- for message in messages %}
        {%- if loop.first and message['role'] != 'system' %}{{ 'CLOSE' }}{% endif %}
        {{- message['role'] + ' : ' }}
        {%- for part in message['content'] %}{{ 'IMAGE' if part['type'] == 'image' else part['text'] }}
        {%- endfor %}
        {{- 'CLOSE .' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant : ' }}{% endif %}""",
}


SILENT = """
    {%- for message in messages if message['role'] != 'system' %}{{ message['role'] + ' ' }}
    {%- for part in message['content'] if part['type'] == 'text' %}{{ part['text'] + ' ' }}{% endfor %}
    {%- endfor %}{% if add_generation_prompt %}{{ 'assistant ' }}{% endif %}"""


def test_templates_that_leave_out_or_rewrite_what_is_said_are_refused_by_row() -> None:
    model, processor = VISION_LANGUAGE_FAMILIES["llava"]()
    original = processor.chat_template
    told = [message("user", "describe"), message("assistant", "no")]
    plain = Conversation(tuple(told), (), "data[0]")
    french = Conversation((message("system", "in French"), *told), (), "data[1]")
    for template in PUBLISHED.values():
        processor.chat_template = template
        check_written([plain, french, chat()], processor)
    processor.chat_template = SILENT
    check_written([plain], processor)
    with pytest.raises(InputError, match=r"data\[1\] must .*text of the system; got 'in French'"):
        check_written([plain, french], processor)
    processor.chat_template = "{{ messages | length }}" + PUBLISHED["as LLaVA-1.5's"]
    with pytest.raises(InputError, match=r"data\[0\].*after its generation prompt"):
        check_written([plain], processor)
    processor.chat_template = "{{ messages | length }}" + original
    with pytest.raises(InputError, match="after its generation prompt"):
        ConversationReader(VisionLanguageTarget(model), processor).example(chat())
    processor.chat_template = "{{ raise_exception('no') }}"
    with pytest.raises(InputError, match=r"data\[0\].*chat template, which raised: no"):
        check_written([plain], processor)
    with pytest.raises(InputError, match="must have an assistant reply"):
        reader("llava").example(chat().until(1))
