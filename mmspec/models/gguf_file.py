"""GGUF files: a whole checkpoint of llama.cpp, which transformers reads into an ordinary model."""

from __future__ import annotations

from pathlib import Path

from transformers.utils.import_utils import is_gguf_available

from mmspec.errors import CheckpointError, MissingDependencyError

__all__ = ["check_gguf", "split_gguf"]

SUFFIX, MAGIC = ".gguf", b"GGUF"


def split_gguf(source: object) -> tuple[object, dict[str, str]]:
    """A path of a GGUF file as the folder and the keyword `gguf_file` of transformers; others as they are."""
    if not isinstance(source, str | Path) or not str(source).endswith(SUFFIX) or Path(source).is_dir():
        return source, {}
    path = Path(source)
    return str(path.parent), {"gguf_file": path.name}


def check_gguf(folder: Path, name: str) -> None:
    """Check a GGUF file of a folder, or of a hub repository, before it is read.

    Raises:
        CheckpointError: the folder has none of that name, or it is no such file.
        MissingDependencyError: the package that reads it is not installed.
    """
    path = folder / name
    if folder.is_dir() and not path.is_file():
        others = ", ".join(sorted(one.name for one in folder.glob(f"*{SUFFIX}"))) or "none"
        raise CheckpointError("gguf_file", name, f"a file in {folder}; GGUF files there: {others}")
    if path.is_file():
        with path.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise CheckpointError("gguf_file", str(path), "a GGUF file, which begins with its name")
    if not is_gguf_available():
        raise MissingDependencyError(f"{path.name} is read by the package gguf: pip install gguf")
