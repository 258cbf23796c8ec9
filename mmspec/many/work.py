"""Work that several workers share: its items, the folder of results, and the items left."""

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
    """One prompt with its images.

    Attributes:
        index: index in the whole work; it determines the file name of the result and the seed.
        prompt: text of the prompt; None for a class.
        images: paths or URLs.
        label: class label, for class-conditional models.
        later: user turns after the prompt; each is answered with the earlier turns and answers as context.
    """

    index: int
    prompt: str | None
    images: tuple[str, ...] = ()
    label: int | None = None
    later: tuple[str, ...] = ()


@dataclass(frozen=True)
class Work:
    """Model, accelerator and settings, which are sent to every worker.

    Attributes:
        model: folder or hub id, valid on the workers.
        draws: whether the model generates images.
        accelerator, options: arguments of `set_accelerator`.
        settings: keywords of every call.
        seed: seed of item 0; item i has seed + i on every worker.
        dtype: name of the data type of the weights; "auto" is that of the checkpoint.
        folder: folder of the results.
        threads: number of CPU threads of each worker.
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
        """Return a hash of everything that the results depend on."""
        own = {name: value for name, value in asdict(self).items() if name not in ("folder", "threads")}
        text = json.dumps([own, [asdict(item) for item in items]], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()


def result_file(folder: str | Path, index: int) -> Path:
    """Return the path of an item's record, which is written last: if it exists, the item is done."""
    return Path(folder) / f"{index:05}.json"


def open_folder(work: Work, items: Sequence[Item]) -> list[Item]:
    """Create the folder of a work, or resume an interrupted one; return the items without a result.

    Raises:
        InputError: the folder cannot be written, or holds other files or results of other prompts.
    """
    folder = Path(work.folder)
    mark = folder / JOB
    described = {"fingerprint": work.fingerprint(items), "items": len(items), **asdict(work)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if mark.is_file():
            stored = json.loads(mark.read_text(encoding="utf-8"))
            if stored["fingerprint"] != described["fingerprint"]:
                rule = "must not hold results of other prompts or settings"
                raise InputError("--out", str(folder), rule)
        elif any(folder.iterdir()):
            rule = "must be a new or empty folder, or one with results of the same work to resume"
            raise InputError("--out", str(folder), rule)
        else:
            with atomic_file(mark) as temporary:
                temporary.write_text(json.dumps(described, indent=2, default=str) + "\n", encoding="utf-8")
    except InputError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError("--out", str(folder), f"must be a folder that can be written ({error})") from error
    return [item for item in items if not result_file(folder, item.index).is_file()]


def finished(work: Work, items: Sequence[Item]) -> list[Json]:
    """Return the records of all finished items, in order."""
    paths = [result_file(work.folder, item.index) for item in items]
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths if path.is_file()]
