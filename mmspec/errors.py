"""Exceptions that mmspec raises: one base class, one child per thing that can be wrong.

Every message says which argument was wrong, what was received (shortened) and what is allowed.
"""

from __future__ import annotations

__all__ = [
    "CheckpointError",
    "InputError",
    "MMSpecError",
    "MediaError",
    "MissingDependencyError",
    "NoRoomError",
    "NumericalError",
    "PipelineBusyError",
    "UnknownArgumentError",
    "UnsupportedModelError",
    "shorten",
]

SHOWN_CHARACTERS = 80
MAX_SHOWN_BITS = 256


class MMSpecError(Exception):
    """Base class of everything mmspec raises on purpose."""


class InputError(MMSpecError, ValueError):
    """A value the caller passed cannot be used.

    Args:
        argument: the name of the argument, with an index where it is one of several (`images[2]`).
        got: the value as received; it is shortened, never echoed whole.
        allowed: a phrase that says what is allowed or what to do instead.
    """

    def __init__(self, argument: str, got: object, allowed: str) -> None:
        self.argument = argument
        super().__init__(f"{argument}: got {shorten(got)}; {allowed}")


class MediaError(InputError):
    """An image, a video or a URL cannot be read, or is over a limit."""


class UnknownArgumentError(InputError, TypeError):
    """A keyword that does not exist; the message names the nearest one that does."""


class CheckpointError(InputError):
    """A checkpoint is missing, damaged, or does not fit the model it is for."""


class UnsupportedModelError(MMSpecError, ValueError):
    """The model needs something that this library cannot do; the message says what and why."""


class NumericalError(MMSpecError, ArithmeticError):
    """The target's logits are not numbers, so there is no distribution to decode from.

    Args:
        row: index of the request in the batch.
        position: index of the output token that could not be chosen.
        what: a phrase that says what was found and where to look.
    """

    def __init__(self, row: int, position: int, what: str) -> None:
        self.row = row
        self.position = position
        self.output: object = None  # what the other rows gave, where a pipeline raises this
        super().__init__(f"row {row}, output token {position}: {what}")


class NoRoomError(MMSpecError, RuntimeError):
    """A request does not fit into a running batch now; it does when others have left."""


class PipelineBusyError(MMSpecError, RuntimeError):
    """The pipeline is already generating, in another thread or in a callback of this one."""


class MissingDependencyError(MMSpecError, ImportError):
    """An optional package is needed; the message holds the command that installs it."""


def shorten(value: object, limit: int = SHOWN_CHARACTERS) -> str:
    """Describe a value in at most `limit` characters; arrays and tensors by type and shape alone."""
    shape = getattr(value, "shape", None)
    if shape is not None:
        text = f"{type(value).__name__} of shape {tuple(shape)}, {getattr(value, 'dtype', '?')}"
    elif isinstance(value, str | bytes):
        text = repr(value[:limit])  # slicing first: a repr of megabytes is work and noise
        if len(value) > limit:
            text += f" ({len(value)} {'characters' if isinstance(value, str) else 'bytes'})"
            return text[: limit // 2] + "..." + text[-limit // 2 + 3 :]
    elif isinstance(value, int) and value.bit_length() > MAX_SHOWN_BITS:
        return f"an integer of {value.bit_length()} bits"  # python refuses to print numbers that long
    else:
        text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
