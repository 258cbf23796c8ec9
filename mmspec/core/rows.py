"""Rows of a running batch: taking some out, and putting others in, between rounds.

What is kept of each row between rounds says which of its fields hold something for each row; all is taken
apart and put together by `select` and `concat`. Tensors hold rows along dim 0, lists an item for each. Under
guidance, what the target reads twice holds the batch twice, one after another.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import is_dataclass, replace
from typing import Any, ClassVar, NamedTuple, Self, cast

import torch
from torch import Tensor

from mmspec.errors import InputError
from mmspec.open_types import Keywords

__all__ = ["RowField", "Rows", "concat", "lengthen", "named", "select"]


class RowField(NamedTuple):
    """A field that holds something for each row: a tensor, a list, `Rows`, or None.

    Attributes:
        name: of the field.
        fill: what lengthens the shorter of tensors [B, n, ...] whose n differ; None repeats their last value.
        newest_last: whether they are lengthened in front.
    """

    name: str
    fill: float | None = 0
    newest_last: bool = False


def named(*fields: str | RowField) -> tuple[RowField, ...]:
    """Name the fields of a class that hold something for each row, besides those of its base classes."""
    return tuple(RowField(each) if isinstance(each, str) else each for each in fields)


class Rows:
    """Base of what is kept of each row of a batch between rounds.

    Attributes:
        row_fields: by `named`; None where rows stay together until all have ended.
    """

    row_fields: ClassVar[tuple[RowField, ...] | None] = None

    def part(self, rows: Sequence[int], count: int | None = None) -> Self:
        """Return what is kept of some rows, in that order; the whole is not used any more.

        Args:
            rows: of the batch.
            count: number of rows B of the batch; None where each stands here once.
        """
        names = (each.name for each in self._fields())
        return self._with_rows({name: select(getattr(self, name), rows, count) for name in names})

    def joined(self, other: Self, counts: tuple[int, int]) -> Self:
        """Return these rows followed by those of another, which are not used any more by themselves.

        Args:
            other: of another batch.
            counts: number of rows of either batch.
        """
        changed = {}
        for name, fill, newest_last in self._fields():
            changed[name] = concat(getattr(self, name), getattr(other, name), counts, fill, newest_last)
        return self._with_rows(changed)

    def rows_changed(self) -> None:
        """Set up anew what depends on the rows, after some were taken out or put in. Optional."""
        return None

    @classmethod
    def _fields(cls) -> list[RowField]:
        """Fields that hold something for each row, those of the base classes first."""
        if cls.row_fields is None:
            allowed = "all of the batch, until all rows have ended: it does not name its `row_fields`"
            raise InputError("rows", f"some of a {cls.__name__}", allowed)
        return [each for base in reversed(cls.__mro__) for each in vars(base).get("row_fields") or ()]

    def _with_rows(self, changed: Keywords) -> Self:
        this: Any = self
        if is_dataclass(type(this)):
            this = replace(this, **changed)
        else:
            this = copy.copy(this)
            vars(this).update(changed)
        this.rows_changed()
        return cast(Self, this)


def select(values: Any, rows: Sequence[int], count: int | None = None) -> Any:
    """Select rows of a value, in that order.

    Args:
        values: of a batch: a tensor or list of its rows, or `Rows`; None, a number or an empty list for all.
        rows: of the batch.
        count: number of rows B of the batch, which stands here as often as it fits; None if once.
    """
    if isinstance(values, Rows):
        return values.part(rows, count)
    if values is None or isinstance(values, int | float) or len(values) == 0:
        return values
    copies = 1 if count is None else len(values) // count
    if isinstance(values, Tensor):
        index = torch.tensor(rows, dtype=torch.long, device=values.device)
        return values.unflatten(0, (copies, -1)).index_select(1, index).flatten(0, 1)
    size = len(values) // copies
    return [values[copy * size + row] for copy in range(copies) for row in rows]


def concat(
    values: Any, others: Any, counts: tuple[int, int], fill: float | None = 0, newest_last: bool = False
) -> Any:
    """Put the rows of a value behind those of another of the same kind.

    Args:
        values, others: tensors [B, n, ...] and [b, m, ...], lists, or `Rows`. None if either is.
        counts: numbers of rows B and b of the batches, which stand here as often as they fit.
        fill, newest_last: as of `RowField`, where n and m differ.
    """
    if values is None or others is None:
        return None
    if isinstance(values, Rows):
        return values.joined(others, counts)
    if not isinstance(values, Tensor):
        copies = len(values) // counts[0]
        places = [(each, len(each) // copies * copy) for copy in range(copies) for each in (values, others)]
        return [item for each, first in places for item in each[first : first + len(each) // copies]]
    if values.dim() > 1 and values.shape[1] != others.shape[1]:
        longest = max(values.shape[1], others.shape[1])
        values, others = (lengthen(each, longest, fill, newest_last) for each in (values, others))
    copies = len(values) // counts[0]
    return torch.cat([each.unflatten(0, (copies, -1)) for each in (values, others)], 1).flatten(0, 1)


def lengthen(values: Tensor, length: int, fill: float | None = 0, newest_last: bool = False) -> Tensor:
    """Lengthen rows [B, n, ...] to [B, length, ...]; see `RowField`."""
    size = values.shape[0], length - values.shape[1], *values.shape[2:]
    more = values[:, -1:].expand(size) if fill is None else values.new_full(size, fill)
    return torch.cat([more, values] if newest_last else [values, more], 1)
