"""Readers of prompt files in the formats of published prompt sets.

| set | file | recognised by |
|---|---|---|
| MMSpec (2603.14989), Spec-Bench (2401.07851) | JSON lines | `turns`; images lie beside it or in `images` |
| recordings, as `mmspec train` reads them | JSON lines | `audio` without a prompt; `text` has its words |
| COCO captions | JSON | `images` and `annotations`; files in a folder of the split beside `annotations` |
| GenEval (2310.11513) | JSON lines | `prompt`, with `tag` |
| others' | a JSON list, or JSON lines | rows as those above, or strings |
| PartiPrompts (2206.10789) | tab-separated | the header's `Prompt` |
| DrawBench (2205.11487) | comma-separated | the header's `Prompts` |
| others' | `.csv`, `.tsv` | the header's `caption`, `text` or `question`, if it has one of them |
| anything else | text, without a suffix or with a text suffix | one prompt per line |

Files with other suffixes are rejected, because their lines are not prompts.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from mmspec.errors import InputError
from mmspec.evaluation.examples import Example
from mmspec.open_types import Json
from mmspec.text_file import json_lines, read_text

__all__ = ["json_rows", "read_prompt_file"]

COCO_PROMPT = "Provide a detailed description of the given image."  # of FLASH's evaluation on COCO
COLUMNS = ("prompt", "prompts")
OTHER_COLUMNS = (
    "caption",
    "captions",
    "text",
    "question",
)  # accepted only in files with a table suffix
IMAGE_COLUMNS = ("image", "images")
TABLES = {".csv": ",", ".tsv": "\t", ".tab": "\t"}
JSON = (".json", ".jsonl", ".ndjson")
TEXT = ("", ".txt", ".text", ".prompt", ".prompts", ".list", ".lst")
UNREAD = ("video", "videos", "audio", "audios", "system", "tools")  # ignoring them would change the prompt
MAX_BYTES = 2_000_000_000
MAX_HEADER = 10_000  # characters; a longer first line is not a header

SPEC_BENCH = {"translation", "summarization", "qa", "math_reasoning", "rag"}  # five of its six tasks
# The sixth, in eight categories.
MT_BENCH = {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}


def read_prompt_file(
    path: str | Path, count: int | None = None, *, evenly: bool = False, recordings: bool = False
) -> list[Example]:
    """Read the first `count` prompts of a file; the format is detected from its content.

    Args:
        path: the file.
        count: number of prompts; None reads all.
        evenly: take equal numbers of prompts from each category of JSON lines, as far as they last.
            Spec-Bench's eight MT-Bench categories then count as one, as in its own evaluation.
        recordings: whether a row may be a recording instead of a prompt.

    Raises:
        InputError: the file is missing, empty or of an unknown format, or a line is invalid or names a
            missing file; the message contains the line number.
    """
    path = Path(path)
    try:
        if path.stat().st_size > MAX_BYTES:
            raise InputError("prompt file", str(path), f"must have at most {MAX_BYTES:,} bytes")
    except OSError as error:
        raise InputError("prompt file", str(path), f"cannot be read ({type(error).__name__})") from error
    text = read_text(path, "prompt file")
    suffix, first = path.suffix.lower(), next((line for line in lines_of(text) if line.strip()), "")
    is_list = first.lstrip().startswith("[") and (suffix not in TEXT or _parsed(text) is not None)
    if first.lstrip().startswith("{") or is_list:
        whole = _parsed(text) if suffix == ".json" else None
        if isinstance(whole, dict) and {"images", "annotations"} <= whole.keys():
            found = _captioned_images(path, whole)
        else:
            found = _even_rows(path, text, count) if evenly else _rows(path, text)
    elif (found_in := _separator(first)) is not None:
        found = _table(path, text, found_in)
    elif suffix in TABLES:
        found = _table(path, text, TABLES[suffix], OTHER_COLUMNS)
    elif suffix in JSON:
        found = _rows(path, text)
    elif suffix in TEXT:
        found = _plain(path, text)
    else:
        rule = f"must be a .txt file with one prompt per line, or one of {', '.join((*JSON, *TABLES))}"
        raise InputError("prompt file", str(path), rule)
    try:
        examples = list(islice(found, count))
    except csv.Error as error:
        raise InputError("prompt file", str(path), f"is not a valid table ({error})") from error
    if not examples:
        raise InputError("prompt file", str(path), "must contain at least one prompt")
    for example in examples if not recordings else ():
        if example.audio is not None:
            raise InputError(example.identifier, example.audio, "must be a prompt, not a recording")
    return examples


def _separator(header: str) -> str | None:
    """The separator of a table whose header has a prompt column; None for other text."""
    for separator in "\t,":
        names = next(csv.reader([header[:MAX_HEADER]], delimiter=separator))
        if any(name.strip().lower() in COLUMNS for name in names[:8]):
            return separator if separator in header else None
    return None


def lines_of(text: str) -> Iterator[str]:
    r"""The lines of a text, split at \n, \r\n and \r only."""
    return io.StringIO(text, newline="")


def _plain(path: Path, text: str) -> Iterable[Example]:
    for number, line in enumerate(lines_of(text), start=1):
        if line.strip():
            yield Example((line.strip(),), identifier=f"{path.name}:{number}")


def _table(path: Path, text: str, separator: str, others: Sequence[str] = ()) -> Iterable[Example]:
    reader = csv.reader(lines_of(text), delimiter=separator, quoting=csv.QUOTE_MINIMAL)
    rows = (row for row in reader if any(cell.strip() for cell in row))
    header = [name.strip().lower() for name in next(rows, [])]
    named = [name for name in header if name in COLUMNS][:1] or [name for name in header if name in others]
    if len(named) != 1:
        rule = f"must have a header with the column 'prompt', or with one of {', '.join(OTHER_COLUMNS)}"
        raise InputError(path.name, separator.join(header), rule)
    for row in rows:
        where = f"{path.name}:{reader.line_num}"
        cells: dict[str, str] = {}
        for name, cell in zip(header, row, strict=False):
            cells.setdefault(name, cell.strip())
        if not cells.get(named[0]):
            raise InputError(where, separator.join(row), f"must have a value in the column {named[0]!r}")
        entry = {name: cells[name] for name in (*IMAGE_COLUMNS, *UNREAD) if cells.get(name)}
        entry |= {"prompt": cells[named[0]], "id": where}
        yield _conversation(entry, where, path.parent, cells.get("category", ""))


def json_rows(path: Path, text: str) -> Iterable[tuple[str, Any]]:
    """The rows of a JSON list or of JSON lines, each with its name for error messages.

    Raises:
        InputError: a line is not valid JSON.
    """
    whole = _parsed(text)
    if isinstance(whole, list):
        return [(f"{path.name}[{index}]", entry) for index, entry in enumerate(whole)]
    rule = "must be a JSON object; the file must be JSON lines or a JSON list"
    return json_lines(text, partial("{}:{}".format, path.name), rule)


def _rows(path: Path, text: str) -> Iterable[Example]:
    for where, entry in json_rows(path, text):
        yield _conversation(entry, where, path.parent, _category(entry))


def _even_rows(path: Path, text: str, count: int | None) -> Iterable[Example]:
    rows = list(json_rows(path, text))
    categories = folded([_category(entry) for _, entry in rows])
    for place in chosen_evenly(categories, len(rows) if count is None else count):
        where, entry = rows[place]
        yield _conversation(entry, where, path.parent, categories[place])


def _category(entry: object) -> str:
    known = entry if isinstance(entry, dict) else {}
    return str(known.get("category") or known.get("topic") or known.get("tag") or "")


def folded(categories: list[str]) -> list[str]:
    """Rename MT-Bench's categories to `mt_bench`, if the file is Spec-Bench."""
    if not set(categories) >= SPEC_BENCH:
        return categories
    return ["mt_bench" if category in MT_BENCH else category for category in categories]


def chosen_evenly(categories: Sequence[str], count: int) -> list[int]:
    """Indices of the first rows of every category, in equal numbers as far as they last."""
    before: Counter[str] = Counter()
    turns = []
    for place, category in enumerate(categories):
        turns.append((before[category], place))
        before[category] += 1
    return sorted(place for _, place in sorted(turns)[:count])


def _conversation(entry: object, where: str, folder: Path, category: str) -> Example:
    entry = {"prompt": entry} if isinstance(entry, str) else entry
    if isinstance(entry, dict) and "audio" in entry and not entry.keys() & {"turns", "prompt"}:
        return _recording(entry, where, folder, category)
    if not isinstance(entry, dict) or not entry.keys() & {"turns", "prompt"}:
        raise InputError(where, entry, "must be an object with the key 'turns' or 'prompt'")
    for unread in UNREAD:
        if entry.get(unread):
            raise InputError(f"{where}: {unread}", entry[unread], "is not supported; remove it from the row")
    turns = entry.get("turns", entry.get("prompt"))
    turns = [turns] if isinstance(turns, str) else turns
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
        raise InputError(f"{where}: turns", turns, "must be a list of at least one string")
    images = entry.get("image", entry.get("images"))
    images = [] if images is None else [images] if isinstance(images, str) else images
    if not isinstance(images, list) or not all(isinstance(image, str) for image in images):
        raise InputError(f"{where}: image", images, "must be a path, a URL, or a list of them")
    name = entry.get("id", entry.get("question_id", where))
    places = (folder, folder / "images")
    located = tuple(_located(image, f"{where}: image", places) for image in images)
    return Example(tuple(turns), located, category=category, identifier=str(name))


def _recording(entry: Json, where: str, folder: Path, category: str) -> Example:
    audio, text = entry["audio"], entry.get("text")
    if not isinstance(audio, str):
        raise InputError(f"{where}: audio", audio, "must be a path or a URL")
    if not isinstance(text, str | None):
        raise InputError(f"{where}: text", text, "must be a string, the words of the recording")
    located = _located(audio, f"{where}: audio", (folder,))
    name = str(entry.get("id", where))
    return Example((), category=category, identifier=name, audio=located, transcript=text)


def _parsed(text: str) -> Any:
    """The value of a JSON text; None if it is not valid JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _captioned_images(path: Path, whole: Json) -> Iterable[Example]:
    """Each image of COCO captions, with the prompt of FLASH's evaluation."""
    split = path.stem.removeprefix("captions_")
    folders = (path.parent.parent / split, path.parent / split, path.parent / "images", path.parent)
    for index, image in enumerate(whole["images"]):
        where = f"{path.name}: images[{index}]"
        name = image.get("file_name") if isinstance(image, dict) else None
        if not isinstance(name, str):
            raise InputError(where, image, "must be an object with a file_name")
        yield Example(
            (COCO_PROMPT,),
            (_located(name, where, folders),),
            category="coco",
            identifier=str(image.get("id", name)),
        )


def _located(image: str, where: str, places: Sequence[Path]) -> str:
    if image.startswith(("http://", "https://", "data:")):
        return image
    found = next(filter(os.path.isfile, (str(place / image) for place in places)), None)
    if found is None:
        rule = "must be a URL, or a file in " + " or in ".join(map(str, places))
        raise InputError(where, image, rule)
    return found
