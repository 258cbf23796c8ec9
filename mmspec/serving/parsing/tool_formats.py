"""Formats of tool calls in the text of an answer, as data, and the format of a model."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, replace

__all__ = ["TOOL_FORMATS", "TOOL_NAME", "ToolFormat", "find_tool_format"]

#: Names of tools that requests may define and that calls may use.
TOOL_NAME = r"[a-zA-Z0-9_.:/-]{1,128}"


@dataclass(frozen=True)
class ToolFormat:
    """Format in which a model writes tool calls: a mark, a head, a JSON object and a tail.

    Either the head holds the tool's name and the object holds the arguments, or the object holds both. In a
    format with `is_xml`, arguments are XML elements instead (`ElementsReader`).

    Attributes:
        marks: texts that begin a call.
        head: pattern of the text between the mark and the object; its group `name` is the tool's name.
        tails: texts that may follow the object, without blanks; with "", the object ends the call.
        closers: texts after a call that belong to no content.
        separator: character after which a call needs no mark.
        is_xml: whether arguments are XML elements.
        is_bare: whether an answer may begin with a call without a mark.
        tokens: texts that tokenizers may hold as special tokens, which have to reach the parser.
        id_length: length of the ids that chat templates of this format require; None for any id.
        prefix, start, end, between, suffix: how grammars write calls: the prefix, then each call as start
            (where %s is the name), arguments and end, with `between` between two calls, then the suffix.
    """

    marks: tuple[str, ...]
    head: str
    tails: tuple[str, ...]
    start: str
    end: str
    prefix: str = ""
    between: str = "\n"
    suffix: str = ""
    closers: tuple[str, ...] = ()
    separator: str = ""
    is_xml: bool = False
    is_bare: bool = False
    tokens: tuple[str, ...] = ()
    id_length: int | None = None


HERMES = ToolFormat(
    marks=("<tool_call>",),
    head=r"\s*",
    tails=("</tool_call>",),
    start='<tool_call>\n{"name": "%s", "arguments": ',
    end="}\n</tool_call>",
    tokens=("<tool_call>", "</tool_call>"),
)
QWEN3_CODER = replace(
    HERMES, is_xml=True, start="<tool_call>\n<function=%s>\n", end="</function>\n</tool_call>"
)
LLAMA3 = ToolFormat(
    marks=("<|python_tag|>",),
    head=r"\s*",
    tails=("",),
    start='{"name": "%s", "parameters": ',
    end="}",
    between="; ",
    separator=";",
    is_bare=True,
    tokens=("<|python_tag|>",),
)
MISTRAL = ToolFormat(
    marks=("[TOOL_CALLS]",),
    head=rf"\s*(\[\s*|(?P<name>{TOOL_NAME})(\[CALL_ID\]\w+)?(\[ARGS\])?\s*)?",
    tails=("",),
    prefix="[TOOL_CALLS] [",
    start='{"name": "%s", "arguments": ',
    end="}",
    between=", ",
    suffix="]",
    closers=("]",),
    separator=",",
    tokens=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    id_length=9,
)
BEGIN, END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
ALL_BEGIN, ALL_END, SEPARATOR = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁sep｜>"
DEEPSEEK = ToolFormat(
    marks=(ALL_BEGIN, BEGIN),
    head=rf"\s*({BEGIN})?\s*(function{SEPARATOR})?(?P<name>{TOOL_NAME})({SEPARATOR})?\s*(```json)?\s*",
    tails=(END, f"```{END}"),
    prefix=ALL_BEGIN,
    start=f"{BEGIN}function{SEPARATOR}%s\n```json\n",
    end=f"\n```{END}",
    suffix=ALL_END,
    closers=(ALL_END,),
    tokens=(ALL_BEGIN, ALL_END, BEGIN, END, SEPARATOR),
)

#: Formats by name, with the names of vLLM where it has them. Each parser also reads the format's variants.
TOOL_FORMATS = {
    "hermes": HERMES,
    "qwen3_coder": QWEN3_CODER,
    "llama3_json": LLAMA3,
    "mistral": MISTRAL,
    "mistral_args": replace(MISTRAL, prefix="", start="[TOOL_CALLS]%s[ARGS]", end="", between="", suffix=""),
    "deepseek_v3": DEEPSEEK,
    "deepseek_v31": replace(DEEPSEEK, start=f"{BEGIN}%s{SEPARATOR}", end=END, between=""),
}


def find_tool_format(template: str, tokens: Collection[str]) -> str | None:
    """Return the name of the format that a chat template teaches the model; None if it is none of these.

    Args:
        template: chat template that reads `tools`.
        tokens: added tokens of the tokenizer, which decide if the template contains no mark.
    """
    for text in (template, "\n".join(tokens)):
        if "<tool_call>" in text:
            return "qwen3_coder" if "<function=" in template else "hermes"
        if "[TOOL_CALLS]" in text:
            return "mistral_args" if "[ARGS]" in text else "mistral"
        if BEGIN in text:
            return "deepseek_v3" if "```json" in template else "deepseek_v31"
        if "<|python_tag|>" in text or re.search(r'"?name"?: function name, "?parameters"?:', text):
            return "llama3_json"
    return None
