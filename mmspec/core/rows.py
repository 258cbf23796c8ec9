"""Rows of a running batch: select, concatenate and overwrite the per-row state between rounds.

Each class with per-row state lists its per-row fields; `select`, `concat` and `overwrite` split and merge
them. Tensors have their rows along dim 0, and lists have one item per row. Under guidance, the target's state
holds the batch twice, one copy after the other.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import is_dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple, Self, cast

import torch
from torch import Tensor

from mmspec.errors import InputError
from mmspec.open_types import Keywords

__all__ = ["RowField", "Rows", "concat", "lengthen", "named", "overwrite", "runs", "select"]


class RowField(NamedTuple):
    """A field with per-row values: a tensor, a list, `Rows`, or None.

    Attributes:
        name: of the field.
        fill: value that pads the shorter of two tensors [B, n, ...]; None repeats its last value.
        newest_last: whether tensors are padded in front.
    """

    name: str
    fill: float | None = 0
    newest_last: bool = False


def named(*fields: str | RowField) -> tuple[RowField, ...]:
    """List the per-row fields of a class, in addition to those of its base classes."""
    return tuple(RowField(each) if isinstance(each, str) else each for each in fields)


class Rows:
    """Base class of per-row state between rounds.

    Attributes:
        row_fields: built by `named`; None if rows stay together until all have finished.
        counters: integers that grow from round to round, and on which no computation depends.
        scratch: attributes that a round sets before it reads them, or does not read.
        converted: fields of the host that a round reads only in the form of `constants`.
    """

    row_fields: ClassVar[tuple[RowField, ...] | None] = None
    counters: ClassVar[frozenset[str]] = frozenset()
    scratch: ClassVar[frozenset[str]] = frozenset()
    converted: ClassVar[frozenset[str]] = frozenset()

    def part(self, rows: Sequence[int], count: int | None = None) -> Self:
        """Return the state of the given rows, in that order. Do not use the original afterwards.

        Args:
            rows: indices in the batch.
            count: number of rows B of the batch; None if this state holds each row once.
        """
        names = (each.name for each in self._fields())
        return self._with_rows({name: select(getattr(self, name), rows, count) for name in names})

    def joined(self, other: Self, counts: tuple[int, int]) -> Self:
        """Return these rows followed by those of `other`. Do not use the originals afterwards.

        Args:
            other: state of another batch.
            counts: number of rows of each batch.
        """
        changed = {}
        for name, fill, newest_last in self._fields():
            changed[name] = concat(getattr(self, name), getattr(other, name), counts, fill, newest_last)
        return self._with_rows(changed)

    def overwritten(self, slots: Sequence[int], other: Self, counts: tuple[int, int]) -> Self:
        """Return these rows, with those of `other` in place of some. Do not use the originals afterwards.

        Args:
            slots: indices of the rows that are replaced.
            other: state of another batch.
            counts: number of rows of each batch.
        """
        changed = {}
        for name, fill, newest_last in self._fields():
            values = getattr(self, name), slots, getattr(other, name)
            changed[name] = overwrite(*values, counts, fill, newest_last)
        return self._with_rows(changed)

    def constants(self) -> Sequence[Any]:
        """Further objects with tensors of the rows, which a round reads and does not change. Optional."""
        return ()

    def rows_changed(self) -> None:
        """Update derived state after rows have entered or left. Optional."""
        return None

    @classmethod
    def _fields(cls) -> list[RowField]:
        """Per-row fields, those of the base classes first."""
        if cls.row_fields is None:
            rule = "must be all of the batch until all have finished: the class does not define `row_fields`"
            raise InputError("rows", f"some of a {cls.__name__}", rule)
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
        values: a tensor or list of the batch's rows, `Rows`, or a dict of these; None, a number or an empty
            list is returned as it is.
        rows: indices in the batch.
        count: number of rows B of the batch, if `values` may hold the batch several times; None if once.
    """
    if isinstance(values, Rows):
        return values.part(rows, count)
    if isinstance(values, dict):
        return {key: select(each, rows, count) for key, each in values.items()}
    if values is None or isinstance(values, int | float) or len(values) == 0:
        return values
    copies = 1 if count is None else len(values) // count
    if isinstance(values, Tensor):
        each = values.unflatten(0, (copies, -1))
        # slices, because an index would be a copy from the host for each value
        return torch.cat([each[:, run] for run in runs(rows) or [slice(0)]], 1).flatten(0, 1)
    size = len(values) // copies
    return [values[copy * size + row] for copy in range(copies) for row in rows]


def runs(rows: Sequence[int]) -> list[slice]:
    """Split indices into slices of consecutive ones, in their order."""
    starts = [place for place, row in enumerate(rows) if not place or row != rows[place - 1] + 1]
    return [slice(rows[start], rows[end - 1] + 1) for start, end in pairwise([*starts, len(rows)])]


def concat(
    values: Any, others: Any, counts: tuple[int, int], fill: float | None = 0, newest_last: bool = False
) -> Any:
    """Concatenate the rows of two values of the same kind.

    Args:
        values, others: tensors [B, n, ...] and [b, m, ...], lists, `Rows`, or dicts of these with the same
            keys. The result is None if either is None.
        counts: numbers of rows B and b of the batches, which `values` and `others` may hold several times.
        fill, newest_last: padding if n and m differ; see `RowField`.
    """
    if values is None or others is None:
        return None
    if isinstance(values, Rows):
        return values.joined(others, counts)
    if isinstance(values, dict):
        return {key: concat(each, others[key], counts, fill, newest_last) for key, each in values.items()}
    if not isinstance(values, Tensor):
        copies = len(values) // counts[0]
        places = [(each, len(each) // copies * copy) for copy in range(copies) for each in (values, others)]
        return [item for each, first in places for item in each[first : first + len(each) // copies]]
    if values.dim() > 1 and values.shape[1] != others.shape[1]:
        longest = max(values.shape[1], others.shape[1])
        values, others = (lengthen(each, longest, fill, newest_last) for each in (values, others))
    copies = len(values) // counts[0]
    return torch.cat([each.unflatten(0, (copies, -1)) for each in (values, others)], 1).flatten(0, 1)


def overwrite(
    values: Any,
    slots: Sequence[int],
    others: Any,
    counts: tuple[int, int],
    fill: float | None = 0,
    newest_last: bool = False,
) -> Any:
    """Replace rows of a value by those of another one of the same kind.

    Args:
        values, others: see `concat`.
        slots: [b] indices of the rows of `values` that are replaced, ascending.
        counts, fill, newest_last: see `concat`.
    """
    if values is None or others is None:
        return None
    if isinstance(values, Rows):
        return values.overwritten(slots, others, counts)
    if isinstance(values, dict):
        both = {key: (each, slots, others[key]) for key, each in values.items()}
        return {key: overwrite(*each, counts, fill, newest_last) for key, each in both.items()}
    copies = len(values) // counts[0]
    places = [copy * counts[0] + slot for copy in range(copies) for slot in slots]
    if not isinstance(values, Tensor):
        changed = list(values)
        for place, item in zip(places, others, strict=True):
            changed[place] = item
        return changed
    if values.dim() > 1 and values.shape[1] != others.shape[1]:
        longest = max(values.shape[1], others.shape[1])
        values, others = (lengthen(each, longest, fill, newest_last) for each in (values, others))
    if not values.numel():  # no launch for an empty copy
        return values
    pieces, first, kept = [], 0, 0
    for run in runs(places):
        end = first + run.stop - run.start
        pieces += [values[kept : run.start], others[first:end]]
        first, kept = end, run.stop
    return torch.cat([*pieces, values[kept:]])  # one launch for each value


def lengthen(values: Tensor, length: int, fill: float | None = 0, newest_last: bool = False) -> Tensor:
    """Pad rows [B, n, ...] to [B, length, ...]; see `RowField`."""
    if values.shape[1] == length:
        return values
    size = values.shape[0], length - values.shape[1], *values.shape[2:]
    more = values[:, -1:].expand(size) if fill is None else values.new_full(size, fill)
    return torch.cat([more, values] if newest_last else [values, more], 1)
