"""Prompts of a call: one conversation per row, with its media loaded, and its templated text.

Nothing here runs the model. `mmspec.media` loads all media, never a processor, so that limits and address
checks apply to images inside messages too.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from jinja2 import Environment, TemplateError
from jinja2.meta import find_undeclared_variables
from numpy import ndarray
from PIL import Image
from transformers import PreTrainedTokenizerBase

from mmspec.errors import InputError
from mmspec.media import MediaLimits, Video, load_audio, load_image, load_video
from mmspec.media.pixels import is_array
from mmspec.messages import INPUT_AUDIO, MEDIA_URL, MESSAGE, PARTS, SOURCES
from mmspec.open_types import AnyFunction, Json, Processor
from mmspec.pipelines.pasted_tokens import with_stand_ins
from mmspec.pipelines.processor_parts import checked_size
from mmspec.registry import did_you_mean
from mmspec.validation import is_integer, require_unicode

__all__ = ["ARGUMENTS", "apply_template", "template_variables"]

Message = Mapping[str, object]
Loaders = Mapping[str, AnyFunction]
"""Loader of each kind of media: a function of a source and `argument`, the name for errors."""
Media = Mapping[str, object]
"""Media of each kind, by the arguments of a call that hold them."""
ARGUMENTS = {"image": "images", "video": "videos", "audio": "audio"}
"""The argument of a call for each kind of media, in the order in which they precede a string."""
TYPES = (
    "must have parts of type 'text', 'image', 'video' or 'audio', or OpenAI's 'image_url', 'video_url' or "
    "'input_audio'"
)
ASKED_OF_ALL = {"content", "tool_calls"}  # every message needs one of them
FREE_KEYS = {"reasoning", "reasoning_content", "thinking", "tool_calls"}  # keys with the model's own text
NEW_TURN = "add_generation_prompt"
TOOLS = "tools"
OF_TRANSFORMERS = {"messages", "raise_exception", "strftime_now"}
GENERATION = re.compile(r"{%-?\s*(end)?generation\s*-?%}")  # a tag of transformers, unknown to jinja2


@dataclass
class Prompt:
    """Prompt of one row, ready for a processor.

    Attributes:
        messages: chat messages whose media parts hold no data; empty for a raw prompt.
        text: the raw prompt, if the caller has applied the chat template; else None.
        ids: token ids of a raw prompt, whose `text` is empty; else None.
        images, videos: loaded media, in the order of their parts.
        audio: loaded sounds, each float32 [n], in the order of their parts.
        sizes: size options (`PIXEL_OPTIONS`) of each image; empty if no part has any.
        continues: whether the output continues the last message or the raw prompt, instead of starting anew.
    """

    messages: list[Json] = field(default_factory=list)
    text: str | None = None
    ids: list[int] | None = None
    images: list[Image.Image] = field(default_factory=list)
    videos: list[Video] = field(default_factory=list)
    audio: list[ndarray] = field(default_factory=list)
    sizes: list[dict[str, int]] = field(default_factory=list)
    continues: bool = False

    def media(self) -> dict[str, list[Any]]:
        """The loaded media of each kind; the lists themselves."""
        return {"image": self.images, "video": self.videos, "audio": self.audio}


def read_prompts(
    prompt: object,
    media: Media,
    *,
    num_frames: int | None = None,
    fps: float | None = None,
    sampling_rate: int | None = None,
    limits: MediaLimits,
    tokenizer: PreTrainedTokenizerBase,
    apply_chat_template: bool = True,
    placeholders: Mapping[str, str] | None,
    takes_sizes: bool = False,
    continue_final_message: bool | None = None,
    sanitize_control_tokens: bool = False,
) -> list[Prompt]:
    """Read prompts and media in every accepted form; see `VisionLanguagePipeline.__call__`.

    Args:
        prompt, num_frames, fps: arguments of the call.
        media: the arguments `images`, `videos` and `audio` of the call, by the kind of media.
        sampling_rate: samples per second that the model reads; None for models that do not read audio.
        limits: limits on media.
        tokenizer: tokenizer whose special tokens may not occur in a prompt with a chat template.
        apply_chat_template, continue_final_message, sanitize_control_tokens: arguments of the call.
        placeholders: placeholder token of each kind of media in templated strings; None if the processor
            adds them.
        takes_sizes: whether the processor accepts a size for each image.

    Raises:
        InputError: an argument cannot be used; the message names the argument and the row.
        MediaError: an image, a video or audio cannot be read.
    """
    if continue_final_message not in (None, False, True):
        raise InputError("continue_final_message", continue_final_message, "must be True, False or None")
    rows = split_rows(prompt)
    is_batch = not is_row(prompt)
    row_media = {
        kind: media_per_row(media.get(kind), argument, len(rows), is_batch)
        for kind, argument in ARGUMENTS.items()
    }
    load: Loaders = {
        "image": partial(load_image, limits=limits),
        "video": partial(load_video, num_frames=num_frames, fps=fps, limits=limits),
        "audio": partial(load_audio, sampling_rate=sampling_rate or 16_000, limits=limits),
    }
    read = []
    for index, row in enumerate(rows):
        place = f"[{index}]" if is_batch else ""
        where = f"prompt{place}"
        given = {
            kind: [load[kind](source, argument=f"{ARGUMENTS[kind]}{place}") for source in sources[index]]
            for kind, sources in row_media.items()
        }
        has_media = any(given.values())
        if is_ids(row):
            if apply_chat_template:
                raise InputError("apply_chat_template", True, f"must be False for token ids, as in {where}")
            if has_media:
                raise InputError(where, row, "must be a string or chat messages with images, videos or audio")
            read.append(Prompt(text="", ids=list(row), continues=bool(continue_final_message)))
        elif isinstance(row, str):
            if continue_final_message and apply_chat_template:
                rule = f"needs chat messages; {where} is a string"
                raise InputError("continue_final_message", True, rule)
            check_text(row, where, tokenizer if apply_chat_template else None)
            if apply_chat_template:
                if not row.strip() and not has_media:
                    raise InputError(where, row, "must contain some text, an image, a video or audio")
                read.append(from_string(row, given))
            else:
                for kind, loaded in given.items():
                    if placeholders is not None:
                        count_placeholders(row, where, kind, len(loaded), placeholders.get(kind))
                read.append(with_media(Prompt(text=row, continues=bool(continue_final_message)), given))
        else:
            of_text = None if sanitize_control_tokens else tokenizer
            sizes = limits if takes_sizes else None
            read.append(from_messages(row, where, given, load, tokenizer, of_text=of_text, sizes=sizes))
            last = read[-1].messages[-1]
            if last["role"] == "assistant" if continue_final_message is None else continue_final_message:
                if not last["content"] or last["content"][-1]["type"] != "text":
                    rule = (
                        "must end in text, which the output continues; or pass continue_final_message=False"
                    )
                    raise InputError(f"{where}[{len(row) - 1}]", row[-1], rule)
                read[-1].continues = True
    return read


def read_negatives(
    negative_prompt: object, prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase
) -> list[Prompt]:
    """Read the unconditional prompts of guidance: another text or none, with the same media.

    Raises:
        InputError: `negative_prompt` is neither one string nor a list of one string or None per prompt.
    """
    texts = [negative_prompt] * len(prompts) if isinstance(negative_prompt, str | None) else negative_prompt
    if not isinstance(texts, list | tuple) or len(texts) != len(prompts):
        rule = f"must be one string, or a list with one string or None for each of the {len(prompts)} prompts"
        raise InputError("negative_prompt", negative_prompt, rule)
    negatives = []
    for index, (text, prompt) in enumerate(zip(texts, prompts, strict=True)):
        where = f"negative_prompt[{index}]"
        check_text(text or "", where, tokenizer if prompt.text is None else None)
        if prompt.text is not None:
            negatives.append(with_media(Prompt(text=text or ""), prompt.media()))
        else:
            negative = from_string(text or "", prompt.media())
            if prompt.continues:  # the unconditional prompt has the same partial answer
                negative.messages.append(prompt.messages[-1])
                negative.continues = True
            negatives.append(negative)
    return negatives


def split_rows(prompt: object) -> list[Any]:
    """Split a prompt into rows, each a string or a message list."""
    if is_row(prompt):
        return [prompt]
    if isinstance(prompt, Sequence) and not isinstance(prompt, bytes):
        for index, row in enumerate(prompt):
            if not is_row(row):
                raise InputError(f"prompt[{index}]", row, "must be a string or a list of chat messages")
        return list(prompt)
    raise InputError("prompt", prompt, "must be a string, a list of chat messages, or a list of either")


def is_row(value: object) -> bool:
    """Whether a value is the prompt of one row."""
    return isinstance(value, str) or is_message_list(value) or is_ids(value)


def is_ids(value: object) -> bool:
    """Whether a value is one prompt of token ids: a list of integers."""
    return isinstance(value, list | tuple) and len(value) > 0 and all(map(is_integer, value))


def is_message_list(value: object) -> bool:
    """Whether a value is one conversation: a list of messages."""
    return isinstance(value, Sequence) and len(value) > 0 and isinstance(value[0], Mapping)


def media_per_row(media: object, argument: str, rows: int, is_batch: bool) -> list[list[object]]:
    """Assign media of one kind to rows: one list of sources per row."""
    if media is None:
        return [[] for _ in range(rows)]
    if not is_batch:
        several = isinstance(media, list | tuple) and not is_one_source(media, argument)
        return [list(media) if several else [media]]  # type: ignore[call-overload]
    if not isinstance(media, list | tuple) or len(media) != rows:
        given = f"{len(media)} entries" if isinstance(media, list | tuple) else media
        rule = (
            f"must be a list with one entry (a source, a list of sources or None) for each of {rows} prompts"
        )
        raise InputError(argument, given, rule)
    return [media_per_row(entry, argument, 1, False)[0] for entry in media]


def is_one_source(media: Sequence[object], argument: str) -> bool:
    """Whether a list holds the frames of one video, or a tuple the samples of one sound and their rate."""
    if argument == "audio":
        return isinstance(media, tuple) and len(media) == 2 and sum(map(is_array, media)) == 1
    return (
        argument == "videos"
        and len(media) > 0
        and all(isinstance(frame, Image.Image) or getattr(frame, "ndim", 0) == 3 for frame in media)
    )


def with_media(prompt: Prompt, given: Mapping[str, Sequence[Any]]) -> Prompt:
    """Add loaded media of each kind to a prompt, and return it."""
    for kind, held in prompt.media().items():
        held += given[kind]
    return prompt


def from_string(text: str, given: Mapping[str, Sequence[Any]]) -> Prompt:
    """Make a prompt of one user turn, with the media first."""
    parts: list[Json] = [{"type": kind} for kind in ARGUMENTS for _ in given[kind]]
    parts.append({"type": "text", "text": text})
    return with_media(Prompt([{"role": "user", "content": parts}]), given)


def from_messages(
    messages: Sequence[Message],
    where: str,
    given: Mapping[str, Sequence[object]],
    load: Loaders,
    tokenizer: PreTrainedTokenizerBase,
    *,
    of_text: PreTrainedTokenizerBase | None,
    sizes: MediaLimits | None = None,
) -> Prompt:
    """Load the media of messages; parts without data take the next of the given media of their kind.

    Special tokens of `of_text` are refused in text and in `FREE_KEYS`, those of `tokenizer` in other keys.
    Size options of images must be within the limits `sizes`; with None they are refused.
    """
    prompt = Prompt()
    found = prompt.media()
    waiting = {kind: list(media) for kind, media in given.items()}
    needed = dict.fromkeys(given, 0)
    for turn, message in enumerate(messages):
        place = f"{where}[{turn}]"
        if not isinstance(message, Mapping) or "role" not in message or not message.keys() & ASKED_OF_ALL:
            raise InputError(place, message, "must be a message with the keys 'role' and 'content'")
        keys = MESSAGE.given(message, place)
        role, content = keys.pop("role", None), keys.pop("content", None)
        check_text(role, f"{place}['role']", tokenizer)
        for name, value in keys.items():
            refused = of_text if name in FREE_KEYS else tokenizer
            check_template_key(name, value, f"{place}[{name!r}]", refused)
        content = [] if content is None and keys.get("tool_calls") else content
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(parts, Sequence) or isinstance(parts, bytes):
            raise InputError(f"{place}['content']", content, "must be a string or a list of parts")
        cleaned: list[Json] = []
        for part in parts:
            named = part.get("type") if isinstance(part, Mapping) else None
            if not isinstance(named, str) or named not in PARTS:
                raise InputError(place, part, TYPES)
            options = PARTS[named].given(part, place)
            del options["type"]
            if named == "text":
                text = options.get("text")
                check_text(text, place, of_text)
                cleaned.append({"type": "text", "text": text})
                continue
            kind = named.removesuffix("_url").removeprefix("input_")
            source = take_source(options, named, place)
            if kind == "image":
                prompt.sizes.append(checked_size(options, place, sizes))
            elif options and source is None:
                rule = f"needs a part that holds its {kind}; for other parts pass num_frames or fps"
                raise InputError(f"{place}[{next(iter(options))!r}]", part, rule)
            if source is None:
                needed[kind] += 1
                if not waiting[kind]:
                    rule = f"must have one {kind} for each {kind} part of {where}"
                    raise InputError(ARGUMENTS[kind], counted(len(given[kind]), kind), rule)
                media = waiting[kind].pop(0)
            elif kind == "video" and options:  # they replace those of the call
                frames = {"num_frames": options.get("nframes"), "fps": options.get("fps")}
                media = load[kind](source, argument=place, **frames)
            else:
                media = load[kind](source, argument=place)
            found[kind].append(media)
            cleaned.append({"type": kind})
        prompt.messages.append({"role": role, "content": cleaned, **keys})
    for kind, left in waiting.items():
        if left and needed[kind]:
            total = needed[kind] + len(left)
            rule = f"must have one {kind} for each of the {needed[kind]} {kind} parts of {where}"
            raise InputError(ARGUMENTS[kind], counted(total, kind), rule)
        if left:  # without placeholders, media go in front of the first user message
            first = next((m for m in prompt.messages if m["role"] == "user"), prompt.messages[0])
            first["content"][:0] = [{"type": kind} for _ in left]
            found[kind][:0] = left
            if kind == "image":
                prompt.sizes[:0] = [{} for _ in left]
    if not any(prompt.sizes):
        prompt.sizes.clear()
    return prompt


def counted(number: int, kind: str) -> str:
    """Describe a number of media of one kind for an error message."""
    return f"{number} {'sounds' if kind == 'audio' else ARGUMENTS[kind]}"


def take_source(options: Json, named: str, place: str) -> object:
    """Remove the image, video or audio from the keys of a part and return it; None if there is none.

    Raises:
        InputError: the part has two sources, an `image_url` that is not a URL, or an `input_audio` without
            data.
    """
    held = [key for key in (named, *SOURCES) if key in options]
    if len(held) > 1:
        raise InputError(place, held, "must hold its data under one key")
    if not held:
        return None
    source = options.pop(held[0])
    if named == "input_audio":
        where = f"{place}[{named!r}]"
        data = INPUT_AUDIO.given(source, where).get("data") if isinstance(source, Mapping) else None
        if not isinstance(data, str):
            raise InputError(where, source, "must be a dict with base64 under 'data'")
        return {"base64": data}
    if not named.endswith("_url"):
        return {"base64": source} if held == ["base64"] else source
    where = f"{place}[{named!r}]"
    url = MEDIA_URL.given(source, where).get("url") if isinstance(source, Mapping) else source
    if not isinstance(url, str) or not url.lower().startswith(("data:", "https://", "http://")):
        raise InputError(where, url, "must be a data:, https:// or http:// URL")
    return url


def check_template_key(
    name: str, value: object, where: str, tokenizer: PreTrainedTokenizerBase | None
) -> None:
    """Raise InputError for the value of a message key with a wrong type or with special tokens."""
    if name != "tool_calls":
        check_text(value, where, tokenizer)
    elif not isinstance(value, list | tuple) or not all(isinstance(call, Mapping) for call in value):
        raise InputError(where, value, "must be a list of calls, each a dict")
    else:
        check_texts(value, where, tokenizer)


def check_texts(value: object, where: str, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
    """Check all texts in a JSON value; raises the errors of `check_text`."""
    if isinstance(value, Mapping):
        value = [*value.keys(), *value.values()]
    if isinstance(value, list | tuple):
        for one in value:
            check_texts(one, where, tokenizer)
    elif not isinstance(value, int | float | None):
        check_text(value, where, tokenizer)


def check_text(text: object, where: str, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
    """Raise InputError for text that no tokenizer can read, or that contains special tokens of a tokenizer.

    Special tokens in a chat message would end the turn and start another one.
    """
    if not isinstance(text, str):
        raise InputError(where, text, "must be a string")
    if "\0" in text:
        raise InputError(where, text, "must not contain NUL characters")
    require_unicode(where, text)
    for token in () if tokenizer is None else tokenizer.all_special_tokens:
        if len(token) > 2 and token in text:
            templated = "pass apply_chat_template=False if the prompt is already templated"
            raise InputError(
                where, text, f"must not contain the model's special token {token!r}; {templated}"
            )


def count_placeholders(text: str, where: str, kind: str, given: int, placeholder: str | None) -> None:
    """Raise InputError unless a templated prompt has one placeholder for each image, video or sound."""
    found = text.count(placeholder) if placeholder else 0
    if found != given:
        rule = f"must have one {kind} for each {placeholder or f'{kind} placeholder'} in {where}, {found}"
        raise InputError(ARGUMENTS[kind], counted(given, kind), rule)


def apply_template(
    prompt: Prompt, processor: Processor, tokenizer: PreTrainedTokenizerBase, variables: Mapping[str, object]
) -> str:
    """Return the templated text of a prompt, with stand-ins for special tokens in the text of messages.

    Args:
        prompt: the prompt of one row.
        processor: the processor or tokenizer with the chat template.
        tokenizer: the tokenizer of the processor.
        variables: variables of the chat template.

    Raises:
        InputError: there is no template, it refuses the conversation, or it does not read a variable.
    """
    if prompt.text is not None:
        if variables:
            rule = "cannot be combined with apply_chat_template=False; the prompts are already templated"
            raise InputError("chat_template_kwargs", variables, rule)
        return prompt.text
    if getattr(processor, "chat_template", None) is None:
        rule = "must be False, with templated prompts; this model has no chat template"
        raise InputError("apply_chat_template", True, rule)
    check_variables(variables, processor, tokenizer)
    calls = any(message.get("tool_calls") for message in prompt.messages)
    if calls and "tool_calls" not in str(processor.chat_template):
        rule = "must have no tool_calls; the chat template of this model does not read them"
        raise InputError("prompt", "messages with tool_calls", rule)
    if prompt.continues and variables.get(NEW_TURN):
        rule = f"cannot set {NEW_TURN} if the last message is continued; or pass continue_final_message=False"
        raise InputError("chat_template_kwargs", variables, rule)
    messages = [
        {
            **m,
            **{name: spelled(m[name], tokenizer) for name in FREE_KEYS & m.keys()},
            "content": [spelled_part(part, tokenizer) for part in m["content"]],
        }
        for m in prompt.messages
    ]
    if processor is tokenizer:  # text templates take strings, not parts
        messages = [{**m, "content": "".join(part["text"] for part in m["content"])} for m in messages]
    how = {NEW_TURN: not prompt.continues, **variables}
    if TOOLS in how:
        how[TOOLS] = spelled(how[TOOLS], tokenizer)
    if prompt.continues:
        how["continue_final_message"] = True
    try:
        return str(processor.apply_chat_template(messages, tokenize=False, **how))
    except (TemplateError, TypeError, ValueError) as error:
        # raised for an unexpected order of turns, and for a continued message that the template changes
        raise InputError("prompt", messages, f"was refused by the chat template: {error}"[:200]) from error


def spelled(value: Any, tokenizer: PreTrainedTokenizerBase) -> Any:
    """Replace special tokens in all texts of a JSON value by stand-ins."""
    if isinstance(value, Mapping):
        return {spelled(key, tokenizer): spelled(one, tokenizer) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [spelled(one, tokenizer) for one in value]
    return with_stand_ins(value, tokenizer) if isinstance(value, str) else value


def spelled_part(part: Json, tokenizer: PreTrainedTokenizerBase) -> Json:
    """Replace special tokens in the text of a message part by stand-ins."""
    return {**part, "text": with_stand_ins(part["text"], tokenizer)} if part["type"] == "text" else part


def check_variables(variables: object, processor: Processor, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise InputError for a variable that the template does not read, or with special tokens."""
    if not isinstance(variables, Mapping):
        raise InputError("chat_template_kwargs", variables, "must be a dict of chat template variables")
    known = template_variables(processor) if variables else set()
    for name, value in variables.items():
        where = f"chat_template_kwargs[{name!r}]"
        if name not in known:
            rule = f"is not read by the chat template; a variable {did_you_mean(name, known)}"
            raise InputError(where, value, rule)
        if name == TOOLS:
            if not isinstance(value, list | tuple) or not all(isinstance(tool, Mapping) for tool in value):
                raise InputError(where, value, "must be a list of tools, each a dict")
            check_texts(value, where)
        elif not isinstance(value, str | int | float | None):
            raise InputError(where, value, "must be a string, a number, a boolean or None")
        elif isinstance(value, str):
            check_text(value, where, tokenizer)


def template_variables(processor: Processor) -> set[str]:
    """Return the variables of a chat template that callers may set."""
    template = getattr(processor, "chat_template", None) or ""
    environment = Environment(extensions=["jinja2.ext.loopcontrols"])  # noqa: S701  # parsed, never rendered
    read: set[str] = set()
    for text in template.values() if isinstance(template, dict) else [template]:
        read |= find_undeclared_variables(environment.parse(GENERATION.sub("", text)))
    parameters = inspect.signature(processor.apply_chat_template).parameters.keys() - {TOOLS}
    own = {*parameters, *environment.globals}
    return (read - own - OF_TRANSFORMERS) | {NEW_TURN}
