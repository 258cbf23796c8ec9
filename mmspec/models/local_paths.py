"""Local paths among the names of models, and the nearest folder to a path that does not exist."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

__all__ = ["advice", "is_path", "nearest"]

# names of the reference models, which are part of a clone of the repository
REFERENCE = re.compile(r"assets/.*|scenes-[^/]*|smollm2-(ppd|mtp)")
REPOSITORY = re.compile(r"\w[\w.-]*/[\w.-]+")  # ids of the hub that may be paths too
CLONE = Path(__file__).resolve().parents[2] / "assets"
FILES = ("config.json", "adapter_config.json", "model_index.json")  # every repository has one of these
NEAR = 0.7  # least similarity of names, by difflib
MOST_NAMED = 8  # folders that a message lists


def is_path(name: str) -> bool:
    """Whether the name of a model is a local path, which is never looked up on the hub.

    A hub id is one name, or two with a slash between them. Two names are a path if the first is a folder
    here, unless the hub's cache has a repository of that id.
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
    """Return the folder that is nearest to a path that does not exist; None if none is near."""
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
    """The folder in `parent` with the nearest name; None if none is near."""
    known = {folder.name.lower(): folder for folder in folders_in(parent)}
    near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=NEAR)
    return known[near[0]] if near else None


def advice(name: str) -> str:
    """Return a hint about a path that does not exist: the nearest folder, or the folders that do exist."""
    given = first_missing(Path(name).expanduser())
    if (near := nearest(name)) is not None:
        advice = f"did you mean {str(near)!r}?"
    else:
        shown = sorted(folder.name for folder in folders_in(given.parent))
        more = f" and {len(shown) - MOST_NAMED} more" if len(shown) > MOST_NAMED else ""
        advice = f"folders in {str(given.parent)!r}: {', '.join(shown[:MOST_NAMED]) + more or 'none'}"
    if REPOSITORY.fullmatch(name) and not REFERENCE.fullmatch(name):
        advice += f"; for the hub's repository of this name, run `hf download {name}` first"
    return advice


def first_missing(path: Path) -> Path:
    """The first part of a path that is not a folder."""
    while not path.parent.is_dir():
        path = path.parent
    return path


def folders_in(parent: Path) -> list[Path]:
    """The folders in `parent` that are not hidden; none if it cannot be read."""
    try:
        return [item for item in parent.iterdir() if not item.name.startswith(".") and item.is_dir()]
    except OSError:
        return []
