"""Work that many workers share: its items, the folder of their results, and what is still to be done."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from mmspec.atomic_file import atomic_file
from mmspec.errors import InputError
from mmspec.open_types import Json, Keywords

__all__ = ["Item", "Work", "finished", "open_folder", "result_file"]

JOB = "job.json"


@dataclass(frozen=True)
class Item:
    """One prompt, and what a pipeline is asked for it.

    Attributes:
        index: in the whole work; results are named by it, and the seed follows from it.
        prompt: in words; None for a class.
        later: turns of the user's after the prompt, which see the answers to earlier ones.
        images: paths or addresses.
        label: the class to draw, for models of classes.
    """

    index: int
    prompt: str | None
    images: tuple[str, ...] = ()
    label: int | None = None
    later: tuple[str, ...] = ()


@dataclass(frozen=True)
class Work:
    """Model, accelerator and settings that every worker loads; it travels to them.

    Attributes:
        model: folder or hub id, as workers find it.
        draws: whether it gives images.
        accelerator, options: of `set_accelerator`.
        settings: keywords of every call.
        seed: of item 0; item i has seed + i, whichever worker decodes it.
        dtype: of the weights, by name; "auto" is the checkpoint's own.
        folder: of the results.
    """

    model: str
    draws: bool
    accelerator: str
    options: Keywords
    settings: Keywords
    seed: int
    dtype: str
    folder: str
    threads: int = field(default=1, compare=False)

    def fingerprint(self, items: Sequence[Item]) -> str:
        """A name for everything that results depend on."""
        own = {name: value for name, value in asdict(self).items() if name not in ("folder", "threads")}
        text = json.dumps([own, [asdict(item) for item in items]], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()


def result_file(folder: str | Path, index: int) -> Path:
    """The record of an item, which is written last: where it is, the item is done."""
    return Path(folder) / f"{index:05}.json"


def open_folder(work: Work, items: Sequence[Item]) -> list[Item]:
    """Make the folder of a work, or go on with one that was interrupted; returns the items that are left.

    Raises:
        InputError: the folder cannot be written, or holds something else, such as results of other prompts.
    """
    folder = Path(work.folder)
    mark = folder / JOB
    described = {"fingerprint": work.fingerprint(items), "items": len(items), **asdict(work)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if mark.is_file():
            stored = json.loads(mark.read_text(encoding="utf-8"))
            if stored["fingerprint"] != described["fingerprint"]:
                allowed = "a folder that has no results of other prompts or settings"
                raise InputError("--out", str(folder), allowed)
        elif any(folder.iterdir()):
            raise InputError("--out", str(folder), "a folder that is new or empty, or one to go on with")
        else:
            with atomic_file(mark) as temporary:
                temporary.write_text(json.dumps(described, indent=2, default=str) + "\n", encoding="utf-8")
    except InputError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError("--out", str(folder), f"a folder that can be written ({error})") from error
    return [item for item in items if not result_file(folder, item.index).is_file()]


def finished(work: Work, items: Sequence[Item]) -> list[Json]:
    """The records of all items that are done, in their order."""
    paths = [result_file(work.folder, item.index) for item in items]
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths if path.is_file()]
