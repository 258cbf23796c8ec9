"""Keys of chat messages and of their parts, in the formats of transformers, OpenAI and Qwen.

Pipelines, the server and the training data reader check messages against these tables. Each key is read by
mmspec, passed to the chat template, ignored, or refused by name. Keys whose value is None are skipped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mmspec.errors import InputError
from mmspec.registry import did_you_mean

__all__ = [
    "INPUT_AUDIO",
    "MEDIA_URL",
    "MESSAGE",
    "PARTS",
    "PIXEL_OPTIONS",
    "SOURCES",
    "TEMPLATE_KEYS",
    "UNSUPPORTED_KEYS",
    "Keys",
    "asks_nothing",
]

Neutral = Mapping[str, tuple[Any, ...]]
"""Keys, each with the values that have no effect."""

SOURCES = ("url", "path", "base64")
"""Keys of a part that may hold its media, in addition to the key named after the type of the part."""

PIXEL_OPTIONS = ("min_pixels", "max_pixels", "resized_height", "resized_width")
"""Options of an image in Qwen's format, which set the size at which the model reads it."""

#: Keys of messages that chat templates read.
TEMPLATE_KEYS: Neutral = {
    "name": (),
    "tool_call_id": (),
    "tool_calls": ([],),
    **dict.fromkeys(("reasoning", "reasoning_content", "thinking"), ("",)),
}

#: Keys of messages that mmspec does not support.
UNSUPPORTED_KEYS: Neutral = {
    **dict.fromkeys(("audio", "function_call", "refusal"), ()),
    "annotations": ([],),
    **dict.fromkeys(("partial", "prefix"), (False,)),
}


@dataclass(frozen=True)
class Keys:
    """Keys of a message, or of one kind of part.

    Attributes:
        read: keys that mmspec reads or passes to the chat template.
        refused: keys that are refused, each with the values that are accepted because they have no effect.
        ignored: keys that do not affect the output.
    """

    read: tuple[str, ...]
    refused: Neutral = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()

    def unread(self, data: Mapping[str, Any]) -> str | None:
        """Return the first key that is neither read nor ignored and has an effect; None if there is none."""
        for name, value in data.items():
            if value is None or name in self.read or name in self.ignored:
                continue
            if not asks_nothing(value, self.refused.get(name, ())):
                return name
        return None

    def given(self, data: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Return the keys that are read and whose value is not None.

        Raises:
            InputError: a key is refused or does not exist; the message names it.
        """
        name = self.unread(data)
        if name is not None:
            if name in self.refused:
                values = (f", or pass {value!r}" for value in self.refused[name])
                rule = f"is not supported; leave it out{''.join(values)}"
            else:
                known = {*self.read, *self.refused, *self.ignored}
                rule = f"is not a known key; the key {did_you_mean(name, known)}"
            raise InputError(f"{where}[{name!r}]", data[name], rule)
        return {key: value for key, value in data.items() if key in self.read and value is not None}


MESSAGE = Keys(("role", "content", *TEMPLATE_KEYS), UNSUPPORTED_KEYS)

#: Keys of the object in an `image_url`, `video_url` or `audio_url` part (OpenAI, vLLM).
MEDIA_URL = Keys(("url",), {"detail": ("auto", "high")})

#: Keys of the object in an `input_audio` part (OpenAI). The content of the file decides its format.
INPUT_AUDIO = Keys(("data",), ignored=frozenset({"format"}))

IGNORED = frozenset({"cache_control", "prompt_cache_breakpoint"})
IMAGE_REFUSED: Neutral = {"modalities": ("image",)}
VIDEO_OPTIONS = ("fps", "nframes")
VIDEO_REFUSED: Neutral = dict.fromkeys(
    (*PIXEL_OPTIONS, "total_pixels", "min_frames", "max_frames", "video_start", "video_end"), ()
)

#: Keys of each type of part.
PARTS = {
    "text": Keys(("type", "text"), {"annotations": ([],)}, IGNORED),
    "image": Keys(
        ("type", "image", *SOURCES, *PIXEL_OPTIONS), {**MEDIA_URL.refused, **IMAGE_REFUSED}, IGNORED
    ),
    "image_url": Keys(("type", "image_url", *PIXEL_OPTIONS), IMAGE_REFUSED, IGNORED),
    "video": Keys(("type", "video", *SOURCES, *VIDEO_OPTIONS), VIDEO_REFUSED, IGNORED),
    "video_url": Keys(("type", "video_url", *VIDEO_OPTIONS), VIDEO_REFUSED, IGNORED),
    "audio": Keys(("type", "audio", *SOURCES), {}, IGNORED),
    "audio_url": Keys(("type", "audio_url"), {}, IGNORED),
    "input_audio": Keys(("type", "input_audio"), {}, IGNORED),
}


def asks_nothing(value: Any, neutral: Iterable[Any]) -> bool:
    """Whether a value equals one of the values without effect; True does not equal 1 here."""
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral)
