"""Keys of chat messages and of their parts, in the forms of transformers, OpenAI and Qwen.

Pipelines, the server and the reader of training data check messages by these tables. A key acts, reaches the
chat template, is ignored, or is refused by name. None asks for nothing, in every key.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mmspec.errors import InputError
from mmspec.registry import did_you_mean

__all__ = [
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
"""Keys with the values of each that ask for nothing."""

SOURCES = ("url", "path", "base64")
"""Keys of a part that may hold its image or video, beside the key that is named like the kind of part."""

PIXEL_OPTIONS = ("min_pixels", "max_pixels", "resized_height", "resized_width")
"""Options of an image in Qwen's format, which say how large the model is to see it."""

#: Keys of messages that chat templates read.
TEMPLATE_KEYS: Neutral = {
    "name": (),
    "tool_call_id": (),
    "tool_calls": ([],),
    **dict.fromkeys(("reasoning", "reasoning_content", "thinking"), ("",)),
}

#: Keys of messages that nothing here supports.
UNSUPPORTED_KEYS: Neutral = {
    **dict.fromkeys(("audio", "function_call", "refusal"), ()),
    "annotations": ([],),
    **dict.fromkeys(("partial", "prefix"), (False,)),
}


@dataclass(frozen=True)
class Keys:
    """Keys of a message, or of one kind of part.

    Attributes:
        read: keys that act or reach the chat template.
        refused: keys that are refused, with the values of each that are taken because they ask for nothing.
        ignored: keys that no answer depends on.
    """

    read: tuple[str, ...]
    refused: Neutral = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()

    def unread(self, data: Mapping[str, Any]) -> str | None:
        """Return the first key that is given, not read, and asks for something; None if there is none."""
        for name, value in data.items():
            if value is None or name in self.read or name in self.ignored:
                continue
            if not asks_nothing(value, self.refused.get(name, ())):
                return name
        return None

    def given(self, data: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Return the keys that are read and not None.

        Raises:
            InputError: a key that is refused, or that does not exist; the message names it.
        """
        name = self.unread(data)
        if name is not None:
            if name in self.refused:
                values = (f", or pass {value!r}" for value in self.refused[name])
                allowed = f"not supported: leave it out{''.join(values)}"
            else:
                known = {*self.read, *self.refused, *self.ignored}
                allowed = f"there is no such key; {did_you_mean(name, known)}"
            raise InputError(f"{where}[{name!r}]", data[name], allowed)
        return {key: value for key, value in data.items() if key in self.read and value is not None}


MESSAGE = Keys(("role", "content", *TEMPLATE_KEYS), UNSUPPORTED_KEYS)

#: Of the object in an `image_url` or `video_url` part, OpenAI's and vLLM's.
MEDIA_URL = Keys(("url",), {"detail": ("auto", "high")})

IGNORED = frozenset({"cache_control", "prompt_cache_breakpoint"})
IMAGE_REFUSED: Neutral = {"modalities": ("image",)}
VIDEO_OPTIONS = ("fps", "nframes")
VIDEO_REFUSED: Neutral = dict.fromkeys(
    (*PIXEL_OPTIONS, "total_pixels", "min_frames", "max_frames", "video_start", "video_end"), ()
)

#: By the type of the part.
PARTS = {
    "text": Keys(("type", "text"), {"annotations": ([],)}, IGNORED),
    "image": Keys(
        ("type", "image", *SOURCES, *PIXEL_OPTIONS), {**MEDIA_URL.refused, **IMAGE_REFUSED}, IGNORED
    ),
    "image_url": Keys(("type", "image_url", *PIXEL_OPTIONS), IMAGE_REFUSED, IGNORED),
    "video": Keys(("type", "video", *SOURCES, *VIDEO_OPTIONS), VIDEO_REFUSED, IGNORED),
    "video_url": Keys(("type", "video_url", *VIDEO_OPTIONS), VIDEO_REFUSED, IGNORED),
}


def asks_nothing(value: Any, neutral: Iterable[Any]) -> bool:
    """True if a value equals one of those that ask for nothing; True is not 1."""
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral)
