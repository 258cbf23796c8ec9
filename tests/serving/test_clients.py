"""Flows of real clients about an image: `openai`, `langchain-openai`, `litellm` and `instructor`.

All but `openai` are in the dependency group `clients`, which .ci/run installs into a folder of its own.
"""

from __future__ import annotations

import asyncio
import os
import socket
from typing import Literal

import openai
import pytest
from pydantic import BaseModel, Field

from tests.serving.byte_llava import byte_llava
from tests.serving.conftest import PATIENCE, reference, running

PROMPT = "Describe the picture."
NEW = 60
MODEL = "scenes-llava"
LOCAL = {"127.0.0.1", "localhost", "::1"}


@pytest.fixture(autouse=True)
def only_this_machine(monkeypatch):
    """Refuse other hosts, whose names some of these clients look up for prices and tracing."""
    monkeypatch.setitem(os.environ, "LITELLM_LOCAL_MODEL_COST_MAP", "True")  # read by `import litellm`
    monkeypatch.setitem(os.environ, "LANGSMITH_TRACING", "false")
    look_up, elsewhere = socket.getaddrinfo, []

    def within(host, *arguments, **keywords):
        if host not in LOCAL:
            elsewhere.append(host)
            raise OSError(f"host must be this machine; got {host!r}")
        return look_up(host, *arguments, **keywords)

    monkeypatch.setattr(socket, "getaddrinfo", within)
    yield
    assert elsewhere == []


@pytest.fixture(scope="module")
def expected(scene) -> str:
    return reference(MODEL)(PROMPT, images=scene, max_new_tokens=NEW).text[0]


class Shape(BaseModel):
    """Description of an image, as a schema."""

    shape: Literal["ring", "cube", "star"]
    colours: list[Literal["red", "blue"]] = Field(min_length=2, max_length=3)
    count: Literal[1, 2, 3]


@pytest.fixture(scope="module")
def writer():
    """A server of a model that writes JSON, with random weights."""
    with running(pipelines={"byte": byte_llava()}) as one:
        yield one


@pytest.fixture(scope="module")
def shape(scene) -> Shape:
    """The answer of plain decoding under the schema."""
    parts = [{"type": "image", "image": scene}, {"type": "text", "text": PROMPT}]
    message = {"role": "user", "content": parts}
    answer = byte_llava("none")([message], response_format=Shape, max_new_tokens=200)
    return Shape.model_validate_json(answer.text[0])


def about(url: str) -> list[dict]:
    """A conversation about an image."""
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": PROMPT}]
    return [{"role": "user", "content": parts}]


async def everything(stream) -> list:
    return [one async for one in stream]


def test_openai(server, scene_url, expected):
    asked = {"model": MODEL, "messages": about(scene_url), "max_tokens": NEW}
    create = server.client.chat.completions.create
    assert create(**asked).choices[0].message.content == expected
    with create(**asked, stream=True) as stream:
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == expected
    raw = server.client.chat.completions.with_raw_response.create(
        **asked, extra_headers={"X-Request-ID": "a-1"}
    )
    assert raw.headers["x-request-id"] == "a-1" and raw.parse().choices[0].message.content == expected
    assert [model.id for model in server.client.models.list()] == list(server.engines)


def test_openai_asynchronous(server, scene_url, expected):
    asked = {"model": MODEL, "messages": about(scene_url), "max_tokens": NEW}

    async def flow() -> tuple[str, str]:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", timeout=PATIENCE
        ) as client:
            whole = client.chat.completions.create(**asked)
            stream = await client.chat.completions.create(**asked, stream=True)
            chunks = everything(stream)
            one, several = await asyncio.gather(whole, chunks)  # both at once
            text = "".join(chunk.choices[0].delta.content or "" for chunk in several)
            return one.choices[0].message.content, text

    assert asyncio.run(flow()) == (expected, expected)


def test_openai_streamed_events(server, scene_url, expected):
    """The helper of the client that collects a stream again."""
    asked = {"model": MODEL, "messages": about(scene_url), "max_tokens": NEW}
    with server.client.chat.completions.stream(**asked, stream_options={"include_usage": True}) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert final.choices[0].message.content == expected
    assert final.usage.completion_tokens > 0


def test_langchain(server, scene_url, expected):
    langchain_openai = pytest.importorskip("langchain_openai")
    model = langchain_openai.ChatOpenAI(
        base_url=f"{server.url}/v1",
        api_key="none",
        model=MODEL,
        temperature=0,
        max_tokens=NEW,
        timeout=PATIENCE,
    )
    messages = about(scene_url)
    answer = model.invoke(messages)
    assert answer.content == expected
    assert answer.usage_metadata["output_tokens"] > 0
    assert answer.response_metadata["finish_reason"] == "stop"
    chunks = list(model.stream(messages))
    assert "".join(chunk.content for chunk in chunks) == expected and len(chunks) > 3
    assert asyncio.run(model.ainvoke(messages)).content == expected
    assert [one.content for one in model.batch([messages, messages])] == [expected] * 2


def test_litellm(server, scene_url, expected):
    litellm = pytest.importorskip("litellm")
    asked = {
        "model": f"openai/{MODEL}",
        "api_base": f"{server.url}/v1",
        "api_key": "none",
        "messages": about(scene_url),
        "max_tokens": NEW,
        "timeout": PATIENCE,
        "num_retries": 0,
    }
    answer = litellm.completion(**asked)
    assert answer.choices[0].message.content == expected
    assert answer.usage.completion_tokens > 0
    stream = litellm.completion(**asked, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == expected

    async def flow() -> str:
        return (await litellm.acompletion(**asked)).choices[0].message.content

    assert asyncio.run(flow()) == expected
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(**asked, temperature=3)


def test_schema_by_openai(writer, scene_url, shape):
    asked = {"model": "byte", "messages": about(scene_url), "max_tokens": 200, "response_format": Shape}
    completions = writer.client.chat.completions
    assert completions.parse(**asked).choices[0].message.parsed == shape
    with completions.stream(**asked) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == shape

    async def flow() -> Shape:
        async with openai.AsyncOpenAI(base_url=f"{writer.url}/v1", api_key="none") as client:
            return (await client.chat.completions.parse(**asked)).choices[0].message.parsed

    assert asyncio.run(flow()) == shape


def test_schema_by_langchain(writer, scene_url, shape):
    langchain_openai = pytest.importorskip("langchain_openai")
    model = langchain_openai.ChatOpenAI(
        base_url=f"{writer.url}/v1", api_key="none", model="byte", temperature=0, max_tokens=200
    )
    parsing = model.with_structured_output(Shape, method="json_schema")
    assert parsing.invoke(about(scene_url)) == shape
    assert list(parsing.stream(about(scene_url)))[-1] == shape


def test_schema_by_litellm(writer, scene_url, shape):
    litellm = pytest.importorskip("litellm")
    answer = litellm.completion(
        model="openai/byte",
        api_base=f"{writer.url}/v1",
        api_key="none",
        messages=about(scene_url),
        max_tokens=200,
        response_format=Shape,
    )
    assert Shape.model_validate_json(answer.choices[0].message.content) == shape


def test_schema_by_instructor(writer, scene_url):
    """It adds instructions to the messages, so that its answer is another one than `shape`."""
    instructor = pytest.importorskip("instructor")
    own = openai.OpenAI(base_url=f"{writer.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE)
    client = instructor.from_openai(own, mode=instructor.Mode.JSON_SCHEMA)
    asked = {"model": "byte", "messages": about(scene_url), "max_tokens": 200, "response_model": Shape}
    answer = client.chat.completions.create(**asked, max_retries=0)
    said = answer._raw_response.choices[0].message.content
    assert answer.model_dump() == Shape.model_validate_json(said).model_dump()
    parts = list(client.chat.completions.create_partial(**asked, max_retries=0))
    assert parts[-1].model_dump() == answer.model_dump()
