"""Rows of training data: checks of their columns, and handling of rows that cannot be used."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from mmspec.errors import InputError, MediaError

__all__ = ["DamagedFiles", "check_columns", "check_count", "is_given", "read_all"]

logger = logging.getLogger(__name__)

ABOUT = frozenset(  # columns about the origin of a row, which are ignored
    (
        "id", "idx", "index", "uid", "uuid", "conversation_id", "image_id", "question_id", "sample_id",
        "model", "temperature", "source", "dataset", "dataset_name", "data_source", "origin", "url",
        "license", "task", "type", "category", "topic", "tag", "tags", "split", "language", "lang", "width",
        "height", "height_list", "width_list", "length", "metadata", "meta",
    )
)  # fmt: skip
NAMED_ERRORS = 3  # number of unusable rows that a message names
DAMAGED_ROWS, DAMAGED_SHARE = 4, 0.01  # limits of skipped rows with damaged files: a number and a share
T = TypeVar("T")


def is_given(value: object) -> bool:
    """Whether a value is neither None nor an empty string, list, tuple or dict."""
    return value is not None and not (isinstance(value, str | list | tuple | dict) and not value)


def check_columns(row: Mapping[str, object], known: Iterable[str], where: str, rule: str) -> None:
    """Check that a row has known columns only; empty columns and columns about its origin are ignored.

    Raises:
        InputError: the row has an unknown column; the error has the given rule.
    """
    known = {*known, *ABOUT}
    for name, value in row.items():
        if name not in known and is_given(value):
            raise InputError(where, f"the unknown column {name!r}", rule)


def read_all(named: Iterable[tuple[str, Any]], read: Callable[[Any, str], T]) -> list[T]:
    """Read all rows, and raise one error for all that cannot be used, which names the first few.

    Args:
        named: pairs of (name of the row in messages, row).
        read: function from (row, name) to the parsed row, which raises InputError.

    Raises:
        InputError: a row cannot be used.
    """
    found, wrong = [], list[InputError]()
    for where, row in named:
        try:
            found.append(read(row, where))
        except InputError as error:
            wrong.append(error)
    if len(wrong) == 1:
        raise wrong[0]
    if wrong:
        more = len(wrong) - NAMED_ERRORS
        reasons = [*map(str, wrong[:NAMED_ERRORS]), *([f"and {more} more"] if more > 0 else [])]
        rule = f"must contain usable rows only: {'; '.join(reasons)}"
        raise InputError("data", f"{len(wrong)} rows that cannot be used", rule)
    return found


def check_count(rows: Sequence[object], held_out: int) -> None:
    """Raise InputError unless there are more rows than are held out."""
    if len(rows) <= held_out:
        rule = f"must have more than the {held_out} rows that are held out"
        raise InputError("data", f"{len(rows)} rows", rule)


class DamagedFiles:
    """Skips rows whose files cannot be read, with a warning for each, and raises if they are too many.

    Whether a row is skipped depends on its files alone, so that a resumed training skips the same rows.

    Args:
        count: total number of rows.

    Attributes:
        found: error texts by the name of the row.
    """

    def __init__(self, count: int) -> None:
        self.count, self.found = count, dict[str, str]()

    def opened(self, where: str, load: Callable[[], T]) -> T | None:
        """Load the files of a row; return None, and log a warning the first time, if they cannot be read.

        Raises:
            MediaError: the files of more than four rows, and of more than 1 % of all rows, cannot be read.
        """
        if where in self.found:
            return None
        try:
            return load()
        except MediaError as error:
            self.found[where] = str(error)
            logger.warning(
                "%s; the row is skipped (%d of %d rows so far)", error, len(self.found), self.count
            )
            if len(self.found) > max(DAMAGED_ROWS, DAMAGED_SHARE * self.count):
                reasons = "; ".join([*self.found.values()][:NAMED_ERRORS])
                got = f"{len(self.found)} of {self.count} rows with files that cannot be read"
                rule = f"must have at most {DAMAGED_ROWS} rows, or 1 %, with damaged files: {reasons}"
                raise MediaError("data", got, rule) from error
            return None
