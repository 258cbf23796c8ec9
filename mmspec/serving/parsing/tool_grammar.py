"""Grammar of an answer that calls a tool, in the Lark syntax of llguidance."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from mmspec.open_types import Json
from mmspec.pipelines.response_format import JSON_STYLE
from mmspec.serving.parsing.reasoning import ReasoningFormat
from mmspec.serving.parsing.tool_formats import ToolFormat

__all__ = ["call_grammar"]


def call_grammar(
    form: ToolFormat,
    schemas: Mapping[str, Json],
    tokens: Mapping[str, int],
    *,
    is_parallel: bool,
    reasoning: ReasoningFormat | None = None,
    is_open: bool = False,
) -> str:
    """Return the grammar of one or more calls, after reasoning if the model has any.

    Args:
        form: format of the calls.
        schemas: JSON schema of the arguments of each tool that may be called, by name.
        tokens: added tokens of the tokenizer. Text of a grammar never matches them, so that they are named.
        is_parallel: whether there may be several calls.
        reasoning: format of the reasoning before the calls; None if there is none.
        is_open: whether the answer begins within reasoning.
    """
    prefix, between, suffix, end = (
        literal(text, tokens) for text in (form.prefix, form.between, form.suffix, form.end)
    )
    calls = sequence(prefix, "call", f"({sequence(between, 'call')})*" if is_parallel else "", suffix)
    rules = {"start": calls, "call": " | ".join(f"call_{index}" for index in range(len(schemas)))}
    for index, (name, schema) in enumerate(schemas.items()):
        rules[f"call_{index}"] = sequence(literal(form.start % name, tokens), f"arguments_{index}", end)
        rules[f"arguments_{index}"] = f"%json {json.dumps(closed(schema))}"
    if reasoning is not None:
        thought = "thought" if is_open else f"({sequence(literal(reasoning.start, tokens), 'thought')})?"
        rules["start"] = sequence(thought, rules["start"])
        end = literal(reasoning.end, tokens)
        rules["thought"] = f"ended {end} BLANK" if reasoning.end in tokens else "ended BLANK"
        rules["ended" if reasoning.end in tokens else f"ended[suffix={end}]"] = r"/(.|\n)*/"
        rules["BLANK"] = r"/\s*/"
    return "".join(f"{name}: {rule}\n" for name, rule in rules.items())


def closed(schema: Json) -> Json:
    """Return the schema of an object, written as Python's `json.dumps` writes it."""
    return {**schema, "type": "object", "x-guidance": JSON_STYLE}


def literal(text: str, tokens: Mapping[str, int]) -> str:
    """Return a text as terms of a grammar: strings, and the ids of added tokens."""
    known = [token for token in sorted(tokens, key=len, reverse=True) if token in text]
    parts = re.split(f"({'|'.join(map(re.escape, known))})", text) if known else [text]
    return sequence(
        *(f"<[{tokens[part]}]>" if part in tokens else json.dumps(part) for part in parts if part)
    )


def sequence(*terms: str) -> str:
    """Join the terms of a rule that are not empty."""
    return " ".join(term for term in terms if term)
