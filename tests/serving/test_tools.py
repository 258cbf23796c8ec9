"""Tools and reasoning by OpenAI's own client, of a tiny model whose output a logits processor decides."""

import contextlib
import json
from typing import Any

import openai
import pytest
import torch
from tokenizers import AddedToken
from transformers import LogitsProcessor, LogitsProcessorList

from mmspec.pipelines import VisionLanguagePipeline
from mmspec.serving.parsing.tool_formats import TOOL_FORMATS
from mmspec.serving.tool_calls import answer_format
from tests.pipelines.byte_level import byte_level_tokenizer
from tests.serving.conftest import post, running
from tests.tiny_models import tiny_llama

TEMPLATE = """{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}
{%- for m in messages %}<|start|>{{ m.role }}:
{%- if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}
{%- for call in m.tool_calls %}{{ call.id }}{{ call.function.name }}{{ ARGUMENTS }}{% endfor %}
{{- m.tool_call_id }}{{ m.name }}<|end|>{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant:
{%- if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}
{%- if opens %}<think>{% endif %}{% endif %}"""
OBJECTS = TEMPLATE.replace("ARGUMENTS", "call.function.arguments.town")
TEXTS = TEMPLATE.replace("{{ ARGUMENTS }}", "{{ ': ' + call.function.arguments + '.' }}")
TOWNS = {"type": "object", "properties": {"town": {"enum": ["Bath", "Zürich"]}}, "required": ["town"],
         "additionalProperties": False}  # fmt: skip
TOOL = {"type": "function", "function": {"name": "weather", "description": "<|end|>", "parameters": TOWNS}}
CLOCK = {"type": "function", "function": {"name": "clock", "strict": False, "parameters": TOWNS}}
STRICT = {"type": "function", "function": {"name": "clock", "strict": True, "parameters": TOWNS}}
ASKED = [{"role": "user", "content": "Is it warm?"}]
BATH, ZURICH = '{"town": "Bath"}', '{ "town":"Zürich" }'


class Script(LogitsProcessor):
    """Decides every token after the last <|start|>: those of `text`, then the end."""

    def __init__(self, tokenizer) -> None:
        self.tokenizer, self.text = tokenizer, None

    def __call__(self, input_ids, scores):
        if self.text is None:
            return scores
        start = self.tokenizer.convert_tokens_to_ids("<|start|>")
        said = self.tokenizer(self.text, add_special_tokens=False).input_ids + [self.tokenizer.eos_token_id]
        turn = len(self.tokenizer("<|start|>assistant:").input_ids)
        decided = torch.full_like(scores, -torch.inf)
        for row, ids in enumerate(input_ids.tolist()):
            place = ids[::-1].index(start) + 1 - turn
            decided[row, said[min(place, len(said) - 1)]] = 0.0
        return decided


class Scripted(VisionLanguagePipeline):
    """A pipeline whose calls have the script as a logits processor."""

    def _prepare_request(self, prompt, arguments):
        return super()._prepare_request(
            prompt, {**arguments, "logits_processor": LogitsProcessorList([self.script])}
        )


def scripted(form, template=OBJECTS, *, special=True, reasoning=True):
    """A pipeline whose chat template names the tokens of a format, which its tokenizer may hold."""
    known = TOOL_FORMATS[form].tokens
    tokenizer = byte_level_tokenizer()
    tokenizer.add_tokens([AddedToken("<|start|>", special=True)], special_tokens=True)
    if special:
        tokenizer.add_tokens([AddedToken(one, special=True) for one in known], special_tokens=True)
    template = template if reasoning else template.replace("think>", "hint>")
    elements = "<function=" if TOOL_FORMATS[form].is_xml else ""
    tokenizer.chat_template = f"{template}{{# {' '.join(known)} {elements} #}}"
    model = tiny_llama(vocab=320)
    model.config.max_position_embeddings = 4096
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    pipe = Scripted(model, tokenizer, "copy")
    pipe.script = Script(tokenizer)
    return pipe


def whole_and_streamed(server, **what):
    """The message and finish reason, which are the same as a whole and as a stream."""
    create = server.client.chat.completions.create
    what = {"model": "tiny", "max_tokens": 200, "messages": ASKED, **what}
    (whole,) = create(**what).choices
    content = reasoning = ""
    calls, reason = [], None
    for chunk in create(**what, stream=True):
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        reasoning += getattr(choice.delta, "reasoning_content", None) or ""
        for call in choice.delta.tool_calls or []:
            if call.id:
                assert call.type == "function" and call.index == len(calls)
                calls.append([call.function.name, ""])
            assert call.index == len(calls) - 1
            calls[-1][1] += call.function.arguments
        reason = choice.finish_reason or reason
    said = [[one.function.name, one.function.arguments] for one in whole.message.tool_calls or []]
    assert (content, calls, reason) == (whole.message.content or "", said, whole.finish_reason)
    assert reasoning == (getattr(whole.message, "reasoning_content", None) or "")
    return whole.message, whole.finish_reason


def written(form, *calls):
    """Calls as a model writes them."""
    known = TOOL_FORMATS[form]
    texts = [known.start % name + arguments_of(known, arguments) + known.end for name, arguments in calls]
    return known.prefix + known.between.join(texts) + known.suffix


def arguments_of(known, text):
    if not known.is_xml:
        return text
    members = json.loads(text).items()
    return "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in members)


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("form", "special"), [*((form, True) for form in TOOL_FORMATS), ("hermes", False), ("mistral", False)]
)
def test_calls_reach_the_client_and_results_the_model(form, special):
    pipe = scripted(form, special=special)
    with running(pipelines={"tiny": pipe}) as server:
        calls = [["weather", BATH], ["clock", BATH if TOOL_FORMATS[form].is_xml else ZURICH]]
        opening = "" if TOOL_FORMATS[form].is_bare else "I look.\n"
        pipe.script.text = opening + written(form, *calls)
        message, reason = whole_and_streamed(server, tools=[TOOL, CLOCK])
        assert [[one.function.name, one.function.arguments] for one in message.tool_calls] == calls
        assert (message.content, reason) == (opening.strip() or None, "tool_calls")
        assert len({one.id for one in message.tool_calls}) == 2

        results = [{"role": "tool", "tool_call_id": one.id, "content": "warm"} for one in message.tool_calls]
        talk = [*ASKED, message.model_dump(exclude_none=True), *results]
        pipe.script.text = "Yes, it is.\n"
        create = server.client.chat.completions.create
        answer = create(model="tiny", messages=talk, tools=[TOOL, CLOCK], max_tokens=40)
        assert answer.choices[0].message.content == pipe.script.text  # without calls, as it is
        assert answer.choices[0].finish_reason == "stop"
        read = [
            {**talk[0]},
            {"role": "assistant", "content": opening.strip(),
             "tool_calls": [{"id": one.id, "type": "function",
                             "function": {"name": name, "arguments": json.loads(arguments)}}
                            for one, (name, arguments) in zip(message.tool_calls, calls, strict=True)]},
            *({**one, "name": name} for one, (name, _) in zip(results, calls, strict=True)),
        ]  # fmt: skip
        clock = CLOCK["function"]
        tools = [  # the name of a special token is read as text, here seven signs; `strict` is not for models
            {"type": "function", "function": {**TOOL["function"], "description": "#" * 7}},
            {"type": "function", "function": {name: clock[name] for name in ("name", "parameters")}},
        ]
        text = pipe.tokenizer.apply_chat_template(
            read, tools=tools, tokenize=False, add_generation_prompt=True
        )
        assert answer.usage.prompt_tokens == len(pipe.tokenizer(text).input_ids)


def test_a_template_that_joins_arguments_gets_their_text():
    pipe = scripted("deepseek_v3", TEXTS)
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": ZURICH}}
    talk = [
        *ASKED,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "x"},
    ]
    with running(pipelines={"tiny": pipe}) as server:
        answer = server.client.chat.completions.create(model="tiny", messages=talk, max_tokens=1)
    talk[1]["content"], talk[2]["name"] = "", "weather"
    text = pipe.tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    assert f": {ZURICH}." in text
    assert answer.usage.prompt_tokens == len(pipe.tokenizer(text).input_ids)


@pytest.fixture(scope="module")
def hermes():
    pipe = scripted("hermes")
    with running(pipelines={"tiny": pipe}) as server:
        yield server


@contextlib.contextmanager
def saying(server, text):
    script = server.engines["tiny"].pipeline.script
    script.text = text
    yield
    script.text = None


def test_broken_and_unwanted_calls_are_content(hermes):
    broken = '<tool_call>\n{"name": "weather", "arguments": "Bath"}\n</tool_call> sorry'
    call = written("hermes", ["weather", BATH])
    for text, what in (
        (broken, {"tools": [TOOL]}),
        (call, {}),
        (call, {"tools": [TOOL], "tool_choice": "none"}),
    ):
        with saying(hermes, text):
            message, reason = whole_and_streamed(hermes, **what)
        hides = "tools" not in what or "tool_choice" in what  # the marks are special tokens
        expected = text.replace("<tool_call>", "").replace("</tool_call>", "") if hides else text
        assert (message.content, message.tool_calls, reason) == (expected, None, "stop")


def test_a_call_that_is_cut_ends_by_its_length(hermes):
    with saying(hermes, written("hermes", ["weather", BATH])):
        create = hermes.client.chat.completions.create
        answer = create(model="tiny", messages=ASKED, tools=[TOOL], max_tokens=30)
        assert answer.choices[0].finish_reason == "length" and answer.choices[0].message.tool_calls is None
        assert answer.choices[0].message.content.startswith('<tool_call>\n{"name": "weather"')


def test_one_call_alone_if_calls_are_not_parallel(hermes):
    with saying(hermes, written("hermes", ["weather", BATH], ["clock", ZURICH])):
        message, reason = whole_and_streamed(hermes, tools=[TOOL, CLOCK], parallel_tool_calls=False)
    assert [one.function.name for one in message.tool_calls] == ["weather"] and reason == "tool_calls"


def tokens_of(server, text):
    return len(server.engines["tiny"].pipeline.tokenizer(text).input_ids)


def test_reasoning_is_apart(hermes):
    with saying(hermes, "<think>\nWarm?\n</think>\n\nYes."):
        message, _ = whole_and_streamed(hermes)
        assert (message.content, message.reasoning_content, message.reasoning) == ("Yes.", "Warm?", "Warm?")
        message, _ = whole_and_streamed(hermes, extra_body={"include_reasoning": False})
        assert message.content == "Yes." and not hasattr(message, "reasoning_content")
        message, _ = whole_and_streamed(hermes, extra_body={"separate_reasoning": False})
        assert message.content == "<think>\nWarm?\n</think>\n\nYes."
        answer = hermes.client.chat.completions.create(
            model="tiny", messages=ASKED, max_tokens=9, extra_body={"chat_template_kwargs": {"opens": 1}}
        )
    assert answer.choices[0].message.content is None  # the script begins after the tag, within reasoning
    talk = [*ASKED, {"role": "assistant", "content": "Yes.", "reasoning_content": "Warm?"}, *ASKED]
    plain = [*ASKED, {"role": "assistant", "content": "Yes."}, *ASKED]
    counts = [
        hermes.client.chat.completions.create(model="tiny", messages=one, max_tokens=1).usage.prompt_tokens
        for one in (talk, plain)
    ]
    assert counts[0] - counts[1] == tokens_of(hermes, "<think>Warm?</think>")


def test_the_template_switches_reasoning(hermes):
    def prompt_tokens(**what):
        status, _, got = post(hermes, {"messages": ASKED, "max_tokens": 1, **what})
        assert status == 200, got
        return got["usage"]["prompt_tokens"]

    usual, off = prompt_tokens(), prompt_tokens(chat_template_kwargs={"enable_thinking": False})
    assert off - usual == tokens_of(hermes, "<think></think>")
    assert prompt_tokens(reasoning_effort="none") == off
    assert prompt_tokens(reasoning_effort="high") == usual
    both = {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}
    assert prompt_tokens(**both) == usual


def only_clock(mode: str) -> dict[str, Any]:
    """The tool choice that allows the clock alone."""
    named = {"type": "function", "function": {"name": "clock"}}
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named]}}


@pytest.mark.every(4)
@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "clock"}}, only_clock("required")]
)
@pytest.mark.parametrize("form", TOOL_FORMATS)
def test_a_call_can_be_forced(form, choice):
    """The calls are forced: a random model would not call anything."""
    pytest.importorskip("llguidance")
    pipe = scripted(form, reasoning=False)
    with running(pipelines={"tiny": pipe}) as server:
        what = {"tools": [TOOL, CLOCK], "tool_choice": choice, "parallel_tool_calls": False}
        message, reason = whole_and_streamed(server, **what, seed=1, temperature=1.0)
        (call,) = message.tool_calls
        assert (message.content, reason) == (None, "tool_calls")
        assert json.loads(call.function.arguments)["town"] in ("Bath", "Zürich")
        assert call.function.name == "clock" or (choice == "required" and call.function.name == "weather")
        with server.client.chat.completions.stream(
            model="tiny",
            messages=ASKED,
            tools=[STRICT],
            tool_choice=choice,
            max_tokens=200,
            temperature=0,
            parallel_tool_calls=False,
        ) as stream:
            (final,) = stream.get_final_completion().choices
        assert final.message.tool_calls[0].function.parsed_arguments["town"] in ("Bath", "Zürich")


def test_only_allowed_tools_are_called(hermes):
    """The script calls the weather, which the grammar excludes from the name on."""
    pytest.importorskip("llguidance")
    with saying(hermes, "Hm. " + written("hermes", ["weather", '{"town": "Bath"}'])):
        what = {"tools": [TOOL, CLOCK], "parallel_tool_calls": False, "temperature": 1.0, "seed": 1}
        free, _ = whole_and_streamed(hermes, **what)
        bound, _ = whole_and_streamed(hermes, **what, tool_choice=only_clock("auto"))
    assert [call.function.name for call in free.tool_calls] == ["weather"]
    assert [call.function.name for call in bound.tool_calls] == ["clock"]
    assert bound.content == free.content == "Hm."


def test_a_forced_call_follows_reasoning(hermes):
    """The script says something else after its reasoning, which the grammar excludes."""
    pytest.importorskip("llguidance")
    with saying(hermes, "<think>hm</think>Hello"):
        what = {"tools": [CLOCK], "tool_choice": "required", "parallel_tool_calls": False}
        message, reason = whole_and_streamed(hermes, **what, temperature=1.0, seed=1)
    assert (message.reasoning, message.content, reason) == ("hm", None, "tool_calls")
    assert [one.function.name for one in message.tool_calls] == ["clock"]


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("form", "special"),
    [*((form, True) for form in TOOL_FORMATS), ("hermes", False), ("qwen3_coder", False)],
)
def test_a_call_that_the_model_begins_is_held_to_a_strict_schema(form, special):
    """The script begins a call with a wrong town; the text before and after it stays as it is."""
    pytest.importorskip("llguidance")
    pipe = scripted(form, special=special, reasoning=False)
    known = TOOL_FORMATS[form]
    mark = "" if (known.prefix or known.start).startswith(known.marks[0]) else known.marks[0]
    free = "I look: {a} <b>.\n"
    with running(pipelines={"tiny": pipe}) as server:
        pipe.script.text = free + mark + written(form, ["clock", '{"town": "Rome"}'])
        loose, _ = whole_and_streamed(server, tools=[CLOCK])
        assert json.loads(loose.tool_calls[0].function.arguments) == {"town": "Rome"}
        strict, reason = whole_and_streamed(server, tools=[STRICT])
        (call,) = strict.tool_calls
        assert json.loads(call.function.arguments)["town"] in ("Bath", "Zürich")
        assert strict.content.startswith(free.strip()) and reason == "tool_calls"
        pipe.script.text = free + "No call."
        message, reason = whole_and_streamed(server, tools=[STRICT])
        assert (message.content, message.tool_calls, reason) == (pipe.script.text, None, "stop")
        pipe.script.text = free + mark + written(form, ["sun", '{"town": "Rome"}'])
        assert [one.function.name for one in whole_and_streamed(server, tools=[STRICT])[0].tool_calls] == [
            "clock"
        ]


def test_a_response_format_holds_for_answers_without_a_call():
    pytest.importorskip("llguidance")
    pipe = scripted("hermes", reasoning=False)
    number = {"type": "object", "properties": {"n": {"enum": [3, 5]}}, "required": ["n"],
              "additionalProperties": False}  # fmt: skip
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": number}}
    with running(pipelines={"tiny": pipe}) as server:
        what = {"tools": [TOOL], "response_format": form}
        pipe.script.text = "Hello"
        message, reason = whole_and_streamed(server, **what, temperature=1.0, seed=1)
        if message.tool_calls is None:
            assert json.loads(message.content)["n"] in (3, 5) and reason == "stop"
        pipe.script.text = '{"n": 5}'
        message, reason = whole_and_streamed(server, **what)
        assert (message.content, message.tool_calls, reason) == ('{"n": 5}', None, "stop")
        pipe.script.text = written("hermes", ["weather", BATH])
        message, reason = whole_and_streamed(server, **what)
        assert (message.content, reason) == (None, "tool_calls")
        assert message.tool_calls[0].function.arguments == BATH
        with pytest.raises(openai.BadRequestError, match="must be JSON of a schema") as error:
            server.client.chat.completions.create(
                model="tiny", messages=ASKED, tools=[TOOL], response_format={"type": "regex", "regex": "a"}
            )
        assert error.value.param == "response_format"


def test_tools_without_a_parser_are_refused_by_name():
    pipe = scripted("hermes", special=False)
    pipe.tokenizer.chat_template = OBJECTS
    assert answer_format(pipe).tools is None
    assert answer_format(pipe, "mistral").tools is TOOL_FORMATS["mistral"]
    with running(pipelines={"tiny": pipe}) as server:
        with pytest.raises(openai.BadRequestError, match="--tool-parser") as error:
            server.client.chat.completions.create(model="tiny", messages=ASKED, tools=[TOOL])
        assert error.value.param == "tools"
    pipe.tokenizer.chat_template += "{# <tool_call> #}"
    with (
        running(pipelines={"tiny": pipe}) as server,
        pytest.raises(openai.BadRequestError, match="names of variables|not read by"),
    ):
        server.client.chat.completions.create(
            model="tiny", messages=ASKED, extra_body={"chat_template_kwargs": {"documents": "a"}}
        )
