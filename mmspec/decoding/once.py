"""Property that is computed once, in a way that `torch.compile` can trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

Value = TypeVar("Value")


class once(Generic[Value]):  # as `property` is written
    """`functools.cached_property` without the lock of Python 3.11, which `torch.compile` cannot enter."""

    def __init__(self, func: Callable[[Any], Value]) -> None:
        self.func, self.__doc__ = func, func.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, instance: None, owner: type) -> once[Value]: ...

    @overload
    def __get__(self, instance: object, owner: type) -> Value: ...

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return self
        value = self.func(instance)
        object.__setattr__(instance, self.name, value)  # from now on found before this descriptor
        return value
