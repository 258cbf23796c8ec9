"""Weights in shards: an index that says which tensor is in which of the files beside it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mmspec.errors import CheckpointError

__all__ = ["INDEX", "check_indexed", "read_index", "read_shards"]

INDEX = ".index.json"  # behind the name of a file that is in shards
MAX_INDEX_BYTES = 100_000_000


def read_index(index: Path) -> dict[str, str]:
    """The names of tensors in shards, each with its file, which lies beside the index.

    Raises:
        CheckpointError: it is too large, or says something else.
    """
    try:
        if index.stat().st_size > MAX_INDEX_BYTES:
            raise ValueError(f"at most {MAX_INDEX_BYTES:,} bytes")
        stored: Any = json.loads(index.read_text(encoding="utf-8"))
        table = stored.get("weight_map") if isinstance(stored, dict) else None
        if not isinstance(table, dict) or not table:
            raise ValueError("a JSON object with the key 'weight_map'")
        if strange := [one for one in table.values() if not isinstance(one, str) or Path(one).name != one]:
            raise ValueError(f"{strange[0]!r} is no name of a file beside it")
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            str(index), str(error), "an index of shards, as transformers writes it"
        ) from error
    return table


def read_shards(index: Path, read: Callable[[Path], Mapping[str, Any]]) -> dict[str, Any]:
    """The tensors that an index names.

    Args:
        index: its path.
        read: gives the content of one file.

    Raises:
        CheckpointError: a shard is missing, or has not what the index says; or as `read`.
    """
    shards: dict[str, Mapping[str, Any]] = {}
    tensors = {}
    for name, file in read_index(index).items():
        path = index.parent / file
        if file not in shards:
            if not path.is_file():
                raise CheckpointError(str(index), file, "names of files that are beside it: this one is not")
            shards[file] = read(path)
        if name not in shards[file]:
            allowed = f"a shard that has {name}, as {index.name} says"
            raise CheckpointError(str(path), f"{len(shards[file])} other tensors", allowed)
        tensors[name] = shards[file][name]
    return tensors


def check_indexed(folder: Path, name: str) -> None:
    """Raise CheckpointError if a folder has shards of a file and no index of them."""
    stem, _, kind = name.rpartition(".")
    if shards := sorted(folder.glob(f"{stem}-*-of-*.{kind}")):
        allowed = f"the file {name + INDEX} beside it, which says what is in which shard"
        raise CheckpointError(str(folder), shards[0].name, allowed)
