"""Decoding of videos and audio in a child process, so that a bad file cannot do harm."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, TypeVar

from mmspec.errors import MediaError, MissingDependencyError
from mmspec.media.limits import Described, MediaLimits
from mmspec.media.source import file_format

__all__ = ["Child", "decode", "require_pyav"]

T = TypeVar("T")

SLOWEST = 30  # elapsed seconds per second of processor time, on a machine with much other work


class Refused(Exception):
    """The child read the file, which holds nothing to decode; the message is the rule of the error."""


class Child:
    """The pipes of a decoding process; the protocol is in `decode_child.py`."""

    def __init__(self, stdin: IO[bytes], stdout: IO[bytes]) -> None:
        self._stdin = stdin
        self._stdout = stdout

    def open(self, data: bytes, kind: str, **settings: float) -> dict[str, Any]:
        """Send a file ("video" or "audio") and return the header that describes it.

        Raises:
            Refused: the file holds no such stream.
        """
        self.write_line({"size": len(data), "kind": kind, **settings})
        self._stdin.write(data)
        self._stdin.flush()
        header = json.loads(self._stdout.readline(1000))
        if "refused" in header:
            raise Refused(header["refused"])
        return dict(header)

    def write_line(self, value: object) -> None:
        """Send a value as one line of JSON."""
        self._stdin.write(json.dumps(value).encode() + b"\n")
        self._stdin.flush()

    def read(self, count: int) -> bytes:
        """Receive a number of bytes.

        Raises:
            EOFError: the child ended before.
        """
        data = self._stdout.read(count)
        if len(data) < count:
            raise EOFError
        return data


def require_pyav(media: str) -> None:
    """Check that PyAV is installed, without importing it.

    Raises:
        MissingDependencyError: it is not.
    """
    if importlib.util.find_spec("av") is None:
        raise MissingDependencyError(f"PyAV, which reads {media}, is not installed; run `pip install av`")


def decode(data: bytes, converse: Callable[[Child], T], *, argument: str, limits: MediaLimits) -> T:
    """Run a conversation with a new decoding process, which is ended in every case.

    Args:
        data: the file, for error messages.
        converse: exchanges data with the child and checks everything that it sends.
        argument: name of the argument in error messages.
        limits: limits; `decode_timeout_s` and `decode_memory_bytes` apply.

    Raises:
        MediaError: the file is damaged, holds nothing to decode, or needs more time or memory than allowed.
    """
    # Not multiprocessing: its spawn runs the user's main script again, its fork copies locks that other
    # threads hold.
    program = str(Path(__file__).with_name("decode_child.py"))
    numbers = (limits.decode_timeout_s, int(limits.decode_memory_bytes))
    command = [sys.executable, "-P", program, *map(str, numbers)]
    one_thread = {
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }  # each thread takes address space of the limited process
    is_late = threading.Event()  # no processor time: the child waits for ever, or has no processor
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **one_thread},
    ) as child:

        def end() -> None:
            is_late.set()
            child.kill()

        timer = threading.Timer(SLOWEST * limits.decode_timeout_s, end)
        timer.daemon = True
        timer.start()
        found = Described(f"{file_format(data)} data")
        try:
            if child.stdin is None or child.stdout is None:
                raise EOFError("the child has no pipes")
            return converse(Child(child.stdin, child.stdout))
        except Refused as refusal:
            raise MediaError(argument, found, str(refusal)) from None
        except (BrokenPipeError, EOFError, json.JSONDecodeError) as error:
            child.kill()  # has no effect on one that has ended, whose own signal is returned
            if is_late.is_set() or child.wait() == -getattr(signal, "SIGPROF", 0):
                rule = limits.rule("decode_timeout_s", "must be decoded within at most {} seconds")
            else:
                text = "is damaged, truncated, or needs more than {} bytes of memory to decode"
                rule = limits.rule("decode_memory_bytes", text)
            raise MediaError(argument, found, rule) from error
        finally:
            timer.cancel()
            child.kill()
            timer.join()  # ends at once; no thread outlives the call
