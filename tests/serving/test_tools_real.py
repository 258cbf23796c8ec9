"""SmolLM2-135M-Instruct with a chat template of Hermes' format: forced calls, and words after a result."""

import json

import pytest

from mmspec.pipelines import MMSpecPipeline
from tests.serving.conftest import running

pytestmark = pytest.mark.real

TEMPLATE = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if loop.first and tools %}Call a tool with <tool_call>{"name": ..., "arguments": ...}</tool_call>.
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}{% endif %}{{ m.content }}{% for call in m.tool_calls %}<tool_call>
{{ call.function | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "days": {"type": "integer", "maximum": 14}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "forecast", "description": "Weather.", "parameters": SCHEMA}}
ASKED = [{"role": "user", "content": "What will the weather be in Paris for 3 days?"}]


@pytest.fixture(scope="module")
def pipe(smollm2_file):
    pytest.importorskip("llguidance")
    return MMSpecPipeline.from_pretrained(smollm2_file, accelerator="copy")


def test_a_model_without_tools_in_its_template_refuses_them(pipe):
    with running(pipelines={"smollm2": pipe}) as server, pytest.raises(Exception, match="takes no tools"):
        server.client.chat.completions.create(model="smollm2", messages=ASKED, tools=[TOOL])


@pytest.mark.slow
def test_a_forced_call_follows_the_schema_and_its_result_is_read(pipe, monkeypatch):
    monkeypatch.setattr(pipe.processor, "chat_template", TEMPLATE)
    with running(pipelines={"smollm2": pipe}) as server:
        create = server.client.chat.completions.create
        what = {"model": "smollm2", "messages": ASKED, "tools": [TOOL], "temperature": 0, "max_tokens": 64}
        forced = {**what, "tool_choice": "required", "parallel_tool_calls": False}
        answer = create(**forced)
        (call,) = answer.choices[0].message.tool_calls
        arguments = json.loads(call.function.arguments)
        assert call.function.name == "forecast" and "Paris" in arguments["city"] and arguments["days"] <= 14
        assert answer.choices[0].finish_reason == "tool_calls"
        chunks = [chunk.choices[0] for chunk in create(**forced, stream=True)]
        pieces = [call.function.arguments for one in chunks for call in one.delta.tool_calls or []]
        assert "".join(pieces) == call.function.arguments and len(pieces) > 3
        assert chunks[-1].finish_reason == "tool_calls"

        talk = [*ASKED, answer.choices[0].message.model_dump(exclude_none=True)]
        talk.append({"role": "tool", "tool_call_id": call.id, "content": "Rain on all days."})
        said = create(**{**what, "messages": talk, "tool_choice": "none"}).choices[0]
        function = {"name": "forecast", "arguments": arguments}
    talk[1] = {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}
    expected = pipe(talk, max_new_tokens=64, temperature=0.0, continue_final_message=False).text[0]
    assert said.message.content == expected and "rain" in expected.lower()
