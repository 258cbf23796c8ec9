"""Grammars of answers that call tools, in the Lark syntax of llguidance."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mmspec.open_types import Json
from mmspec.pipelines.response_format import JSON_STYLE
from mmspec.serving.parsing.reasoning import ReasoningFormat
from mmspec.serving.parsing.tool_formats import ToolFormat

__all__ = ["call_grammar", "strict_grammar"]

ANY = r"/(.|\n)*/"


def call_grammar(
    form: ToolFormat,
    schemas: Mapping[str, Json],
    tokens: Mapping[str, int],
    *,
    is_parallel: bool,
    content: Json | None = None,
    reasoning: ReasoningFormat | None = None,
    is_open: bool = False,
) -> str:
    """Return the grammar of one or more calls, after reasoning if the model has any.

    Args:
        form: format of the calls.
        schemas: JSON schema of the arguments of each tool that may be called, by name.
        tokens: added tokens of the tokenizer. Text of a grammar never matches them, so that they are named.
        is_parallel: whether there may be several calls.
        content: JSON schema of an answer without a call; None if there has to be a call.
        reasoning: format of the reasoning before the calls; None if there is none.
        is_open: whether the answer begins within reasoning.
    """
    rules = {"start": "calls", **call_rules(form, schemas, tokens, is_parallel)}
    if content is not None:
        rules |= {"start": "(calls | content)", "content": json_rule(content)}
    if reasoning is not None:
        thought = "thought" if is_open else f"({sequence(literal(reasoning.start, tokens), 'thought')})?"
        rules["start"] = sequence(thought, rules["start"])
        end = literal(reasoning.end, tokens)
        rules["thought"] = f"ended {end} BLANK" if reasoning.end in tokens else "ended BLANK"
        rules["ended" if reasoning.end in tokens else f"ended[suffix={end}]"] = ANY
        rules["BLANK"] = r"/\s*/"
    return written(rules)


def strict_grammar(
    form: ToolFormat, schemas: Mapping[str, Json], tokens: Mapping[str, int], is_parallel: bool
) -> str:
    """Return the grammar of a text in which calls follow their schemas from their mark on.

    Where the mark is a token, other tokens are free up to it. Where it is text, special tokens are excluded.

    Args:
        form, schemas, tokens, is_parallel: see `call_grammar`.
    """
    mark, ids = form.marks[0], [str(tokens[mark]) for mark in form.marks if mark in tokens]
    bare = replace(form, prefix=form.prefix.removeprefix(mark), start=form.start.removeprefix(mark))
    if form.prefix.startswith(mark):
        bare = replace(bare, start=form.start)
    rules = {"start": f"(before calls){'*' if is_parallel else '?'} rest"}
    rules |= call_rules(bare, schemas, tokens, is_parallel and bool(form.separator))
    if mark in tokens:
        rules |= {"before": f"rest <[{tokens[mark]}]>", "rest": f"<[^{','.join(ids)}]>*"}
    else:
        rules |= {f"before[suffix={json.dumps(mark)}]": ANY, "rest": "REST"}
        rules["REST"] = f"{ANY} & ~/(.|\\n)*{re.escape(mark)}(.|\\n)*/"
    return written(rules)


def call_rules(
    form: ToolFormat, schemas: Mapping[str, Json], tokens: Mapping[str, int], is_parallel: bool
) -> dict[str, str]:
    """Return the rule `calls`, and those that it uses."""
    prefix, between, suffix, end = (
        literal(text, tokens) for text in (form.prefix, form.between, form.suffix, form.end)
    )
    calls = sequence(prefix, "call", f"({sequence(between, 'call')})*" if is_parallel else "", suffix)
    rules = {"calls": calls, "call": " | ".join(f"call_{index}" for index in range(len(schemas)))}
    for index, (name, schema) in enumerate(schemas.items()):
        rules[f"call_{index}"] = sequence(literal(form.start % name, tokens), f"arguments_{index}", end)
        own = f"arguments_{index}"
        rules |= element_rules(own, schema) if form.is_xml else {own: json_rule({**schema, "type": "object"})}
    return rules


def element_rules(name: str, schema: Json) -> dict[str, str]:
    """Return the rule of arguments that are XML elements, in the order of the schema, and its parts."""
    parts, rules = [], dict[str, str]()
    for index, (key, value) in enumerate((schema.get("properties") or {}).items()):
        part, closing = f"{name}_{index}", json.dumps("\n</parameter>\n")
        is_text = isinstance(value, dict) and value.get("type") == "string" and "enum" not in value
        if is_text:
            rules[f"{part}[suffix={closing}]"] = ANY
        elif isinstance(value, dict) and "enum" in value:
            texts = [one if isinstance(one, str) else json.dumps(one) for one in value["enum"]]
            rules[part] = f"({' | '.join(map(json.dumps, texts))}) {closing}"
        else:
            rules |= {part: f"{part}_value {closing}", f"{part}_value": json_rule(value)}
        element = sequence(json.dumps(f"<parameter={key}>\n"), part)
        parts.append(element if key in (schema.get("required") or ()) else f"({element})?")
    return {name: sequence(*parts) or '""', **rules}


def json_rule(schema: Any) -> str:
    """Return the rule of JSON of a schema, written as Python's `json.dumps` writes it."""
    own = {**schema, "x-guidance": JSON_STYLE} if isinstance(schema, dict) else schema
    return f"%json {json.dumps(own)}"


def written(rules: Mapping[str, str]) -> str:
    """Return the text of a grammar."""
    return "".join(f"{name}: {rule}\n" for name, rule in rules.items())


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
