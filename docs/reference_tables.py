"""Tables of the reference: options of accelerators, keywords of pipeline calls, and fields of requests.

`docs/build.py` writes them into the pages. All texts are from docstrings and schemas of the package.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from mmspec import call_fields, errors
from mmspec.accelerators import promise_of, rules_of
from mmspec.accelerators.meanings import (
    Meaning,
    meaning_of,
    meanings_of,
    meanings_of_all,
    meanings_of_rule,
)
from mmspec.cli.accelerators import stated
from mmspec.core.draft import DraftKind
from mmspec.pipelines import ContinuousImagePipeline, ImagePipeline, VisionLanguagePipeline
from mmspec.pipelines.image_settings import OWN, ContinuousSettings, ImageSettings
from mmspec.pipelines.settings import GenerationSettings
from mmspec.plugins import METHODS, RULES, Method

#: Settings of each pipeline class, as the keywords of a call.
SETTINGS: dict[type, type] = {
    VisionLanguagePipeline: GenerationSettings,
    ImagePipeline: ImageSettings,
    ContinuousImagePipeline: ContinuousSettings,
}
#: Titles of the groups of keywords.
GROUPS = {
    call_fields.SamplingFields: "Sampling",
    call_fields.RandomFields: "Seeds",
    call_fields.TextFields: "Length, stopping and processors of text",
    call_fields.CutoffFields: "Further truncation of text",
    call_fields.ShapingFields: "Logits processors of text",
    call_fields.ImageFields: "Images",
    call_fields.ContinuousFields: "Continuous tokens",
}
#: Reasons for which fields of requests are rejected, with patterns of their names.
REASONS = {
    "tools and search": r"tool|function|web_search",
    "guided decoding": r"guided_|json|regex|ebnf|response_format|structure|structural",
    "log probabilities and further output": r"logprobs|^return_|annotations|obfuscation|continuous_usage",
    "other sampling and penalties": r"penalty|logit|allowed_token|beam|best_of|custom|repetition|top_|min_p",
    "reasoning": r"reasoning|thinking|verbosity",
    "prompt and template": r"template|special|documents|echo|input_ids|trunc|kwargs|fix|embeds|partial$",
    "other media": r"audio|modalities|video|detail|frame|svg",
    "editing and style of images": r"^image$|mask|fidelity|style|quality|background|compression|complexity",
    "size and number of images": r"height|width|num_|partial_images",
}


#: Topics of request fields, with patterns of their names; the first that fits counts.
TOPICS = {
    "prompt": r"messages|prompt|^model$|template|continue_final|^echo$",
    "length and end": r"max_|min_tokens|stop|ignore_eos",
    "sampling": r"temperature|^top_[pk]$|min_p|seed|^n$|penalty|bias|bad_words|allowed_token",
    "format": r"response_format|structured|guided_|json_schema|^regex$|^ebnf$",
    "tools and reasoning": r"tool|reasoning|verbosity",
    "answer": "",
}
LONG = 12  # fields of a table that is sorted by topic


#: Patterns of strings, in words.
PATTERNS = {r"^([1-9]\d{0,4}x[1-9]\d{0,4}|auto)$": "`WIDTHxHEIGHT` in pixels, or `auto`"}


def accelerators() -> str:
    """Return the tables of accelerators and acceptance rules."""
    lines = [
        "| accelerator | summary | promise at default options | needs | source |",
        "|---|---|---|---|---|",
    ]
    for name, method in METHODS.items():
        source = method.source
        if source != "-":
            source = f"[{source}](https://arxiv.org/abs/{source})"
        needs = method.needs or "nothing"
        lines.append(f"| `{name}` | {method.summary} | {stated(*promise_of(method))} | {needs} | {source} |")
    lines += ["", "| `acceptance=` | meaning | promise | kinds of drafts |", "|---|---|---|---|"]
    for name in RULES:
        rule = RULES[name]
        exactness = stated(rule.exactness, rule.bound) + (" at temperature 0" if rule.greedy_only else "")
        sound_for = [kind for kind in DraftKind if kind in getattr(rule, "sound_for", ())]
        kinds = ", ".join(kind.value.replace("_", " ") for kind in sound_for) or "places of a block"
        meaning = inspect.cleandoc(rule.__doc__ or "").split("\n\n")[0].replace("\n", " ").rstrip(".")
        lines.append(f"| `{name}` | {meaning} | {exactness} | {kinds} |")
    return "\n".join(lines)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [columns, ["---"] * len(columns), *([escaped(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def escaped(text: str) -> str:
    """Return a cell without characters that end it."""
    return text.replace("|", "\\|")


def listed(found: Iterable[Meaning]) -> list[tuple[str, str, str]]:
    """Return rows of options, with their defaults and meanings."""
    return [(f"`{one.name}`", one.default, one.text or "-") for one in found]


def method_options(method: Method) -> str:
    """Return a table of a method's options; "" if it has none."""
    rows = listed(meanings_of(method))
    return table(("option", "default", "meaning"), rows) if rows else ""


def shared_options() -> str:
    """Return a table of the options that every accelerator has."""
    drafter = ("`drafter`", "from `drafters.json`", 'folder, hub id or loaded model, where "needs" names one')
    return table(("option", "default", "meaning"), [*listed(meanings_of_all()), drafter])


def rule_options() -> str:
    """Return a table of the options of acceptance rules."""
    own = {name for name in RULES if name in METHODS and RULES[name] in rules_of(METHODS[name])}
    own |= {method.rule for method in METHODS.values() if method.rule in method.rules}
    rows = [
        (f"`{name}`", *row) for name in RULES if name not in own for row in listed(meanings_of_rule(name))
    ]
    made = table(("`acceptance=`", "option", "default", "meaning"), rows)
    return f"{made}\n\nOther rules have no options, or those of the accelerator that they belong to."


def call_keywords() -> str:
    """Return tables of the keywords of pipeline calls, by the groups of `mmspec.call_fields`."""
    image = ImagePipeline.__call__
    parts = [
        ("Prompts of text calls", [VisionLanguagePipeline], list(arguments(VisionLanguagePipeline.__call__))),
        ("Prompts of image calls", [ImagePipeline, ContinuousImagePipeline], list(arguments(image))),
    ]
    for group, title in GROUPS.items():
        takers = [pipeline for pipeline, settings in SETTINGS.items() if issubclass(settings, group)]
        parts.append((title, takers, list(settings_of(group))))
    texts = []
    for title, takers, rows in parts:
        names = ", ".join(f"`{one.__name__}`" for one in takers)
        made = table(("keyword", "type", "default", "meaning"), rows)
        texts.append(f"### {title}\n\nPipelines: {names}.\n\n{made}")
    return "\n\n".join(texts)


def arguments(call: Any) -> Iterator[tuple[str, str, str, str]]:
    """Yield rows of the named arguments of a call."""
    for name, item in inspect.signature(call).parameters.items():
        if name != "self" and item.kind is not item.VAR_KEYWORD:
            found = meaning_of(call, name)
            yield f"`{name}`", kind(item.annotation), in_python(found.default), found.text


def settings_of(group: type) -> Iterator[tuple[str, str, str, str]]:
    """Yield rows of the fields of a group of settings."""
    for name in call_fields.known_fields(group):
        found = meaning_of(group, name)
        default = in_python(found.default)
        if from_config(group, name):
            default = f"config, else {default}"
        yield f"`{name}`", kind(group.__annotations__[name]), default, found.text


def in_python(default: str) -> str:
    """Return a default as in Python."""
    return re.sub(r"^`(true|false)`$", lambda found: f"`{found[1].title()}`", default)


def from_config(group: type, name: str) -> bool:
    """Whether the default of a field is that of the model's generation config."""
    from transformers import GenerationConfig

    if issubclass(GenerationSettings, group):
        return name in vars(GenerationConfig())
    return issubclass(ContinuousSettings, group) and name in OWN


def kind(annotation: str) -> str:
    """Return a type annotation in words."""
    text = re.sub(r"Sequence\[", "list[", str(annotation))
    text = re.sub(r"Callable\[.*\](?= \||$)|AnyFunction", "function", text)
    text = re.sub(r"\bMapping\b", "dict", re.sub(r"\btorch\.", "", text))
    parts = [part.replace("~", " | ") for part in in_brackets(text).split(" | ")]
    named = ["any" if part == "object" else f"`{part}`" for part in parts if part != "None"]
    return " or ".join(named)


def in_brackets(text: str) -> str:
    """Return an annotation with the alternatives inside brackets joined by "~"."""
    while (new := re.sub(r"(\[[^\[\]|]*) \| ([^\[\]]*\])", r"\1~\2", text)) != text:
        text = new
    return text


def exceptions() -> str:
    """Return a table of the exceptions, with their built-in base classes and the cases that raise them."""
    rows = []
    for name in errors.__all__:
        found = getattr(errors, name)
        if isinstance(found, type):
            first = inspect.cleandoc(found.__doc__ or "").split("\n\n")[0].replace("\n", " ")
            bases = [base for base in found.__mro__[1:] if base not in (Exception, BaseException, object)]
            names = ", ".join(f"`{base.__name__}`" for base in bases or [Exception])
            rows.append((f"`{name}`", names, first.rstrip(".")))
    return table(("exception", "base classes", "meaning"), rows)


def request_fields() -> str:
    """Return tables of request fields, with the names of ignored and rejected ones."""
    from mmspec.serving.schemas import BODIES

    return "\n\n".join(body_fields(name, body) for name, body in BODIES.items())


def body_fields(name: str, body: Any) -> str:
    """Return the table of an object of requests, then its ignored and rejected fields."""
    schema = body.model_json_schema()
    required, known = schema.get("required", ()), schema.get("$defs", {})
    rows = []
    for field in sorted(schema["properties"], key=lambda one: one not in required):
        content = schema["properties"][field]
        default = "required" if field in required else written(content.get("default"))
        rows.append((f"`{field}`", allowed(content, known), default, keyword_of(field)))
    columns = ("field", "values", "default", "in Python")
    if len(rows) > LONG:
        columns, rows = ("topic", *columns), by_topic(rows)
    texts = [f"### {name[0].upper()}{name[1:]}", table(columns, rows)]
    if body.ignored:
        texts.append(f"Ignored: {', '.join(f'`{one}`' for one in sorted(body.ignored))}.")
    if body.refused:
        texts.append("Rejected:\n\n" + "\n".join(rejected(body.refused)))
    return "\n\n".join(texts)


def by_topic(rows: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Return rows of fields sorted by topic, with the topic in front of the first row of each."""
    topics = [
        next(topic for topic, names in TOPICS.items() if re.search(names, row[0].strip("`"))) for row in rows
    ]
    made: list[tuple[str, ...]] = []
    for topic in TOPICS:
        own = [row for row, of_row in zip(rows, topics, strict=True) if of_row == topic]
        made += [(topic if index == 0 else "", *row) for index, row in enumerate(own)]
    return made


def keyword_of(field: str) -> str:
    """Return the keyword of pipeline calls for a field, or "-"."""
    names = {one: key for key, one in call_fields.CHAT_NAMES.items() if key in call_fields.CALL_FIELDS}
    names |= {"max_completion_tokens": "max_new_tokens", "seed": "seed", "logprobs": "logprobs"}
    names["logit_bias"] = "sequence_bias"
    found = field if field in call_fields.SAME_IN_REQUESTS else names.get(field)
    return f"`{found}`" if found else "-"


def written(value: object) -> str:
    """Return a default of a field as JSON; none for null."""
    return "none" if value is None else f"`{json.dumps(value)}`"


def allowed(content: Mapping[str, Any], known: Mapping[str, Any]) -> str:
    """Return the allowed values of a field in words, from its JSON schema."""
    if "anyOf" in content:
        found = [allowed(one, known) for one in content["anyOf"] if one.get("type") != "null"]
        return " or ".join(dict.fromkeys(found))
    if "$ref" in content or "oneOf" in content:
        return "object"
    if "const" in content or "enum" in content:
        return " or ".join(f"`{json.dumps(one)}`" for one in content.get("enum", [content.get("const")]))
    if content["type"] == "array":
        return f"list of {plural(allowed(content['items'], known))}"
    if content.get("pattern") in PATTERNS:
        return PATTERNS[content["pattern"]]
    low, high = content.get("minimum"), content.get("maximum")
    limits = [
        *([f"from {low:g}"] if low is not None else []),
        *([f"above {content['exclusiveMinimum']:g}"] if "exclusiveMinimum" in content else []),
        *([f"to {high:g}"] if high is not None else []),
        *([f"`{content['pattern']}`"] if "pattern" in content else []),
    ]
    return " ".join([content["type"], *limits])


def plural(words: str) -> str:
    """Return a type of values in the plural."""
    return re.sub(r"^\w+", lambda found: f"{found[0]}s", words)


def rejected(refused: Mapping[str, Sequence[object]]) -> Iterator[str]:
    """Yield a line for each reason, with its fields and the values that have no effect."""
    left = dict(sorted(refused.items()))
    for reason, pattern in {**REASONS, "others": ""}.items():
        names = [name for name in left if re.search(pattern, name)]
        cells = []
        for name in names:
            harmless = ", ".join(json.dumps(value) for value in left.pop(name))
            cells.append(f"`{name}`" + (f" ({harmless})" if harmless else ""))
        if cells:
            yield f"- {reason}: {', '.join(cells)}"
