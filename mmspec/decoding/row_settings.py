"""Settings of which each row of a batch may have its own: reading and checking them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mmspec.decoding.rows import Rows, named
from mmspec.errors import InputError
from mmspec.kernels.sampling import of_rows
from mmspec.validation import is_integer, is_list, plain_numbers, require_number

#: Settings that rows of a batch may have each their own of, and what None stands for there.
ROW_SETTINGS = {"temperature": None, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "guidance_scale": None}


@dataclass(frozen=True)
class RowSettings(Rows):
    """Settings of which each row of a batch may have its own: the temperature, and what subclasses add."""

    row_fields = named("temperature")

    temperature: float | Sequence[float] = 0.0

    @property
    def greedy(self) -> bool:
        """True if all rows are."""
        return self.temperature == 0.0

    def numbers(self, name: str, like: Tensor) -> Any:
        """The number of a setting, or [B, 1, 1] of them beside `like`, where rows differ."""
        return of_rows(values_of(getattr(self, name)), like)


def check_setting(name: str, value: Any) -> None:
    """Raise InputError for a value outside the range of its setting."""
    if name == "temperature":
        require_number(name, value, 0.0, 1e4, "0 (greedy) to 10000")
        if 0.0 < value < 1e-4:
            raise InputError(name, value, "0 (greedy), or at least 0.0001")
    elif name == "guidance_scale":
        require_number(name, value, 0.0, 1e4, "0 to 10000; 1 is off")
    elif name == "top_k" and value is not None and (not is_integer(value) or value < 0):
        raise InputError(name, value, "a positive integer, or None or 0 to keep every token")
    elif name == "top_p" and value is not None:
        require_number(name, value, 0.0, 1.0, "above 0, at most 1", open_below=True)
    elif name == "min_p" and value is not None:
        require_number(name, value, 0.0, 1.0, "0 to 1")


def read_setting(name: str, given: Any, check: Callable[[str, Any], None]) -> Any:
    """Check a value, or one for each row: a tuple without None, or one value where all are equal."""
    given = plain_numbers(given)
    values = list(given) if is_list(given) else [given]
    if not values:
        raise InputError(name, given, "one value, or one for each row")
    if len(values) > 1:
        values = [ROW_SETTINGS[name] if value is None else value for value in values]
    for value in values:
        check(name, value)
    return values[0] if all(value == values[0] for value in values) else tuple(values)


def check_rows(settings: object, count: int, rows: str = "rows") -> None:
    """Raise InputError for a setting that is a list of another length than the batch, or that holds None."""
    for name in ROW_SETTINGS:
        values = getattr(settings, name, None)
        if is_list(values) and (len(values) != count or None in values):
            raise InputError(name, values, f"one value, or a list with one for each of the {count} {rows}")


def values_of(setting: Any) -> tuple[Any, ...]:
    """The one value of a checked setting, or those of the rows."""
    return setting if isinstance(setting, tuple) else (setting,)
