"""Answers of a format, compared with those of the pipeline; OpenAI's client parses them."""

import json
import sys
from typing import Literal

import pytest
from pydantic import BaseModel

from mmspec.pipelines import VisionLanguagePipeline
from tests.pipelines.byte_level import byte_level_tokenizer
from tests.serving.conftest import post, running
from tests.tiny_models import tiny_llama

pytest.importorskip("llguidance")

PROMPT = "there the re"
MESSAGES = [{"role": "user", "content": PROMPT}]


class Answer(BaseModel):
    there: Literal["the", "then", "no"]
    sure: bool


SCHEMA = Answer.model_json_schema()


def tiny() -> VisionLanguagePipeline:
    model = tiny_llama(vocab=300).double()
    model.generation_config.eos_token_id = 0
    return VisionLanguagePipeline(model, byte_level_tokenizer(), "copy")


@pytest.fixture(scope="module")
def server():
    with running(pipelines={"scenes-llava": tiny()}, rows=4) as one:
        yield one


def test_an_answer_is_parsed_and_streamed(server):
    what = {"model": "scenes-llava", "messages": MESSAGES, "max_tokens": 60, "temperature": 1.3, "seed": 2}
    parsed = server.client.chat.completions.parse(**what, n=3, response_format=Answer)
    texts = [choice.message.content for choice in parsed.choices]
    assert [choice.message.parsed for choice in parsed.choices] == [*map(Answer.model_validate_json, texts)]
    strict = {"type": "json_schema", "json_schema": {"schema": {**SCHEMA, "additionalProperties": False}}}
    expected = [
        tiny()(MESSAGES, max_new_tokens=60, temperature=1.3, top_k=0, seed=seed, response_format=strict)
        for seed in (2, 3, 4)
    ]
    assert texts == [output.text[0] for output in expected]
    with server.client.chat.completions.stream(**what, response_format=Answer) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == Answer.model_validate_json(texts[0])


@pytest.mark.parametrize(
    "outputs",
    [
        {"choice": ["the red star", "a"]},
        {"regex": "(red|there)[0-9]{3}"},
        {"json": SCHEMA},
        {"json_object": True},
    ],
)
def test_the_formats_of_vllm_act_in_both_routes(server, outputs):
    extra = {"extra_body": {"structured_outputs": outputs}, "max_tokens": 40}
    chat = server.chat(PROMPT, **extra).choices[0].message.content
    assert chat == tiny()(MESSAGES, max_new_tokens=40, response_format=outputs).text[0]
    completion = server.client.completions.create(model="scenes-llava", prompt=PROMPT, **extra)
    assert completion.choices[0].text == chat  # the template of this model adds nothing
    assert server.chat(PROMPT, max_tokens=40).choices[0].message.content != chat


@pytest.mark.parametrize(
    ("field", "value", "same"),
    [
        ("guided_json", SCHEMA, {"json": SCHEMA}),
        ("guided_regex", "(red|there)[0-9]{3}", {"regex": "(red|there)[0-9]{3}"}),
        ("guided_choice", ["the red star", "a"], {"choice": ["the red star", "a"]}),
        ("guided_grammar", 'root ::= "the" "re"', {"grammar": 'root ::= "the" "re"'}),
        ("json_schema", json.dumps(SCHEMA), {"json": SCHEMA}),
        ("regex", "the[0-9]{3}", {"regex": "the[0-9]{3}"}),
        ("ebnf", 'root ::= "the" "re"', {"grammar": 'root ::= "the" "re"'}),
    ],
)
def test_older_spellings_mean_the_same(server, field, value, same):
    said = [
        server.chat(PROMPT, max_tokens=40, extra_body=body).choices[0].message.content
        for body in ({field: value}, {"structured_outputs": same}, {})
    ]
    assert said[0] == said[1] != said[2]


def test_the_tokenizer_of_grammars_is_built_before_the_first_request(monkeypatch):
    import llguidance.hf

    built, build = [], llguidance.hf.from_tokenizer
    monkeypatch.setattr(
        llguidance.hf, "from_tokenizer", lambda *args, **how: built.append(1) or build(*args, **how)
    )
    with running(pipelines={"tiny": tiny()}) as one:
        assert built == [1]
        body = {"messages": MESSAGES, "max_tokens": 4, "response_format": {"type": "json_object"}}
        assert post(one, body)[0] == 200
    assert built == [1]


WRONG = [
    ({"response_format": {"type": "yaml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
        "response_format.json_schema",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 3}}}},
        "response_format",
    ),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
    ({"structured_outputs": {}}, "structured_outputs"),
    (
        {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
        "structured_outputs",
    ),
    ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
    ({"response_format": "json"}, "response_format"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_json": "{"}, "guided_json"),
    ({"regex": "("}, "regex"),
    ({"regex": "a", "guided_json": SCHEMA}, "regex"),
    ({"response_format": {"type": "text"}, "guided_choice": []}, "guided_choice"),
]


def test_formats_that_cannot_be_used_are_refused_by_name(server, monkeypatch):
    for body, name in WRONG:
        status, _, got = post(server, {"messages": MESSAGES, **body})
        assert (status, got["error"]["param"]) == (400, name), (body, got)
        assert len(got["error"]["message"]) < 500
    free = {"messages": MESSAGES, "max_tokens": 4, "response_format": {"type": "text"}}
    assert post(server, free)[0] == 200
    monkeypatch.setitem(sys.modules, "llguidance", None)
    monkeypatch.setitem(sys.modules, "llguidance.hf", None)
    status, _, got = post(server, {**free, "response_format": {"type": "json_object"}})
    assert status == 400 and "pip install -e '.[grammar]'" in got["error"]["message"]
