"""Atomic writes: a file or folder appears complete or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mmspec.errors import InputError

__all__ = ["atomic_file", "new_folder"]


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`. It replaces `path` on success and is deleted on an error.

    Readers see the old file or the complete new one, even if the writer is killed. Errors of the file system
    are those of `open` and `os.replace`.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def new_folder(out: Path, argument: str = "out", kind: type[InputError] = InputError) -> Iterator[Path]:
    """Yield a temporary folder beside `out`. It is renamed to `out` on success and deleted on an error.

    Args:
        out: the folder to create.
        argument: name of `out` in error messages.
        kind: class of the errors.

    Raises:
        InputError: `out` exists and is not empty, or cannot be written.
    """
    rule = "must be a new or an empty folder"
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise kind(argument, str(out), rule)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    except OSError as error:
        raise kind(argument, str(out), f"{rule} that can be written ({error.strerror})") from error
    try:
        yield temporary
        temporary.chmod(0o777 & ~_umask())  # mkdtemp allows the owner alone
        os.replace(temporary, out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
