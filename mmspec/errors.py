"""Exceptions that mmspec raises: one base class, one child per thing that can be wrong.

Every message names the argument and its rule first, then the value that was received, shortened:
"temperature must be between 0 (greedy) and 10000; got -1".
"""

from __future__ import annotations

from pathlib import Path

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
    "how_to_install",
    "shorten",
]

CLONE = Path(__file__).resolve().parents[1]
SHOWN_CHARACTERS = 80
MAX_SHOWN_BITS = 256


class MMSpecError(Exception):
    """Base class of all exceptions that mmspec raises on purpose."""


class InputError(MMSpecError, ValueError):
    """A value that the caller passed cannot be used.

    The message is "{argument} {rule}; got {got}".

    Args:
        argument: the name of the argument, with an index where it is one of several (`images[2]`).
        got: the value as received. The message shortens it.
        rule: what is allowed or what to do instead, beginning with a verb ("must be at least 1").
    """

    def __init__(self, argument: str, got: object, rule: str) -> None:
        self.argument = argument
        super().__init__(f"{argument} {rule}; got {shorten(got)}")


class MediaError(InputError):
    """An image, a video or a URL cannot be read, or is over a limit."""


class UnknownArgumentError(InputError, TypeError):
    """A keyword that does not exist; the message names the nearest one that does."""


class CheckpointError(InputError):
    """A checkpoint is missing, damaged, or does not fit the model it is for."""


class UnsupportedModelError(MMSpecError, ValueError):
    """The model needs a feature that mmspec lacks; the message names it."""


class NumericalError(MMSpecError, ArithmeticError):
    """The target's logits are NaN or infinite, so that no token can be chosen.

    Args:
        row: index of the request in the batch.
        position: index of the output token that could not be chosen.
        what: what was found, and where to look.
    """

    def __init__(self, row: int, position: int, what: str) -> None:
        self.row = row
        self.position = position
        self.output: object = None  # outputs of the other rows, where a pipeline raises this
        super().__init__(f"row {row}, output token {position}: {what}")


class NoRoomError(MMSpecError, RuntimeError):
    """The running batch is full; enter the request again after a row has left."""


class PipelineBusyError(MMSpecError, RuntimeError):
    """The pipeline is already generating, in another thread or in a callback of this call."""


class MissingDependencyError(MMSpecError, ImportError):
    """An optional package is missing; the message has the command that installs it."""


def how_to_install(extra: str | None = None) -> str:
    """Return how to install mmspec with an extra: from the clone that it runs in, or from a release."""
    extras = "" if extra is None else f"[{extra}]"
    if (CLONE / "pyproject.toml").is_file():
        return f"pip install -e '.{extras}' in the root of the clone"
    return f"pip install 'mmspec{extras}'"


def shorten(value: object, limit: int = SHOWN_CHARACTERS) -> str:
    """Describe a value in at most `limit` characters; arrays and tensors by their type and shape."""
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
