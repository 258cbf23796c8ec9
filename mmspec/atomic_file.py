"""Files and folders that are there complete or not at all."""

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
    """Yield a temporary path beside `path`, which takes its place when the block ends well, else it goes.

    Readers find the old file or the new one, never a part, also if the writer is killed. Errors of the file
    system are those of `open` and `os.replace`.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def new_folder(out: Path, argument: str = "out", kind: type[InputError] = InputError) -> Iterator[Path]:
    """Yield a temporary folder beside `out`; it takes the name when the block ends well, else it goes.

    Args:
        out: the folder.
        argument: what it is called in messages.
        kind: of the errors.

    Raises:
        InputError: `out` is there already and not empty, or cannot be written.
    """
    allowed = "a folder that is new or empty"
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise kind(argument, str(out), allowed)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    except OSError as error:
        raise kind(argument, str(out), f"{allowed} ({error.strerror})") from error
    try:
        yield temporary
        temporary.chmod(0o777 & ~_umask())  # mkdtemp makes it private
        os.replace(temporary, out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
