"""Structured output: reads a response format, in the forms of OpenAI and vLLM, as a grammar over tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

from transformers import (
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from mmspec.core.grammar import GrammarProcessor, TextGrammar
from mmspec.errors import InputError, MissingDependencyError, how_to_install
from mmspec.pipelines.settings import GenerationSettings
from mmspec.registry import did_you_mean
from mmspec.validation import is_list

__all__ = ["ARGUMENT", "grammar_processor", "grammar_source", "prepare_grammars", "with_response_format"]

ARGUMENT = "response_format"
#: The field of each type that holds its value, in a format {"type": ..., field: ...}.
TYPES = {"json_schema": "json_schema", "regex": "regex", "choice": "choice", "grammar": "grammar"}
#: Fields of vLLM's `structured_outputs`, and the type that each stands for.
VLLM = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "grammar"}
#: Separators of JSON as Python's `json.dumps` writes it: most of the whitespace is then forced, which
#: costs no forward pass. A schema overrides them by its key "x-guidance".
JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

TOKENIZERS: WeakKeyDictionary[PreTrainedTokenizerBase, dict[tuple[int, ...], Any]] = WeakKeyDictionary()


def grammar_processor(
    response_format: object,
    tokenizer: PreTrainedTokenizerBase,
    eos_token_id: int | Sequence[int] | None = None,
) -> GrammarProcessor:
    """Return a logits processor for one call of `generate`, under which every output has a format.

    Pass it as `logits_processor=[processor]`, beside `custom_generate=mmspec.accelerate(...)` or without it.

    Args:
        response_format: see `docs/how-to/structured-output.md`; or a list with one for each prompt, None for
            prompts without a format.
        tokenizer: of the model.
        eos_token_id: token ids that end a row; the tokenizer's end token if None.

    Raises:
        InputError: the format cannot be read, or the tokenizer cannot be used.
        MissingDependencyError: llguidance is not installed.
    """
    given = tokenizer.eos_token_id if eos_token_id is None else eos_token_id
    ends = () if given is None else tuple(given) if is_list(given) else (given,)
    several = is_list(response_format)
    formats = list(response_format) if several else [response_format]  # type: ignore[call-overload]
    names = [f"{ARGUMENT}[{index}]" if several else ARGUMENT for index in range(len(formats))]
    sources = [grammar_source(each, name) for each, name in zip(formats, names, strict=True)]
    if not any(source is not None for source in sources):
        return GrammarProcessor([None])
    known = tokenizer_of(tokenizer, ends)
    grammars = []
    for name, source in zip(names, sources, strict=True):
        if source is not None and (error := refusal(source, known)):
            raise InputError(
                name, formats[names.index(name)], f"must be a grammar that llguidance reads: {error}"
            )
        grammars.append(None if source is None else TextGrammar(source, known))
    return GrammarProcessor(grammars)


def with_response_format(
    settings: GenerationSettings, tokenizer: PreTrainedTokenizerBase, prompts: int
) -> GenerationSettings:
    """Return settings whose `response_format` is the last of the logits processors.

    Raises:
        InputError, MissingDependencyError: see `grammar_processor`; or a list has another length.
    """
    given = settings.response_format
    if given is None:
        return settings
    if is_list(given) and len(given) != prompts:
        rule = f"must be one format, or a list with one for each of the {prompts} prompts"
        raise InputError(ARGUMENT, given, rule)
    processor = grammar_processor(given, tokenizer, settings.end_token_ids())
    if not any(processor.grammars):
        return replace(settings, response_format=None)
    before: LogitsProcessorList | list[Any] = settings.logits_processor or []
    return replace(settings, response_format=None, logits_processor=LogitsProcessorList([*before, processor]))


def grammar_source(response_format: object, name: str = ARGUMENT) -> str | None:
    """Read a response format; return its grammar in llguidance's format, None for free text.

    Args:
        response_format: None; a pydantic model; {"type": "text"}, {"type": "json_object"} or {"type":
            "json_schema", "json_schema": {"schema": ...}} of OpenAI; {"type": "regex" | "choice" | "grammar",
            the same name: ...}; or vLLM's `structured_outputs`, {"json" | "regex" | "choice" | "grammar" |
            "json_object": ...}.
        name: of the argument or field, for error texts.

    Raises:
        InputError: it is none of these.
        MissingDependencyError: llguidance is not installed.
    """
    if response_format is None:
        return None
    if hasattr(response_format, "model_json_schema"):
        return source_of("json_schema", response_format, name)
    if not isinstance(response_format, Mapping):
        rule = 'must be a pydantic model, or a dictionary such as {"type": "json_object"}'
        raise InputError(name, response_format, rule)
    if "type" not in response_format:
        return vllm_source(response_format, name)
    kind = response_format["type"]
    if kind == "text":
        return None
    if kind == "json_object":
        return source_of("json_schema", {"type": "object"}, name)
    if kind not in TYPES:
        raise InputError(f"{name}.type", kind, did_you_mean(kind, ["text", "json_object", *TYPES]))
    if TYPES[kind] not in response_format:
        rule = f'must have the key "{TYPES[kind]}" with type {kind}'
        raise InputError(name, sorted(response_format), rule)
    value, where = response_format[TYPES[kind]], f"{name}.{TYPES[kind]}"
    if kind == "json_schema" and isinstance(value, Mapping) and "schema" in value:
        value, where = value["schema"], f"{where}.schema"
    return source_of(kind, value, where)


def vllm_source(fields: Mapping[str, object], name: str) -> str | None:
    """Read vLLM's `structured_outputs`, of whose fields one is set."""
    given = {field: value for field, value in fields.items() if value not in (None, False)}
    known = [*VLLM, "json_object"]
    for field in given:
        if field not in known:
            raise InputError(
                f"{name}.{field}", given[field], f"is not supported; use one of {', '.join(known)}"
            )
    if len(given) != 1:
        rule = f'must have the key "type", or one of {", ".join(known)}'
        raise InputError(name, sorted(given), rule)
    ((field, value),) = given.items()
    if field == "json_object":
        return source_of("json_schema", {"type": "object"}, name)
    return source_of(VLLM[field], value, f"{name}.{field}")


def source_of(kind: str, value: Any, name: str) -> str:
    """Return the grammar of a value of one of `TYPES`."""
    guidance = llguidance()
    if kind == "json_schema":
        schema = value.model_json_schema() if hasattr(value, "model_json_schema") else value
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except ValueError as error:
                raise InputError(name, value, f"must be a JSON schema: {error}") from error
        if not isinstance(schema, Mapping):
            raise InputError(name, value, "must be a JSON schema: a dictionary, or its text")
        return str(guidance.LLMatcher.grammar_from_json_schema(dict(schema), defaults=JSON_STYLE))
    if kind == "choice":
        if not is_list(value) or not value or not all(isinstance(item, str) and item for item in value):
            raise InputError(name, value, "must be a list of strings that are not empty")
        return str(guidance.grammar_from("choice", json.dumps(list(value))))
    if not isinstance(value, str) or not value:
        raise InputError(name, value, "must be a string that is not empty")
    try:
        return str(guidance.grammar_from(kind, value))
    except ValueError as error:
        raise InputError(name, value, f"must be a grammar in EBNF (GBNF) or Lark: {error}") from error


def prepare_grammars(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Build llguidance's form of a tokenizer now, if there is one, so that no request waits for it."""
    with suppress(InputError, MissingDependencyError):
        defaults = GenerationSettings.from_keywords(model.generation_config, {})
        tokenizer_of(tokenizer, tuple(defaults.end_token_ids()))


@lru_cache(maxsize=256)
def refusal(source: str, tokenizer: Any) -> str:
    """Return why llguidance refuses a grammar; "" if it does not."""
    is_error, texts = llguidance().LLMatcher.validate_grammar_with_warnings(source, tokenizer)
    return str(texts[0]) if is_error else ""


def tokenizer_of(tokenizer: PreTrainedTokenizerBase, ends: tuple[int, ...]) -> Any:
    """Return llguidance's form of a tokenizer, which takes a second to build and is kept.

    Raises:
        InputError: it is not a fast tokenizer of bytes, or there is no end token.
    """
    guidance = llguidance()
    if not ends:
        raise InputError("eos_token_id", None, f"must be set with {ARGUMENT}: the output ends with it")
    rule = f"must be a fast tokenizer whose tokens are bytes with {ARGUMENT}"
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise InputError("tokenizer", type(tokenizer).__name__, rule)
    kept = TOKENIZERS.setdefault(tokenizer, {})
    if ends not in kept:
        try:
            kept[ends] = guidance.hf.from_tokenizer(tokenizer, eos_token=list(ends))
        except ValueError as error:
            raise InputError("tokenizer", type(tokenizer).__name__, f"{rule}: {error}") from error
    return kept[ends]


def llguidance() -> Any:
    """Import llguidance.

    Raises:
        MissingDependencyError: it is not installed.
    """
    try:
        import llguidance.hf
    except ImportError as error:
        raise MissingDependencyError(f"{ARGUMENT} needs llguidance: {how_to_install('grammar')}") from error
    return llguidance
