"""Tools and reasoning of chat requests: what the chat template takes, and how answers are parsed."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

from jinja2 import TemplateError

from mmspec.errors import InputError, how_to_install
from mmspec.open_types import Json
from mmspec.pipelines.prompts import template_variables
from mmspec.registry import did_you_mean
from mmspec.serving.parsing.answer import AnswerText
from mmspec.serving.parsing.reasoning import (
    REASONING_FORMATS,
    ReasoningFormat,
    ReasoningParser,
    find_reasoning_format,
)
from mmspec.serving.parsing.tool_calls import ToolParser
from mmspec.serving.parsing.tool_formats import TOOL_FORMATS, ToolFormat, find_tool_format
from mmspec.serving.parsing.tool_grammar import call_grammar, strict_grammar
from mmspec.serving.schemas import Call, ChatRequest, Message, NamedTool, TextPart, Tool
from mmspec.validation import given_of

__all__ = ["AnswerFormat", "ToolRules", "answer_format", "check_parsers", "hidden_tokens"]

AUTO = "auto"
NO_PARAMETERS = {"properties": {}, "additionalProperties": False}
#: Variables by which chat templates switch reasoning, the most usual one first.
SWITCHES = ("enable_thinking", "thinking")
EFFORT = "reasoning_effort"
#: A template that joins the arguments of a call to text, instead of writing an object as JSON.
JOINS_ARGUMENTS = re.compile(r"\+\s*[\w.\[\]'\"]*\barguments['\"]?\]?\s*\+")


@dataclass(frozen=True)
class AnswerFormat:
    """Variables that the chat template of a model takes, and the formats of its answers.

    Attributes:
        template: the template; "" if there is none.
        variables: variables that the template reads.
        tools, reasoning: formats; None if the model has none that is known.
    """

    template: str = ""
    variables: frozenset[str] = frozenset()
    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None

    @property
    def switch(self) -> str | None:
        """The variable of the template that switches reasoning; None if there is none."""
        return next((name for name in SWITCHES if name in self.variables), None)


def check_parsers(tool_parser: str, reasoning_parser: str) -> None:
    """Raise InputError for a name that is neither a parser, "auto" nor "none"."""
    for option, given, formats in (
        ("--tool-parser", tool_parser, list(TOOL_FORMATS)),
        ("--reasoning-parser", reasoning_parser, list(REASONING_FORMATS)),
    ):
        if given not in (known := [AUTO, "none", *formats]):
            raise InputError(option, given, did_you_mean(given, known))


def answer_format(pipe: Any, tool_parser: str = AUTO, reasoning_parser: str = AUTO) -> AnswerFormat:
    """Return the formats of a pipeline, from its chat template and tokenizer or by name.

    Raises:
        InputError: there is no parser of that name.
    """
    check_parsers(tool_parser, reasoning_parser)
    given = getattr(pipe.processor, "chat_template", None)
    if given is None:
        return AnswerFormat()
    template = "\n".join(given.values()) if isinstance(given, dict) else str(given)
    tokens = pipe.tokenizer.get_added_vocab()
    variables = frozenset(template_variables(pipe.processor))
    if tool_parser == AUTO:
        tool_parser = find_tool_format(template, tokens) or "none"
    if reasoning_parser == AUTO:
        reasoning_parser = find_reasoning_format(template, tokens) or "none"
    return AnswerFormat(
        template, variables, TOOL_FORMATS.get(tool_parser), REASONING_FORMATS.get(reasoning_parser)
    )


class ToolRules:
    """The fields of a request about tools and reasoning, for one model.

    Attributes:
        variables: variables of the chat template.

    Raises:
        InputError: the model or this server cannot do what a field says.
    """

    def __init__(self, body: ChatRequest, form: AnswerFormat, pipe: Any) -> None:
        self.body, self.form, self._pipe = body, form, pipe
        #: names of called tools by id; some templates need the name in the message of the result
        self._called = {call.id: call.function.name for one in body.messages for call in one.tool_calls}
        self._check_tools()
        if "tools" in body.chat_template_kwargs:
            rule = "must not contain tools, which is a field of the request"
            raise InputError("chat_template_kwargs", body.chat_template_kwargs, rule)
        self.variables = {**self._effort(), **self._verbosity(), **body.chat_template_kwargs}
        if self.tools:
            self.variables["tools"] = [template_tool(tool) for tool in self.tools]

    @property
    def tools(self) -> list[Tool]:
        """Tools that the model may call."""
        return [] if self.body.tool_choice == "none" else self.body.tools

    @property
    def tokens(self) -> frozenset[str]:
        """Special tokens that have to reach the parsers."""
        tools = self.form.tools if self.tools else None
        reasoning = self.form.reasoning if self.body.separate_reasoning else None
        found = set() if tools is None else set(tools.tokens)
        return frozenset(found if reasoning is None else found | {reasoning.start, reasoning.end})

    def settings(self, content: Json | None = None) -> dict[str, Any]:
        """Return the settings of the pipeline: the grammar of the answer, if calls are bound to one.

        That is so if the answer has to call a tool or may only call some, if content has a format, or if a
        tool is strict.

        Args:
            content: the format of an answer without a call; None for any text.

        Raises:
            InputError: calls cannot be combined with this format.
        """
        is_strict = any(tool.function.strict for tool in self.tools) and find_spec("llguidance") is not None
        if self.form.tools is None or not self.tools:
            return {}
        names = self.body.chosen_tools
        if not (self.body.must_call or names or is_strict or content is not None):
            return {}
        is_held = self.body.must_call or content is not None
        schemas = {
            tool.function.name: (tool.function.parameters or NO_PARAMETERS)
            if is_held or tool.function.strict
            else {"type": "object"}
            for tool in self.tools
            if not names or tool.function.name in names
        }
        is_parallel = self.body.parallel_tool_calls and not isinstance(self.body.tool_choice, NamedTool)
        tokens = self._pipe.tokenizer.get_added_vocab()
        if is_held:
            grammar = call_grammar(
                self.form.tools,
                schemas,
                tokens,
                is_parallel=is_parallel,
                content=None if content is None or self.body.must_call else schema_of(content),
                reasoning=self.form.reasoning,
                is_open=self._is_open(self.form.reasoning),
            )
        else:
            grammar = strict_grammar(self.form.tools, schemas, tokens, is_parallel)
        return {"response_format": {"type": "grammar", "grammar": grammar}}

    def message_keys(self, message: Message) -> Json:
        """Return the keys of a message beside its content, as chat templates read them."""
        keys = given_of(name=message.name or self._called.get(message.tool_call_id or ""))
        keys |= given_of(tool_call_id=message.tool_call_id)
        if message.tool_calls:
            as_text = bool(JOINS_ARGUMENTS.search(self.form.template))
            keys["tool_calls"] = [template_call(call, as_text) for call in message.tool_calls]
        thought = message.reasoning_content or message.reasoning
        return keys | ({"reasoning_content": thought, "reasoning": thought} if thought else {})

    def answer_texts(self) -> list[AnswerText]:
        """Return a reader for each choice of the answer."""
        reasoning = self.form.reasoning if self.body.separate_reasoning else None
        is_open = self._is_open(reasoning)
        names = self.body.chosen_tools
        schemas = {
            tool.function.name: tool.function.parameters or {}
            for tool in self.tools
            if not names or tool.function.name in names
        }
        return [
            AnswerText(
                None if reasoning is None else ReasoningParser(reasoning, is_open),
                ToolParser(self.form.tools, schemas) if schemas and self.form.tools else None,
                shows_reasoning=self.body.include_reasoning,
                is_parallel=self.body.parallel_tool_calls,
                id_length=None if self.form.tools is None else self.form.tools.id_length,
            )
            for _ in range(self.body.n)
        ]

    def _is_open(self, reasoning: ReasoningFormat | None) -> bool:
        """Whether the answer begins within reasoning."""
        return reasoning is not None and reasoning.is_open(self._text_before())

    def _text_before(self) -> str:
        """Return the text that the answer continues: the last message, or what begins a turn."""
        if self.body.continue_final_message:
            content = self.body.messages[-1].content
            parts = [TextPart(type="text", text=content)] if isinstance(content, str) else content
            return "".join(part.text for part in parts if isinstance(part, TextPart))
        if self.body.add_generation_prompt is False:
            return ""
        known = self.form.variables - {"tools", "add_generation_prompt"}
        how = {name: value for name, value in self.variables.items() if name in known}
        processor = self._pipe.processor
        asked = "a" if processor is self._pipe.tokenizer else [{"type": "text", "text": "a"}]
        talk = [{"role": "user", "content": asked}]
        template = partial(processor.apply_chat_template, talk, tokenize=False, **how)
        try:
            before, whole = template(add_generation_prompt=False), template(add_generation_prompt=True)
        except (TemplateError, TypeError, ValueError):  # the request is refused when its own prompt is made
            return ""
        return str(whole).removeprefix(str(before))

    def _check_tools(self) -> None:
        names = [tool.function.name for tool in self.body.tools]
        if self.tools and "tools" not in self.form.variables:
            rule = "must be left out; the chat template of this model takes no tools"
            raise InputError("tools", names, rule)
        if self.tools and self.form.tools is None:
            rule = "must be left out; this server has no parser for the calls of this model (--tool-parser)"
            raise InputError("tools", names, rule)
        if (self.body.must_call or self.body.chosen_tools) and find_spec("llguidance") is None:
            rule = f"must be 'auto' or 'none'; other choices need llguidance: {how_to_install('grammar')}"
            raise InputError("tool_choice", self.body.tool_choice, rule)
        for index, message in enumerate(self.body.messages):
            if message.role == "tool" and "tool" not in self.form.template:
                rule = "must not be tool; the chat template of this model takes no tools"
                raise InputError(f"messages[{index}]['role']", "tool", rule)

    def _effort(self) -> dict[str, Any]:
        """Return the variable of the template for `reasoning_effort`."""
        effort, switch = self.body.reasoning_effort, self.form.switch
        if effort is None:
            return {}
        if effort == "none" and switch is not None:
            return {switch: False}
        if EFFORT in self.form.variables:
            return {EFFORT: effort}
        if switch is not None:
            return {switch: True}
        if effort == "none" and self.form.reasoning is None:
            return {}
        rule = "must be left out; the chat template of this model cannot switch reasoning"
        raise InputError(EFFORT, effort, rule)

    def _verbosity(self) -> dict[str, Any]:
        """Return the variable of the template for `verbosity`; "medium" is the default of every model."""
        given = self.body.verbosity
        if given is None or (given == "medium" and "verbosity" not in self.form.variables):
            return {}
        if "verbosity" not in self.form.variables:
            rule = "must be left out, or medium; the chat template of this model does not read it"
            raise InputError("verbosity", given, rule)
        return {"verbosity": given}


def schema_of(response_format: Json) -> Json:
    """Return the JSON schema of a format, which holds for answers that call no tool.

    Raises:
        InputError: the format is not JSON.
    """
    if response_format.get("type") == "json_object" or response_format.get("json_object") is True:
        return {"type": "object"}
    found = response_format.get("json_schema", response_format.get("json"))
    found = found.get("schema", found) if isinstance(found, dict) else found
    if isinstance(found, dict):
        return found
    rule = "must be JSON of a schema, given as an object, if tools may be called instead"
    raise InputError("response_format", response_format, rule)


def hidden_tokens(tokenizer: Any, shown: Collection[str]) -> list[int] | None:
    """Return the special tokens that are not in `shown`; None if `shown` holds no special token."""
    added = {token: str(one) for token, one in tokenizer.added_tokens_decoder.items() if one.special}
    special = added | dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
    if not any(text in shown for text in special.values()):
        return None
    return [token for token, text in special.items() if text not in shown]


def template_tool(tool: Tool) -> Json:
    """Return a tool as chat templates read it, without fields that are not given."""
    function = tool.function.model_dump(exclude_none=True, exclude={"strict"})
    return {"type": "function", "function": function}


def template_call(call: Call, as_text: bool) -> Json:
    """Return a call as chat templates read it; its arguments are an object, or JSON text."""
    text = call.function.arguments
    function = {"name": call.function.name, "arguments": text if as_text else json.loads(text)}
    return {"id": call.id, "type": "function", "function": function}
