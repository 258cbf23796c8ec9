"""Names of models that are local paths, not hub ids, and the nearest folder where there is none of a name."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

__all__ = ["advice", "is_path", "nearest"]

# of the reference models, which come with a clone of the repository
REFERENCE = re.compile(r"assets/.*|scenes-[^/]*|smollm2-(ppd|mtp)")
REPOSITORY = re.compile(r"\w[\w.-]*/[\w.-]+")  # ids of the hub that may be paths too
CLONE = Path(__file__).resolve().parents[2] / "assets"
FILES = ("config.json", "adapter_config.json", "model_index.json")  # one of them is in every repository
NEAR = 0.7  # likeness of names, of difflib
MOST_NAMED = 8  # folders in a message


def is_path(name: str) -> bool:
    """Whether the name of a model is that of a local path, which no hub is asked for.

    A hub id is a name, or two with a slash between them. Two are a path where the first is a folder here,
    unless the hub's cache has a repository of that id.
    """
    if name.startswith((".", "/", "~")) or "\\" in name or name.count("/") > 1 or name.endswith("/"):
        return True
    if REFERENCE.fullmatch(name):
        return True
    return "/" in name and Path(name).parent.is_dir() and not is_cached(name)


def is_cached(name: str) -> bool:
    """Whether the hub's cache has a repository of that id."""
    try:
        return any(isinstance(try_to_load_from_cache(name, file), str) for file in FILES)
    except HFValidationError:
        return False


def nearest(name: str) -> Path | None:
    """The folder whose path is nearest to one that does not exist; None if none is near."""
    wanted = Path(name).expanduser()
    if wanted.is_dir():
        return wanted
    given = first_missing(wanted)
    if (found := near_in(given.parent, given.name)) is not None:
        whole = found / wanted.relative_to(given)
        return whole if whole.is_dir() else found
    found = near_in(CLONE, wanted.name) if REFERENCE.fullmatch(name) else None
    here = Path.cwd()
    return found.relative_to(here) if found is not None and found.is_relative_to(here) else found


def near_in(parent: Path, name: str) -> Path | None:
    """The folder in another whose name is nearest; None if none is near."""
    known = {folder.name.lower(): folder for folder in folders_in(parent)}
    near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=NEAR)
    return known[near[0]] if near else None


def advice(name: str) -> str:
    """Words about a path that does not exist, for messages: the nearest folder, or those that are there."""
    given = first_missing(Path(name).expanduser())
    if (near := nearest(name)) is not None:
        advice = f"did you mean {str(near)!r}?"
    else:
        shown = sorted(folder.name for folder in folders_in(given.parent))
        more = f" and {len(shown) - MOST_NAMED} more" if len(shown) > MOST_NAMED else ""
        advice = f"folders in {str(given.parent)!r}: {', '.join(shown[:MOST_NAMED]) + more or 'none'}"
    if REPOSITORY.fullmatch(name) and not REFERENCE.fullmatch(name):
        advice += f"; for the hub's repository of this name run `hf download {name}` first"
    return advice


def first_missing(path: Path) -> Path:
    """The first part of a path that is no folder."""
    while not path.parent.is_dir():
        path = path.parent
    return path


def folders_in(parent: Path) -> list[Path]:
    """The folders in one, except hidden ones; none if it cannot be read."""
    try:
        return [item for item in parent.iterdir() if not item.name.startswith(".") and item.is_dir()]
    except OSError:
        return []
