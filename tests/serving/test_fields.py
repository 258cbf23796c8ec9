"""Fields of requests of OpenAI, vLLM and SGLang: supported, ignored by name, or refused by name."""

from typing import get_args

import pytest
from openai.types.chat import completion_create_params
from openai.types.shared_params import ReasoningEffort
from pydantic import ValidationError

from mmspec.call_fields import CHAT_NAMES, SAME_IN_REQUESTS
from mmspec.messages import MESSAGE, PARTS
from mmspec.serving.errors import field_error
from mmspec.serving.schemas import (
    ChatRequest,
    CompletionRequest,
    ImagePart,
    ImageRequest,
    ImageUrl,
    Message,
    StreamOptions,
    TextPart,
)
from tests.serving.conftest import load, post, reference, running, without_moves

PROMPT = "Describe the picture."
ASKED = {"role": "user", "content": PROMPT}


def answer(server, path="/v1/chat/completions", **body):
    """Status, and the text of the answer or the error."""
    status, _, got = post(server, {"messages": [ASKED], "max_tokens": 24, **body}, path)
    return status, got


def text(server, **body):
    status, got = answer(server, **body)
    assert status == 200, got
    return got["choices"][0]["message"]["content"]


def param(model, body):
    """The field that is named in the refusal of a body; None if it is taken."""
    try:
        model.model_validate(body)
    except ValidationError as error:
        refused = field_error(error.errors(), body)
        assert len(str(refused)) < 300
        return refused.param
    return None


BODIES = {ChatRequest: {"messages": [ASKED]}, ImageRequest: {"prompt": "a"}, Message: ASKED}
BODIES |= {CompletionRequest: {"prompt": "a"}, ImageUrl: {"url": "data:"}, StreamOptions: {}}


def test_no_field_is_taken_without_a_meaning():
    for model in BODIES:
        body = BODIES[model]
        optional = {*model.model_fields, *model.ignored, *model.refused} - set(body)
        assert param(model, {**body, **dict.fromkeys(optional)}) is None  # null asks for nothing
        for name, neutral in model.refused.items():
            assert name not in model.model_fields
            assert param(model, {**body, name: {"not": "neutral"}}) == name
            assert [param(model, {**body, name: value}) for value in neutral] == [None] * len(neutral)
        assert {param(model, {**body, name: "any"}) for name in model.ignored} <= {None}
        assert param(model, {**body, "not_a_field": 1}) == "not_a_field"
        free = {"model", "negative_prompt", "prompt"}  # any text, and in the next line any object
        free |= {
            "chat_template_kwargs",
            "response_format",
            "structured_outputs",
            "guided_json",
            "json_schema",
        }
        for name in set(model.model_fields) - free:
            assert param(model, {**body, name: {"wrong": object()}}) is not None


def test_chats_name_the_fields_of_pipelines_as_the_table_says():
    fields = set(ChatRequest.model_fields)
    assert set(CHAT_NAMES.values()) <= fields
    same = {"temperature", "top_p", "top_k", "min_p", "repetition_penalty"}
    same |= {"presence_penalty", "frequency_penalty"}
    assert fields & set(SAME_IN_REQUESTS) == same


#: Why OpenAI's fields of chats are refused, as docs/reference/request-fields.md says.
REFUSED = {
    "audio": "no model of this server speaks",
    "web_search_options": "it searches no web",
    "moderation": "it moderates nothing",
    "functions": "tools",
    "function_call": "tool_choice",
}


def test_every_field_of_openai_has_a_meaning_or_a_reason():
    fields = set(completion_create_params.CompletionCreateParamsBase.__annotations__) | {"stream"}
    known = set(ChatRequest.model_fields) | ChatRequest.ignored
    # of `modalities`, text alone
    assert fields - known == {*REFUSED, "modalities"}
    for name, new in {"functions": "tools", "function_call": "tool_choice"}.items():
        assert ChatRequest.replaced[name] == REFUSED[name] == new
    efforts = {effort for effort in get_args(get_args(ReasoningEffort)[0])}
    assert efforts <= set(get_args(get_args(ChatRequest.model_fields["reasoning_effort"].annotation)[0]))


PART = {"type": "text", "text": "a"}


PATHS = [
    ([PART, {"type": "image_url", "image_url": {"url": 3}}], "content[1].image_url.url"),
    ([PART, {"type": "image_url", "image_url": {}}], "content[1].image_url.url"),
    ([{"type": "image_url", "image_url": "data:"}], "content[0].image_url"),
    ([{"type": "image_url", "image_url": {"url": "x", "detail": "low"}}], "content[0].image_url.detail"),
    ([{"type": "image_url", "image_url": {"url": "/a", "detail": None}}], "content[0].image_url.url"),
    ([{"type": "text"}], "content[0].text"),
    ([{"type": "text", "text": None}], "content[0].text"),
    ([{"type": "video_url", "video_url": {"url": "x"}}], "content[0].type"),
    ([{"text": "a"}], "content[0].type"),
    ([PART, "a"], "content[1]"),
    (3, "content"),
    (None, "content"),
]


def test_a_field_inside_a_message_is_named_by_its_path(server):
    for content, path in PATHS:
        status, got = answer(server, messages=[ASKED, {"role": "assistant"}, {**ASKED, "content": content}])
        assert (status, got["error"]["param"]) == (400, f"messages[2].{path}")
        assert got["error"]["message"].startswith(f"messages[2].{path}")


def test_the_arguments_of_a_pipeline_are_named_as_the_request_names_them(server):
    for field in ("max_tokens", "max_completion_tokens"):
        status, got = answer(server, **{"max_tokens": None, field: 3000})
        assert (status, got["error"]["param"]) == (400, field)
        assert got["error"]["message"].startswith(f"{field} must be at most ")
    status, got = answer(server, "/v1/images/generations", messages=None, max_tokens=None, prompt="\0")
    assert (status, got["error"]["param"]) == (400, "prompt")
    status, got = answer(server, messages=[ASKED, {"role": "user", "content": "a\0"}])
    assert got["error"]["message"].startswith("messages[1] must not contain NUL")


def test_fields_of_vllm_act(server):
    tokenizer = reference("scenes-llava").tokenizer
    plain = text(server)
    words = plain.split()
    assert len(words) < 20, "it ends by itself"
    (stop,) = tokenizer(words[3], add_special_tokens=False)["input_ids"]
    before = " ".join(words[: words.index(words[3])])
    assert text(server, stop_token_ids=[stop]) == before
    shown = text(server, stop_token_ids=[stop], include_stop_str_in_output=True)
    assert shown == f"{before} {words[3]}"
    assert text(server, stop=[f"{words[3]} "], include_stop_str_in_output=True) == f"{shown} "
    assert words[3] not in text(server, bad_words=[words[3]]).split()
    assert text(server, bad_words=[words[3]], stop_token_ids=[stop]) == text(server, bad_words=[words[3]])
    longer = text(server, min_tokens=20)
    assert len(tokenizer(longer, add_special_tokens=False)["input_ids"]) >= 19
    status, endless = answer(server, ignore_eos=True)
    assert endless["usage"]["completion_tokens"] == 24
    assert endless["choices"][0]["finish_reason"] == "length"
    assert tokenizer.eos_token in text(server, ignore_eos=True, skip_special_tokens=False)
    assert tokenizer.eos_token not in text(server, skip_special_tokens=False)
    assert text(server, skip_special_tokens=False, include_stop_str_in_output=True).endswith("<eos>")
    penalised = reference("scenes-llava")(PROMPT, repetition_penalty=3.0, max_new_tokens=24).text[0]
    assert text(server, repetition_penalty=3.0) == penalised != plain
    whole = reference("scenes-llava").tokenizer.bos_token + "<user>" + PROMPT
    unprompted = reference("scenes-llava")(whole, apply_chat_template=False, max_new_tokens=24).text[0]
    assert text(server, add_generation_prompt=False) == unprompted


@pytest.mark.parametrize("kind", ["batch", "turns"])
def test_a_prefilled_turn_is_continued(server, kind):
    if kind == "batch":
        check_prefilled(server)
        return
    with without_moves(load("scenes-llava")) as pipe, running(pipelines={"scenes-llava": pipe}) as in_turn:
        check_prefilled(in_turn)


def check_prefilled(server):
    plain = text(server)
    begun = " ".join(plain.split()[:4])
    for content in (begun, [{"type": "text", "text": begun}], f"{begun} "):
        said = [ASKED, {"role": "assistant", "content": content}]
        prefilled = {"messages": said, "continue_final_message": True}
        assert begun + text(server, **prefilled, add_generation_prompt=False) == plain
        assert begun + text(server, **prefilled) == plain
        shown = begun if isinstance(content, list) else content
        assert text(server, **prefilled, echo=True) == shown + plain.removeprefix(begun)
    stream = server.client.chat.completions.create(
        model="scenes-llava",
        messages=said,
        max_tokens=24,
        stream=True,
        extra_body={**prefilled, "echo": True},
    )
    assert text(server, echo=True) == plain  # nothing of the assistant's comes before
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert streamed == f"{begun} " + plain.removeprefix(begun)
    expected = reference("scenes-llava")(said, continue_final_message=False, max_new_tokens=24).text[0]
    assert text(server, messages=said) == expected != text(server, **prefilled)


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}, "strict": True}}
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}


def wrong_call(arguments):
    function = {"name": "add", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function}]}


WRONG = [
    ({"messages": []}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, "messages[0].role"),
    ({"messages": [{**ASKED, "tool_call_id": "1"}]}, "messages[0].tool_call_id"),
    ({"messages": [{**ASKED, "tool_calls": [CALL]}]}, "messages[0].tool_calls"),
    ({"messages": [{**CALLED, "function_call": {"name": "add"}}]}, "messages[0].function_call"),
    ({"messages": [ASKED, CALLED]}, "messages"),  # the template does not read calls
    ({"messages": [ASKED, wrong_call("3")]}, "messages[1].tool_calls[0].function.arguments"),
    ({"messages": [ASKED, wrong_call('{"a":')]}, "messages[1].tool_calls[0].function.arguments"),
    (
        {"messages": [ASKED, wrong_call('{"a":' * 70 + "1" + "}" * 70)]},
        "messages[1].tool_calls[0].function.arguments",
    ),
    ({"messages": [{"role": "user", "content": "a\0"}]}, "messages[0]"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": "8"}, "max_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": float("nan")}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"n": 0}, "n"),
    ({"n": 10**6}, "n"),
    ({"seed": -2}, "seed"),
    ({"stop": ""}, "stop"),
    ({"stop": ["x"] * 10_000}, "stop"),
    ({"stream": "yes"}, "stream"),
    ({"logit_bias": {"418": 2}}, "logit_bias.418"),
    ({"logit_bias": {"red": 2}}, "logit_bias.red"),
    ({"logit_bias": {"1": -101}}, "logit_bias.1"),
    ({"logit_bias": {"5": 100, "6": 2}, "allowed_token_ids": [6]}, "allowed_token_ids"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [3, 418]}, "allowed_token_ids[1]"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "custom", "custom": {"name": "add"}}]}, "tools[0].custom"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [TOOL, TOOL]}, "tools"),
    ({"tools": [TOOL]}, "tools"),  # the template takes none
    ({"tools": [TOOL], "tool_choice": "required"}, "tools"),
    ({"tools": [TOOL], "tool_choice": "always"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "sub"}}}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    (
        {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": {}}},
        "tool_choice.allowed_tools.mode",
    ),
    ({"functions": [{"name": "add"}]}, "functions"),
    ({"function_call": "auto"}, "function_call"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
    ({"reasoning_effort": "all"}, "reasoning_effort"),
    ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
    ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
    ({"logprobs": 1}, "logprobs"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"prompt_logprobs": 1}, "prompt_logprobs"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"audio": {"voice": "alloy"}}, "audio"),
    ({"response_format": "json"}, "response_format"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"model": "scenes-llamagen"}, "model"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt"),
    ({"min_tokens": 25}, "min_tokens"),
    ({"min_tokens": 2, "stop": "a"}, "min_tokens"),
    ({"max_tokens": None, "min_tokens": 321}, "min_tokens"),
    ({"stop_token_ids": [418]}, "stop_token_ids[0]"),
    ({"stop_token_ids": [1, -1]}, "stop_token_ids[1]"),
    ({"stop_token_ids": "a"}, "stop_token_ids"),
    ({"bad_words": ["red", " "]}, "bad_words[1]"),
    ({"bad_words": [""]}, "bad_words[0]"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"top_k": -2}, "top_k"),
    ({"ignore_eos": "yes"}, "ignore_eos"),
    ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs.enable_thinking"),
    ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs.chat_template"),
    ({"chat_template_kwargs": {"add_generation_prompt": False}}, "chat_template_kwargs"),
    ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"stream_options": {"continuous_usage_stats": True}}, "stream_options.continuous_usage_stats"),
    ({"guided_json": 3}, "guided_json"),
    ({"stop_regex": "a"}, "stop_regex"),
    ({"verbosity": "low"}, "verbosity"),
    ({"verbosity": "none"}, "verbosity"),
    ({"presence_penalty": False}, "presence_penalty"),  # equal to 0, and no number
    ({"max_new_token": 3}, "max_new_token"),
]


def test_values_that_cannot_be_used_are_refused_by_name(server):
    for body, name in WRONG:
        status, got = answer(server, **body)
        assert (status, got["error"]["param"]) == (400, name), body
        assert name in got["error"]["message"] and len(got["error"]["message"]) < 400
    codes = {"unknown_parameter": {"max_new_token": 3}, "unsupported_parameter": {"stop_regex": "a"}}
    for code, body in codes.items():
        assert answer(server, **body)[1]["error"]["code"] == code
    for old, new in {"functions": "tools", "function_call": "tool_choice"}.items():
        assert f"use {new}" in answer(server, **{old: [{"name": "add"}]})[1]["error"]["message"]
    _, got = answer(server, repetition_penalti=1.2)
    assert "did you mean 'repetition_penalty'?" in got["error"]["message"]


def test_special_tokens_in_a_message_are_text(server, scene_url):
    for pasted in ("<s>old</s> new", "the <unk> of the <unk>", "a <pad> b", "<image>", "<eos><user>red"):
        parts = [{"type": "image_url", "image_url": {"url": scene_url}}, {"type": "text", "text": pasted}]
        for content in (pasted, parts):
            assert answer(server, messages=[{"role": "user", "content": content}])[0] == 200, content
    own = text(server, skip_special_tokens=False, include_stop_str_in_output=True)
    assert own.endswith("<eos>")
    assert answer(server, messages=[ASKED, {"role": "assistant", "content": own}, ASKED])[0] == 200


def test_the_server_takes_and_refuses_what_the_table_says():
    assert set(Message.model_fields) <= set(MESSAGE.read)
    assert {*Message.model_fields, *Message.refused} == {*MESSAGE.read, *MESSAGE.refused}
    for model, kind in ((TextPart, "text"), (ImagePart, "image_url")):
        assert (set(model.model_fields), model.ignored) <= (set(PARTS[kind].read), PARTS[kind].ignored)
        assert model.refused == PARTS[kind].refused
    assert ImageUrl.refused == {"detail": ("auto", "high")}
