"""Tool calls and reasoning in texts of each format, cut anywhere."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmspec.serving.parsing.answer import AnswerText
from mmspec.serving.parsing.json_object import ObjectReader
from mmspec.serving.parsing.reasoning import REASONING_FORMATS, ReasoningParser, find_reasoning_format
from mmspec.serving.parsing.tool_calls import CallArguments, CallEnd, CallStart, Content, ToolParser, joined
from mmspec.serving.parsing.tool_formats import TOOL_FORMATS, find_tool_format

NAMES = ("get_weather", "add", "function")
TOWN = '{"town": "Zürich \\"old\\" \\ud83d\\ude00", "days": [1, {"a": null}], "x": -1.5e3}'
SUM = '{ "a":1,\n"b" : {} }'
CLOSE = "</tool_call>"
B, E, SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
BB, EE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"

TOOLS = {name: {} for name in NAMES} | {
    "add": {
        "properties": {
            "a": {"type": "integer"}, "b": {"type": ["string", "null"]}, "c": {"type": "string"},
            "d": {"anyOf": [{"type": "object"}, {"type": "boolean"}]},
        }
    }
}  # fmt: skip


def xml(name, **values):
    elements = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{elements}</function>\n{CLOSE}"


#: Of each format: texts of an answer, its content and its calls.
GOOD = [
    ("hermes", f'<tool_call>\n{{"name": "get_weather", "arguments": {TOWN}}}\n{CLOSE}', "",
     [("get_weather", TOWN)]),
    ("hermes", f'I look.\n\n<tool_call>{{"arguments": {SUM}, "name":"add"}}{CLOSE}\n'
     f'<tool_call>\n{{"name": "add", "arguments": {{}}}}\n{CLOSE}\n', "I look.",
     [("add", SUM), ("add", "{}")]),
    ("hermes", f'<tool_call>{{"id": 3, "name": "add", "parameters": {SUM}}}', "", [("add", SUM)]),
    ("hermes", f'<tool_call>{{"name": "add", "arguments": {{"a": "{CLOSE}"}}}}{CLOSE} Done.', " Done.",
     [("add", f'{{"a": "{CLOSE}"}}')]),
    ("llama3_json", f'{{"name": "get_weather", "parameters": {TOWN}}}', "", [("get_weather", TOWN)]),
    ("llama3_json", f' <|python_tag|>{{"type": "function", "name": "add", "parameters": {SUM}}}', "",
     [("add", SUM)]),
    ("llama3_json", f'\n{{"name": "add", "parameters": {SUM}}}; {{"name": "add", "arguments": {{}}}}\n', "",
     [("add", SUM), ("add", "{}")]),
    ("mistral", f'[TOOL_CALLS] [{{"name": "add", "arguments": {SUM}}}]', "", [("add", SUM)]),
    ("mistral", f'Both.[TOOL_CALLS][{{"name": "get_weather", "arguments": {TOWN}}}, '
     f'{{"arguments": {SUM}, "name": "add"}} ]\n', "Both.", [("get_weather", TOWN), ("add", SUM)]),
    ("mistral", f"[TOOL_CALLS]get_weather[ARGS]{TOWN}[TOOL_CALLS]add[CALL_ID]a1B2c3D4e[ARGS]{SUM}", "",
     [("get_weather", TOWN), ("add", SUM)]),
    ("mistral_args", f"[TOOL_CALLS]add{SUM}", "", [("add", SUM)]),
    ("deepseek_v3", f"{BB}{B}function{SEP}get_weather\n```json\n{TOWN}\n```{E}\n{B}function{SEP}add\n"
     f"```json\n{SUM}\n```{E}{EE}", "", [("get_weather", TOWN), ("add", SUM)]),
    ("deepseek_v31", f"I look.{BB}{B}get_weather{SEP}{TOWN}{E}{B}function{SEP}{{}}{E}{EE}", "I look.",
     [("get_weather", TOWN), ("function", "{}")]),
    ("deepseek_v3", f"{B}function{SEP}add\n```json\n{SUM}\n```{E}", "", [("add", SUM)]),
    ("qwen3_coder", "I look.\n" + xml("add", a="12", b="null", c="5 < é\n\n", d='{"x": [1]}'), "I look.",
     [("add", '{"a": 12, "b": null, "c": "5 < é\\n\\n", "d": {"x": [1]}}')]),
    ("qwen3_coder", xml("add", a="x", b="3", c="", d="True") + "\n" + xml("get_weather", town="3"), "",
     [("add", '{"a": "x", "b": "3", "c": "", "d": true}'), ("get_weather", '{"town": "3"}')]),
    ("qwen3_coder", f"<tool_call><function=add><parameter=a>NaN</parameter></function>{CLOSE} Done.",
     " Done.", [("add", '{"a": "NaN"}')]),
    ("qwen3_coder", "<tool_call>\n<function=function>\n</function>\n", "", [("function", "{}")]),
]  # fmt: skip

#: Texts that hold no call, or a broken one: they are content as they are.
PLAIN = [
    ("hermes", "Hello  <tool_ call> {}\n\n"),
    ("hermes", f"<tool_call>nothing{CLOSE}"),
    ("hermes", f'<tool_call>{{"name": "add"}}{CLOSE}'),
    ("hermes", f'<tool_call>{{"name": 3, "arguments": {{}}}}{CLOSE}'),
    ("hermes", f'<tool_call>{{"name": "a b", "arguments": {{}}}}{CLOSE}'),
    ("hermes", f'<tool_call>{{"name": "add", "arguments": "{{}}"}}{CLOSE}'),
    ("hermes", f'<tool_call>{{"name": "add", "arguments": {{"a": 1}}{CLOSE}'),  # a bracket is missing
    ("hermes", f'<tool_call>{{"name": "add", "arguments": {{"a": "b\n"}}}}{CLOSE}'),
    ("hermes", f'<tool_call>{{"name": "add", "arguments": {{"a": 01}}}}{CLOSE}'),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1'),  # the answer was too long
    ("hermes", f'<tool_call>{{"name": "add", "arguments": {{}}}} and more{CLOSE}'),
    ("hermes", "<tool_call><tool_call>"),
    ("hermes", " \n"),
    ("hermes", ""),
    ("llama3_json", '{"answer": 42}'),
    ("llama3_json", '{"name": "Bob", "parameters": {}}'),  # no tool has this name
    ("llama3_json", "<|python_tag|>print(1)"),
    ("llama3_json", 'So: {"name": "add", "parameters": {}}'),
    ("llama3_json", " {}"),
    ("mistral", "[TOOL_CALLS]"),
    ("mistral", "[TOOL_CALLS] []"),
    ("mistral", "[TOOL_CALLS]add[ARGS]"),
    ("deepseek_v3", f"{BB}{B}function{SEP}add\nno JSON{E}{EE}"),
    ("deepseek_v31", f"{BB}{B}add{SEP}{{}} no end"),
    ("qwen3_coder", f'<tool_call>\n{{"name": "add", "arguments": {{}}}}\n{CLOSE}'),
    ("qwen3_coder", f"<tool_call><function=a b></function>{CLOSE}"),
    ("qwen3_coder", "<tool_call><function=add><parameter=a>1</parameter>"),  # the answer was too long
    ("qwen3_coder", f"<tool_call><function=add><parameter=a>1</parameter><parameter=a>{CLOSE}"),
    ("qwen3_coder", f"<tool_call><function=add> a</function>{CLOSE}"),
]  # fmt: skip


def parsed(form, chunks):
    parser = ToolParser(TOOL_FORMATS[form], TOOLS)
    pieces = [piece for chunk in chunks for piece in parser.add(chunk)]
    return joined([*pieces, *parser.finish()])


def cut(text, places):
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[start:end] for start, end in zip(edges, edges[1:], strict=False)]


def written(pieces):
    """Content of well-formed pieces, and calls."""
    content, calls = "", []
    for piece in pieces:
        if isinstance(piece, Content):
            content += piece.text
        elif isinstance(piece, CallStart):
            calls.append((piece.name, ""))
        elif isinstance(piece, CallArguments):
            calls[-1] = (calls[-1][0], calls[-1][1] + piece.text)
        else:
            assert isinstance(piece, CallEnd) and piece.is_valid
    return content, calls


@pytest.mark.parametrize(("form", "text", "content", "calls"), GOOD)
def test_calls_have_the_name_and_the_exact_arguments(form, text, content, calls):
    pieces = parsed(form, [text])
    assert written(pieces) == (content, calls)
    assert all(json.loads(arguments) is not None for _, arguments in calls)
    assert parsed(form, text) == pieces  # character by character


@pytest.mark.parametrize(("form", "text"), PLAIN)
def test_what_is_no_call_is_content(form, text):
    answer = AnswerText(None, ToolParser(TOOL_FORMATS[form], TOOLS))
    for character in text:
        answer.add(character)
    answer.finish()
    assert answer.message() == {"role": "assistant", "content": text}
    assert answer.finish_reason("stop") == "stop"


ANY = [(form, text) for form, text, *_ in GOOD] + PLAIN


@given(st.sampled_from(ANY), st.sampled_from(ANY), st.lists(st.integers(0, 400)))
def test_pieces_do_not_depend_on_cuts(first, second, places):
    text = first[1] + second[1]
    assert parsed(first[0], cut(text, places)) == parsed(first[0], [text])


MARKS = sorted({one for form in TOOL_FORMATS.values() for one in (*form.tokens, *form.marks)})
BITS = [
    *MARKS,
    *'[]{},:;"\\` \n',
    '{"name": "add", ',
    '"arguments": {}',
    '{"a": 1}',
    "add",
    "```json",
    "function",
    "<function=add>",
    "<parameter=a>",
    "</parameter>",
    "</function>",
]


@given(st.sampled_from(sorted(TOOL_FORMATS)), st.lists(st.sampled_from(BITS), max_size=24), st.data())
def test_no_text_is_lost(form, bits, data):
    """Content and the sources of calls are the text, up to blanks and the signs around calls."""
    text = "".join(bits)
    pieces = parsed(form, cut(text, data.draw(st.lists(st.integers(0, 200)))))
    assert pieces == parsed(form, [text])
    known = [
        piece.text if isinstance(piece, Content) else piece.source
        for piece in pieces
        if isinstance(piece, Content | CallEnd)
    ]
    left = text
    for part in known:
        before, found, left = left.partition(part)
        assert found == part
        assert not "".join(before.split()).strip("".join(TOOL_FORMATS[form].closers) + ",;")
    assert known or not text.strip()


SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
)
VALUES = st.recursive(SCALARS, lambda one: st.lists(one) | st.dictionaries(st.text(), one))


@given(VALUES, st.booleans(), st.sampled_from([None, 2]))
def test_an_object_is_read_as_json_reads_it(value, ascii_only, indent):
    text = json.dumps({"first": 1, "value": value}, ensure_ascii=ascii_only, indent=indent)
    reader, members = ObjectReader(), {}
    for place, character in enumerate(text):
        assert not reader.has_ended, text[:place]
        if reader.add(character):
            members[reader.key] = members.get(reader.key, "") + character
    assert reader.has_ended
    assert {key: json.loads(one) for key, one in members.items()} == {"first": 1, "value": value}


@given(st.text(alphabet='{}[]",:\\u01e+-.tfn a\n', max_size=12))
def test_what_json_refuses_is_refused(text):
    text = '{"a": ' + text
    reader = ObjectReader()
    try:
        for place, character in enumerate(text):
            reader.add(character)
            if reader.has_ended:
                assert isinstance(json.loads(text[: place + 1]), dict)
                return
    except ValueError:
        for end in range(place + 1, len(text) + 1):
            with pytest.raises(ValueError):
                json.loads(text[:end])


def deltas(answer, chunks):
    found = [delta for chunk in chunks for delta in answer.add(chunk)]
    return found + answer.finish()


def test_deltas_are_openais():
    answer = AnswerText(None, ToolParser(TOOL_FORMATS["hermes"]))
    first, text, content, calls = GOOD[1]
    found = deltas(answer, text)
    assert "".join(delta.get("content", "") for delta in found) == content
    started = [delta["tool_calls"][0] for delta in found if "tool_calls" in delta]
    for index, (name, arguments) in enumerate(calls):
        own = [one for one in started if one["index"] == index]
        function = {"name": name, "arguments": ""}
        assert own[0] == {"index": index, "id": own[0]["id"], "type": "function", "function": function}
        assert own[0]["id"].startswith("call_") and all("id" not in one for one in own[1:])
        assert "".join(one["function"]["arguments"] for one in own) == arguments
    assert len({one["id"] for one in started if "id" in one}) == len(calls)
    assert answer.finish_reason("stop") == "tool_calls" and answer.finish_reason("length") == "length"
    whole = answer.message()
    assert whole["content"] == content and first == "hermes"
    assert [(one["function"]["name"], one["function"]["arguments"]) for one in whole["tool_calls"]] == calls


def test_arguments_stream_as_they_come():
    answer = AnswerText(None, ToolParser(TOOL_FORMATS["hermes"]))
    assert answer.add('Hi <tool_call>{"name": "add", "argu') == [{"content": "Hi"}]
    (start, *_), sent = answer.add('ments": {"a": "long'), []
    assert start["tool_calls"][0]["function"] == {"name": "add", "arguments": ""}
    for text in (" text", ' goes", "b"', ": 1}"):
        (delta,) = answer.add(text)
        sent.append(delta["tool_calls"][0]["function"]["arguments"])
    assert sent == [" text", ' goes", "b"', ": 1}"]
    assert answer.add("}</tool_call>") == [] and answer.finish() == []


def test_a_stream_of_a_broken_call_loses_nothing():
    answer = AnswerText(None, ToolParser(TOOL_FORMATS["hermes"]))
    broken = '<tool_call>{"name": "add", "arguments": {"a": 1}, oops</tool_call> sorry'
    found = deltas(answer, [broken])
    sent = "".join(delta.get("content", "") for delta in found)
    assert sent == ", oops</tool_call> sorry"
    assert answer.message() == {"role": "assistant", "content": broken}


def test_one_call_alone_if_calls_are_not_parallel():
    for form, text, _, calls in GOOD:
        answer = AnswerText(None, ToolParser(TOOL_FORMATS[form], TOOLS), is_parallel=False)
        found = deltas(answer, text)
        assert {one["tool_calls"][0]["index"] for one in found if "tool_calls" in one} == {0}
        assert [one["function"]["arguments"] for one in answer.message()["tool_calls"]] == [calls[0][1]]


def test_ids_of_mistral_have_nine_letters_and_digits():
    answer = AnswerText(None, ToolParser(TOOL_FORMATS["mistral"]), id_length=9)
    deltas(answer, [GOOD[7][1]])
    (call,) = answer.message()["tool_calls"]
    assert len(call["id"]) == 9 and call["id"].isalnum()


THOUGHTS = [  # text, is_open, reasoning, rest
    ("<think>\nI add.\n</think>\n\nTwo.\n", False, "I add.", "Two.\n"),
    ("\n<think>I add.", False, "I add.", ""),
    ("I add.\n</think>Two.", True, "I add.", "Two."),
    ("<think>\n\n</think>\n\nTwo.", False, "", "Two."),
    ("Two <think>is</think> it.", False, "", "Two <think>is</think> it."),
    ("<thin", False, "", "<thin"),
    (" ", False, "", " "),
    ("a </thin b\n </think>", True, "a </thin b", ""),
    ("never ends </thi", True, "never ends </thi", ""),
]


@pytest.mark.parametrize(("text", "is_open", "reasoning", "rest"), THOUGHTS)
@given(places=st.lists(st.integers(0, 50)))
def test_reasoning_is_apart(text, is_open, reasoning, rest, places):
    for chunks in (cut(text, places), text):
        parser = ReasoningParser(REASONING_FORMATS["qwen3"], is_open)
        found = [*(parser.add(chunk) for chunk in chunks), parser.finish()]
        assert tuple("".join(parts) for parts in zip(*found, strict=True)) == (reasoning, rest)


def test_a_message_has_reasoning_under_both_names():
    form, text, content, calls = GOOD[1]
    for shows in (True, False):
        parsers = ReasoningParser(REASONING_FORMATS["qwen3"], False), ToolParser(TOOL_FORMATS[form])
        answer = AnswerText(*parsers, shows_reasoning=shows)
        found = deltas(answer, f"<think>\nI <tool_call> {{}}\n</think>\n\n{text}")
        said = "".join(delta.get("reasoning_content", "") for delta in found)
        assert said == "".join(delta.get("reasoning", "") for delta in found)
        message = answer.message()
        assert said == message.get("reasoning_content", "") == message.get("reasoning", "")
        assert said == ("I <tool_call> {}" if shows else "")
        assert message["content"] == content and len(message["tool_calls"]) == len(calls)


TEMPLATES = [  # what templates of these models say
    ("return a json object within <tool_call></tool_call> XML tags", "hermes"),  # Qwen2.5, Qwen3
    ("<tool_call>\n<function=example>\n<parameter=a>", "qwen3_coder"),  # Qwen3-Coder
    ('Respond in the format {"name": function name, "parameters": dictionary}', "llama3_json"),
    ('{{ "<|python_tag|>" + call.name }}', "llama3_json"),
    ("[AVAILABLE_TOOLS] [TOOL_CALLS] [", "mistral"),
    ("[TOOL_CALLS]{{ name }}[ARGS]", "mistral_args"),
    (f"{BB}{B}{{{{ type }}}}{SEP}name\n```json", "deepseek_v3"),
    (f"{BB}{B}name{SEP}arguments", "deepseek_v31"),
    ("{{ message.content }}", None),
]  # fmt: skip


def test_the_format_is_that_of_the_template():
    for template, name in TEMPLATES:
        assert find_tool_format(template, []) == name
    assert find_tool_format("{{ tools }}", ["[INST]", "[TOOL_CALLS]", "[ARGS]"]) == "mistral_args"
    assert find_reasoning_format("content.split('</think>')", []) == "qwen3"
    assert find_reasoning_format("", ["[THINK]", "[/THINK]"]) == "mistral"
    assert find_reasoning_format("{{ message.content }}", ["<s>"]) is None
