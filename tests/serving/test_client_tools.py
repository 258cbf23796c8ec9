"""Calls of tools by real clients, about an image; the model is forced to call, as its weights are random."""

from __future__ import annotations

import asyncio
import json
from typing import Literal

import openai
import pytest
from pydantic import BaseModel

from tests.serving.conftest import PATIENCE
from tests.serving.test_clients import Shape, about, only_this_machine, writer  # noqa: F401

NEW = 200


class Paint(BaseModel):
    """Paint the shape in an image."""

    colour: Literal["red", "blue"]
    layers: Literal[1, 2, 3]


TOOL = {
    "type": "function",
    "function": {"name": "Paint", "description": Paint.__doc__, "parameters": Paint.model_json_schema()},
}


def test_openai(writer, scene_url):  # noqa: F811
    """A call, whole and streamed; then the second turn, with the result of the tool."""
    create = writer.client.chat.completions.create
    asked = {"model": "byte", "messages": about(scene_url), "max_tokens": NEW}
    asked |= {"tools": [TOOL], "parallel_tool_calls": False}
    answer = create(**asked, tool_choice="required").choices[0]
    (call,) = answer.message.tool_calls
    assert answer.finish_reason == "tool_calls" and call.function.name == "Paint"
    paint = Paint.model_validate_json(call.function.arguments)
    with writer.client.chat.completions.stream(**asked, tool_choice="required") as stream:
        (streamed,) = stream.get_final_completion().choices[0].message.tool_calls
    assert Paint.model_validate_json(streamed.function.arguments) == paint
    result = {"role": "tool", "tool_call_id": call.id, "content": "done"}
    turns = [*about(scene_url), answer.message.model_dump(exclude_none=True), result]
    last = create(**{**asked, "messages": turns, "max_tokens": 8}, tool_choice="none").choices[0]
    assert last.message.content and not last.message.tool_calls

    async def flow() -> str:
        async with openai.AsyncOpenAI(base_url=f"{writer.url}/v1", api_key="none") as client:
            whole = await client.chat.completions.create(**asked, tool_choice="required")
            return whole.choices[0].message.tool_calls[0].function.arguments

    assert Paint.model_validate_json(asyncio.run(flow())) == paint


def test_langchain(writer, scene_url):  # noqa: F811
    langchain_openai = pytest.importorskip("langchain_openai")
    model = langchain_openai.ChatOpenAI(
        base_url=f"{writer.url}/v1", api_key="none", model="byte", temperature=0, max_tokens=NEW
    )
    bound = model.bind_tools([Paint], tool_choice="required", parallel_tool_calls=False)
    (call,) = bound.invoke(about(scene_url)).tool_calls
    assert call["name"] == "Paint"
    paint = Paint.model_validate(call["args"])
    whole = None
    for chunk in bound.stream(about(scene_url)):
        whole = chunk if whole is None else whole + chunk
    assert [each["args"] for each in whole.tool_calls] == [paint.model_dump()]


def test_litellm(writer, scene_url):  # noqa: F811
    litellm = pytest.importorskip("litellm")
    asked = {
        "model": "openai/byte",
        "api_base": f"{writer.url}/v1",
        "api_key": "none",
        "messages": about(scene_url),
        "max_tokens": NEW,
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "Paint"}},
    }
    (call,) = litellm.completion(**asked).choices[0].message.tool_calls
    paint = Paint.model_validate_json(call.function.arguments)
    parts = [chunk.choices[0].delta.tool_calls or [] for chunk in litellm.completion(**asked, stream=True)]
    streamed = "".join(each.function.arguments or "" for part in parts for each in part)
    assert json.loads(streamed) == paint.model_dump()


def test_instructor(writer, scene_url):  # noqa: F811
    instructor = pytest.importorskip("instructor")
    own = openai.OpenAI(base_url=f"{writer.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE)
    client = instructor.from_openai(own, mode=instructor.Mode.TOOLS)
    asked = {"model": "byte", "messages": about(scene_url), "max_tokens": NEW, "max_retries": 0}
    answer = client.chat.completions.create(**asked, response_model=Shape)
    (call,) = answer._raw_response.choices[0].message.tool_calls
    assert answer.model_dump() == Shape.model_validate_json(call.function.arguments).model_dump()
