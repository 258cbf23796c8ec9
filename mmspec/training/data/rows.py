"""Rows of training data: which of their columns are read, and what happens to those that cannot be used."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from mmspec.errors import InputError, MediaError

__all__ = ["DamagedFiles", "check_columns", "check_count", "is_given", "read_all"]

logger = logging.getLogger(__name__)

ABOUT = frozenset(  # columns that say where a row is from: nothing of them is to be learnt
    (
        "id", "idx", "index", "uid", "uuid", "conversation_id", "image_id", "question_id", "sample_id",
        "model", "temperature", "source", "dataset", "dataset_name", "data_source", "origin", "url",
        "license", "task", "type", "category", "topic", "tag", "tags", "split", "language", "lang", "width",
        "height", "height_list", "width_list", "length", "metadata", "meta",
    )
)  # fmt: skip
NAMED_ERRORS = 3  # of the rows that cannot be used
DAMAGED_ROWS, DAMAGED_SHARE = 4, 0.01  # rows with damaged files that are skipped: so many, or that share
T = TypeVar("T")


def is_given(value: object) -> bool:
    """True unless a value is None, or a text, list or table of nothing."""
    return value is not None and not (isinstance(value, str | list | tuple | dict) and not value)


def check_columns(row: Mapping[str, object], known: Iterable[str], where: str, allowed: str) -> None:
    """Refuse columns that nothing reads; those that are empty, or about the row itself, may be there.

    Raises:
        InputError: there is such a column.
    """
    known = {*known, *ABOUT}
    for name, value in row.items():
        if name not in known and is_given(value):
            raise InputError(where, f"the column {name!r}, which would not be read", allowed)


def read_all(named: Iterable[tuple[str, Any]], read: Callable[[Any, str], T]) -> list[T]:
    """Read all rows; where some cannot be used, the first few of them are named together.

    Args:
        named: (name of the row in messages, row).
        read: (row, name) -> what is in it; raises InputError.

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
        raise InputError("data", f"{len(wrong)} rows that cannot be used", "; ".join(reasons))
    return found


def check_count(rows: Sequence[object], held_out: int) -> None:
    """Raise InputError unless there are more rows than are held out."""
    if len(rows) <= held_out:
        rule = f"must have more than the {held_out} rows that are held out"
        raise InputError("data", f"{len(rows)} rows", rule)


class DamagedFiles:
    """Rows whose files cannot be read: each is named and skipped, until they are too many.

    Whether a row is skipped depends on its files alone, so that a resumed training skips the same ones.

    Args:
        count: rows that there are.

    Attributes:
        found: what is wrong, by the name of the row.
    """

    def __init__(self, count: int) -> None:
        self.count, self.found = count, dict[str, str]()

    def opened(self, where: str, load: Callable[[], T]) -> T | None:
        """The files of a row, loaded; None, with a warning at first, if they cannot be read.

        Raises:
            MediaError: more than four rows, and than a hundredth of all, have such files.
        """
        if where in self.found:
            return None
        try:
            return load()
        except MediaError as error:
            self.found[where] = str(error)
            logger.warning("%s; the row is skipped, as %d of %d so far", error, len(self.found), self.count)
            if len(self.found) > max(DAMAGED_ROWS, DAMAGED_SHARE * self.count):
                reasons = "; ".join([*self.found.values()][:NAMED_ERRORS])
                got = f"{len(self.found)} of {self.count} rows with files that cannot be read"
                allowed = f"at most {DAMAGED_ROWS}, or 1 %, are skipped: {reasons}"
                raise MediaError("data", got, allowed) from error
            return None
